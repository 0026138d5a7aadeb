"""MNI152: the average T1 image of 152 adult brains, with maps of grey and white matter, as nilearn ships it.

(c) McConnell Brain Imaging Centre, Montreal Neurological Institute, McGill University: Fonov et al., NeuroImage 54
(2011). 1 mm, 197 x 233 x 189 voxels.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.tensor import TensorSpec
from layerwise.train.data import Data
from layerwise.train.sources import Batch
from layerwise.train.task import TrainingTask
from layerwise.volumes.reading import BatchReader, BoxInput
from layerwise.volumes.sources import Array, StackedArray

TRAIN, HELD_OUT = 256, 32  # crops
CLASSES = ("background", "grey matter", "white matter")
TRAINED = 2 / 3  # of the slices along d; the rest is held out

Brain = tuple[NDArray[np.float32], NDArray[np.int64]]  # an image, and the class of each of its voxels


def read_brain() -> Brain:
    """The image (1, d, h, w), of mean 0 and deviation 1, and the class of every voxel, (d, h, w), of `CLASSES`.

    A voxel is of the matter that it has more than half of. LayerwiseError where nilearn is not installed.
    """
    spec = importlib.util.find_spec("nilearn")
    if spec is None or spec.origin is None:
        raise LayerwiseError("MNI152 comes with nilearn: pip install 'layerwise[volumes]'")
    import nibabel
    from nibabel.filebasedimages import ImageFileError

    def read(name: str) -> NDArray[np.float32]:
        assert spec is not None
        path = (
            Path(str(spec.origin)).parent
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


@dataclass(frozen=True, slots=True)
class Crops:
    """Crops of an image by number: where one lies, and how it is mirrored, follows from the seed and its number."""

    reading: BatchReader  # of an image and its classes
    count: int

    def batch(self, numbers: Tensor) -> Batch:
        """Whole ones."""
        shapes = [(len(numbers), *feed.spec.shape[1:]) for feed in self.reading.inputs]
        return self.boxes(numbers, *(Box.full(shape) for shape in shapes))

    def boxes(self, numbers: Tensor, *boxes: Box) -> Batch:
        """Reads boxes of the image and of the classes of these samples, and no more."""
        inputs = tuple(replace(feed, box=box) for feed, box in zip(self.reading.inputs, boxes, strict=True))
        image, classes = replace(self.reading, inputs=inputs).batch(numbers.tolist(), epoch=0)
        return (image,), classes


def mni152(task: TrainingTask, seed: int) -> Data:
    """Crops of the MNI152 template to train on, and others that are held out.

    LayerwiseError where they are not what the model takes.
    """
    shapes = ", ".join(f"{feed.name} {feed.spec.describe()}" for feed in task.inputs)
    first = task.inputs[0]
    if len(task.inputs) > 1 or not first.spec.differentiable or len(first.sample) != 4 or first.sample[0] != 1:
        raise LayerwiseError(f"mni152 is volumes: the model must have one input, (n, 1, d, h, w), not {shapes}")
    if not task.labels or task.target_sample != first.sample[1:]:
        raise LayerwiseError("mni152 has a class for each voxel, which is not the model's target")
    if task.classes < len(CLASSES):
        raise LayerwiseError(f"mni152 has {len(CLASSES)} classes, the model's output has {task.classes}")
    train, held_out = parted(read_brain(), task.target_sample[0])
    room = train[1].shape
    if any(taken > extent for taken, extent in zip(task.target_sample, room, strict=True)):
        extents = " x ".join(map(str, room))
        raise LayerwiseError(f"mni152 has {extents} voxels to train on, and the model takes more: {shapes}")
    of_train, of_held_out = _crops(task, train, TRAIN, "dhw", seed), _crops(task, held_out, HELD_OUT, "", 0)
    return Data("mni152", task, of_train, of_held_out, CLASSES)


def _crops(task: TrainingTask, arrays: Sequence[Array], count: int, flip: str, seed: int) -> Crops:
    image = task.inputs[0].spec
    target = TensorSpec(image.shape[:1] + image.shape[2:], image.dims[:1] + image.dims[2:], "int64")
    inputs = []
    for spec, array, name in zip((image, target), arrays, ("image", "classes"), strict=True):
        repeated = np.broadcast_to(array, (count, *array.shape))
        inputs.append(BoxInput(name, spec, Box.full(spec.shape), StackedArray(repeated, name)))
    return Crops(BatchReader(tuple(inputs), "random", flip, None, seed), count)
