"""PreparedCase: a case's images as nnU-Net's preprocessing makes them, in a file of which ranks read boxes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.integrations.nnunet.folder import TrainedFolder
from layerwise.volumes.sources import foreign

Volume = NDArray[Any]
ANISOTROPY = 3  # of a spacing, beyond which nnU-Net resamples its coarsest axis by itself
SMALLEST = 1e-8  # standard deviation that is divided by
RESAMPLING = "resample_data_or_seg_to_shape"  # the function that is done here


@dataclass(frozen=True, slots=True)
class PreparedCase:
    """What was prepared of a case, and what it takes to put labels back. Dimensions are in the network's order.

    Attributes:
        file: The prepared images, .npy, (channels, ...).
        shape: Of the case's images.
        lo: Where the part that is not zero begins in that.
        cropped: Its extents: those that labels are resampled to.
        orders: By dimension, how logits are resampled to them: linearly (1) or to the nearest (0).
    """

    file: str
    shape: tuple[int, ...]
    lo: tuple[int, ...]
    cropped: tuple[int, ...]
    orders: tuple[int, ...]

    def labelled(self, cropped: Volume) -> Volume:
        """Labels of all of the case."""
        made = np.zeros(self.shape, cropped.dtype)
        made[Box(self.lo, tuple(a + n for a, n in zip(self.lo, self.cropped, strict=True))).slices()] = cropped
        return made


def prepare(trained: TrainedFolder, files: Sequence[str], into: Path) -> PreparedCase:
    """Writes a case's images into `into`: read, cropped, normalised and resampled as nnU-Net does it, in its order.

    files: one a channel. LayerwiseError where that cannot be.
    """
    images, spacing = _read(files, trained.channels)
    forward = [int(axis) for axis in trained.plans["transpose_forward"]]
    images = images.transpose(0, *(1 + axis for axis in forward))
    spacing = tuple(spacing[axis] for axis in forward)
    shape = images.shape[1:]
    inside: Volume = np.any(images, axis=0)
    if not inside.any():
        raise LayerwiseError("its images are zero everywhere")
    box = _around(inside)
    images = np.ascontiguousarray(images[(slice(None), *box)])
    _normalise(trained, images, inside, box)
    cropped = images.shape[1:]
    wanted = tuple(map(float, trained.configuration["spacing"]))
    resized = tuple(round(old / new * n) for old, new, n in zip(spacing, wanted, cropped, strict=True))
    orders = (1,) * len(cropped)
    if resized != cropped:
        images = _resample(trained.configuration, images, resized, spacing, wanted)
        order, along = _orders(trained.configuration, "probabilities", wanted, spacing)
        orders = tuple(order if axis in along else 0 for axis in range(len(cropped)))
        if order != 1:
            raise LayerwiseError(f"the plans resample logits with order {order}, and layerwise with order 1")
    np.save(into, images)
    return PreparedCase(os.fspath(into), shape, tuple(int(s.start) for s in box), cropped, orders)


def _read(files: Sequence[str], channels: int) -> tuple[Volume, tuple[float, ...]]:
    """The images of a case, (channels, z, y, x), and the distances of their voxels."""
    import nibabel

    if len(files) != channels:
        raise LayerwiseError(f"it has {len(files)} images, and the network takes {channels}")
    images, spacings = [], set[tuple[float, ...]]()
    for file in files:
        with foreign(f"file {file!r} cannot be read"):
            image = nibabel.load(file)
            images.append(np.asarray(image.dataobj).T.astype(np.float32))
            spacings.add(tuple(float(zoom) for zoom in image.header.get_zooms()[::-1]))
        if images[-1].ndim != 3:
            raise LayerwiseError(f"file {file!r} is no volume: it has shape {images[-1].shape[::-1]}")
    if len(spacings) > 1 or len({image.shape for image in images}) > 1:
        raise LayerwiseError("its images differ in shape or spacing")
    return np.stack(images), spacings.pop()


def _around(inside: Volume) -> tuple[slice, ...]:
    """The least box with all that is not zero."""
    slices = []
    for axis in range(inside.ndim):
        along = np.flatnonzero(inside.any(axis=tuple(other for other in range(inside.ndim) if other != axis)))
        slices.append(slice(int(along[0]), int(along[-1]) + 1))
    return tuple(slices)


def _normalise(trained: TrainedFolder, images: Volume, inside: Volume, box: tuple[slice, ...]) -> None:
    """Normalises a case's channels in place, in nnU-Net's arithmetic. inside: what is not zero, of all of the case."""
    mask: Volume | None = None
    properties = trained.plans.get("foreground_intensity_properties_per_channel") or trained.plans.get(
        "foreground_intensity_properties_by_modality", {}
    )
    schemes = zip(
        trained.configuration["normalization_schemes"], trained.configuration["use_mask_for_norm"], strict=True
    )
    for channel, (scheme, masked) in enumerate(schemes):
        image = images[channel]
        if scheme == "ZScoreNormalization" and masked:
            if mask is None:
                mask = _scipy().binary_fill_holes(inside)[box]
            mean, deviation = image[mask].mean(), image[mask].std()
            image[mask] = (image[mask] - mean) / max(deviation, SMALLEST)
        elif scheme == "ZScoreNormalization":
            mean, deviation = image.mean(), image.std()
            image -= mean
            image /= max(deviation, SMALLEST)
        elif scheme == "CTNormalization":
            known = properties[str(channel)]
            np.clip(image, known["percentile_00_5"], known["percentile_99_5"], out=image)
            image -= known["mean"]
            image /= max(known["std"], SMALLEST)
        elif scheme == "RescaleTo01Normalization":
            image -= image.min()
            image /= max(image.max(), SMALLEST)
        elif scheme != "NoNormalization":
            raise LayerwiseError(f"the plans normalise by {scheme}, which layerwise does not do")


def _resample(
    configuration: Mapping[str, Any],
    images: Volume,
    shape: tuple[int, ...],
    spacing: tuple[float, ...],
    wanted: tuple[float, ...],
) -> Volume:
    """Images on the plan's grid."""
    order, along = _orders(configuration, "data", spacing, wanted)
    made = np.empty((len(images), *shape), images.dtype)
    for channel, image in enumerate(images):
        values = image.astype(np.float64)
        if len(along) < values.ndim:  # slice by slice, then the nearest slice
            (axis,) = {*range(values.ndim)} - along
            plane = tuple(n for other, n in enumerate(shape) if other != axis)
            values = np.stack([_resized(part, plane, order) for part in np.moveaxis(values, axis, 0)], axis)
            extent = values.shape[axis]
            places = np.clip((np.arange(shape[axis]) + 0.5) * (extent / shape[axis]) - 0.5, 0, extent - 1)
            values = values.take(np.floor(places + 0.5).astype(int), axis)
        else:
            values = _resized(values, shape, order)
        made[channel] = values
    return made


