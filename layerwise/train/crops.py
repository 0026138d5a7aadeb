"""Crops: parts of one volume as samples, of which boxes can be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.tensor import TensorSpec
from layerwise.train.sources import Batch, Samples
from layerwise.train.task import Task
from layerwise.volumes.mni152 import CLASSES, mni152, parted
from layerwise.volumes.reading import Input, Reading
from layerwise.volumes.sources import Array, Stacked

TRAIN, HELD_OUT = 256, 32  # crops


@dataclass(frozen=True, slots=True)
class Crops:
    """Where a crop lies, and how it is mirrored, follows from the seed and its number."""

    reading: Reading  # of an image and its classes
    count: int

    def batch(self, numbers: Tensor) -> Batch:
        """Whole ones."""
        shapes = [(len(numbers), *one.spec.shape[1:]) for one in self.reading.inputs]
        return self.boxes(numbers, *(Box((0,) * len(shape), shape) for shape in shapes))

    def boxes(self, numbers: Tensor, *boxes: Box) -> Batch:
        """Of the image and of the classes of these samples: no more is read."""
        inputs = tuple(replace(one, box=box) for one, box in zip(self.reading.inputs, boxes, strict=True))
        image, classes = replace(self.reading, inputs=inputs).batch(numbers.tolist(), epoch=0)
        return (image,), classes


def brain(task: Task, seed: int) -> tuple[Samples, Samples]:
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
    train, held_out = parted(mni152(), task.target_sample[0])
    room = train[1].shape
    if any(taken > extent for taken, extent in zip(task.target_sample, room, strict=True)):
        told = " x ".join(map(str, room))
        raise LayerwiseError(f"mni152 has {told} voxels to train on, and the model takes more: {shapes}")
    return _crops(task, train, TRAIN, "dhw", seed), _crops(task, held_out, HELD_OUT, "", 0)


def _crops(task: Task, arrays: Sequence[Array], count: int, flip: str, seed: int) -> Crops:
    image = task.inputs[0].spec
    target = TensorSpec(image.shape[:1] + image.shape[2:], image.dims[:1] + image.dims[2:], "int64")
    inputs = []
    for spec, array, name in zip((image, target), arrays, ("image", "classes"), strict=True):
        repeated = np.broadcast_to(array, (count, *array.shape))
        inputs.append(Input(name, spec, Box((0,) * len(spec.shape), spec.shape), Stacked(repeated, name)))
    return Crops(Reading(tuple(inputs), "random", flip, None, seed), count)
