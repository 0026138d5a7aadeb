"""MNI152: the average T1 image of 152 adult brains, with maps of grey and white matter, as nilearn ships it.

(c) McConnell Brain Imaging Centre, Montreal Neurological Institute, McGill University: Fonov et al., NeuroImage 54
(2011). 1 mm, 197 x 233 x 189 voxels.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from layerwise.errors import LayerwiseError

CLASSES = ("background", "grey matter", "white matter")
TRAINED = 2 / 3  # of the slices along d; the rest is held out

Brain = tuple[NDArray[np.float32], NDArray[np.int64]]  # an image, and the class of each of its voxels


def mni152() -> Brain:
    """The image (1, d, h, w), of mean 0 and deviation 1, and the class of every voxel, (d, h, w), of `CLASSES`.

    A voxel is of the matter that it has more than half of. LayerwiseError where nilearn is not installed.
    """
    found = importlib.util.find_spec("nilearn")
    if found is None or found.origin is None:
        raise LayerwiseError("MNI152 comes with nilearn: pip install 'layerwise[volumes]'")
    import nibabel
    from nibabel.filebasedimages import ImageFileError

    def read(name: str) -> NDArray[np.float32]:
        assert found is not None
        path = (
            Path(str(found.origin)).parent
            / "datasets"
            / "data"
            / f"mni_icbm152_{name}_tal_nlin_sym_09a_converted.nii.gz"
        )
        try:
            return np.asarray(nibabel.load(path).dataobj, np.float32)
        except (OSError, ImageFileError) as error:
            raise LayerwiseError(f"nilearn has no readable {path.name}: {error}") from error

    image, grey, white = read("t1"), read("gm"), read("wm")
    classes = np.zeros(image.shape, np.int64)
    for number, part in enumerate((grey, white), start=1):
        classes[part > part.max() / 2] = number
    return ((image - image.mean()) / image.std())[None], classes


def parted(brain: Brain, extent: int) -> tuple[Brain, Brain]:
    """The slices along d to train on, and those that are held out, to which air is added where they are fewer than
    `extent`: the last slice, again and again.
    """
    image, classes = brain
    cut = round(classes.shape[0] * TRAINED)
    missing = max(extent - (classes.shape[0] - cut), 0)
    more = [(0, missing), (0, 0), (0, 0)]
    held_out = np.pad(image[:, cut:], [(0, 0), *more], "edge"), np.pad(classes[cut:], more, "edge")
    return (image[:, :cut], classes[:cut]), held_out