def _resized(values: Volume, shape: tuple[int, ...], order: int) -> Volume:
    """What skimage.transform.resize(mode="edge", anti_aliasing=False) returns."""
    if values.shape == shape:
        return values
    zooms = [new / old for new, old in zip(shape, values.shape, strict=True)]
    made: Volume = _scipy().zoom(values, zooms, order=order, mode="nearest", grid_mode=True)
    return np.clip(made, values.min(), values.max())


def _orders(
    configuration: Mapping[str, Any], what: str, current: tuple[float, ...], wanted: tuple[float, ...]
) -> tuple[int, set[int]]:
    """The order of splines that resample, and the axes that they are taken along: of another, the nearest is."""
    if configuration[f"resampling_fn_{what}"] != RESAMPLING:
        raise LayerwiseError(
            f"the plans resample by {configuration[f'resampling_fn_{what}']}, which layerwise does not do"
        )
    options = dict(configuration[f"resampling_fn_{what}_kwargs"])
    separate, axes = options.get("force_separate_z", False), {*range(len(current))}
    if options.get("order_z", 0) != 0:
        raise LayerwiseError(
            "the plans resample the coarsest axis with another order than 0, which layerwise does not do"
        )
    coarse = next((s for s in (current, wanted) if max(s) / min(s) > ANISOTROPY), None) if separate is None else current
    if separate is not False and coarse is not None:
        coarsest = {axis for axis in axes if coarse[axis] == max(coarse)}
        if len(coarsest) == 1:
            axes -= coarsest
    return int(options["order"]), axes


def _scipy() -> Any:
    try:
        from scipy import ndimage
    except ImportError as error:
        raise LayerwiseError(f"its plans ask for resampling or masks: install scipy ({error})") from error
    return ndimage
