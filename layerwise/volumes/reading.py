"""Reads this rank's boxes of a batch, cropped and mirrored alike on all ranks, and checks them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.graph.layer import Layer
from layerwise.graph.layer_graph import LayerGraph
from layerwise.ops.nn.loss import IGNORED, Loss
from layerwise.ops.tensor.along import OneHot
from layerwise.ops.tensor.view import Permute, Reshape
from layerwise.tensor import TensorSpec
from layerwise.volumes.sources import Array, SampleSource

Crop = Literal["random", "center"]
Intensity = Callable[[Array, np.random.Generator], Array]
POSITIONS = ("d", "h", "w", "l", "s")  # labels of dimensions that can be cropped and flipped


@dataclass(frozen=True, slots=True)
class Classes:
    """The classes 0 to `count` - 1, and the value that a loss ignores."""

    count: int
    ignored: int | None = None

    def wrong(self, values: Tensor) -> int | None:
        """The first value that is not a class, or None."""
        outside = (values < 0) | (values >= self.count)
        if self.ignored is not None:
            outside &= values != self.ignored
        outsiders = values[outside]
        return int(outsiders[0]) if outsiders.numel() else None


def classes_of(graph: LayerGraph, name: str) -> tuple[Classes, ...]:
    """The class ranges that losses and one-hot encodings require of an input that they read directly."""
    found_classes = []
    for layer in _users(graph, name):
        op = layer.main
        if isinstance(op, OneHot):
            found_classes.append(Classes(op.count))
        elif isinstance(op, Loss) and op.classes:
            ignored = dict(op.arguments).get("ignore_index", IGNORED)
            found_classes.append(Classes(layer.stages[0].specs[0].shape[1], int(ignored)))
    return tuple(found_classes)


def _users(graph: LayerGraph, name: str) -> Iterator[Layer]:
    """The layers whose operator reads this output as its only input or as a loss's target, through views."""
    for layer in graph.layers:
        slot = 1 if isinstance(layer.main, Loss) else 0
        if len(layer.inputs) <= slot or layer.inputs[slot] != name or layer.end:
            continue
        views = layer.stages[0].views
        if all(isinstance(view, Reshape | Permute) for view in (views[slot] if slot < len(views) else ())):
            if isinstance(layer.main, Reshape | Permute):
                yield from _users(graph, layer.name)
            else:
                yield layer


@dataclass(frozen=True)
class BoxInput:
    """An input of the model, and the source of its samples."""

    name: str
    spec: TensorSpec  # of the full batch
    box: Box  # this rank's box of it
    source: SampleSource
    classes: tuple[Classes, ...] = ()  # ranges that its values must be in

    def named(self, index: int) -> str:
        """The name of one of its samples in errors."""
        file = self.source.file(index)
        return f"input {self.name!r}, sample {index}" + (f" (file {file!r})" if file else "")


@dataclass(frozen=True)
class BatchReader:
    """A reader of batches."""

    inputs: tuple[BoxInput, ...]
    crop: Crop | None
    flip: str
    intensity: Intensity | None
    seed: int

    def batch(self, samples: Sequence[int], epoch: int) -> list[Tensor]:
        """This rank's boxes of a batch of these samples."""
        drawn = {index: self._drawn(index, epoch) for index in samples}
        return [self._read(number, feed, samples, drawn, epoch) for number, feed in enumerate(self.inputs)]

    def _read(
        self, number: int, feed: BoxInput, samples: Sequence[int], drawn: dict[int, _Drawn], epoch: int
    ) -> Tensor:
        tensor = torch.empty(feed.box.shape, dtype=getattr(torch, feed.spec.dtype))
        if not feed.box.volume:
            return tensor
        for row, index in enumerate(samples[feed.box.lo[0] : feed.box.hi[0]]):
            slices, mirrored = drawn[index].of(feed)
            read = feed.source.read(index, slices)
            _check(read, feed, index)
            if number == 0 and self.intensity is not None:
                read = np.asarray(self.intensity(read, generator(self.seed, epoch, index, 1)))
                _check(read, feed, index, "what intensity makes of ")
            values = np.flip(read, mirrored)
            if tensor.dtype == torch.bfloat16:  # numpy has no bfloat16
                tensor[row] = torch.from_numpy(values.astype(np.float32))
            else:
                tensor.numpy()[row] = values
            _check_values(tensor[row], feed, index)
        return tensor

    def _drawn(self, index: int, epoch: int) -> _Drawn:
        """Draws a sample's crop and mirrored dimensions: the same for all its inputs, on all ranks."""
        room: dict[str, int] = {}
        for feed in self.inputs:
            room |= self._room(feed, index, room)
        rng = generator(self.seed, epoch, index, 0)
        begins = {
            label: int(rng.integers(0, room[label] + 1)) if self.crop == "random" else room[label] // 2
            for label in POSITIONS
            if label in room
        }
        return _Drawn(begins, {label for label in self.flip if rng.random() < 0.5})

    def _room(self, feed: BoxInput, index: int, others: dict[str, int]) -> dict[str, int]:
        """By label, how much a sample exceeds the model's input."""
        shape, needed, labels = feed.source.shape(index), feed.spec.shape[1:], feed.spec.dims[1:]
        fits = len(shape) == len(needed)
        rooms: dict[str, int] = {}
        for extent, taken, label in zip(shape, needed, labels, strict=False):
            room = extent - taken
            cut = label in POSITIONS and self.crop is not None and room > 0
            fits = fits and (room == 0 or cut) and (label not in POSITIONS or others.get(str(label), room) == room)
            if label in POSITIONS:
                rooms[str(label)] = room
        if not fits:
            hint = "" if self.crop else "; crop= cuts larger ones"
            raise LayerwiseError(f"{feed.named(index)} has shape {shape}, but the model takes {needed} of each{hint}")
        return rooms


@dataclass(frozen=True)
class _Drawn:
    """The crop of one sample: where it begins, and which dimensions are mirrored, by label."""

    begins: dict[str, int]
    mirrored: set[str]

    def of(self, feed: BoxInput) -> tuple[tuple[slice, ...], tuple[int, ...]]:
        """The slices to read of an input's sample, and which dimensions of the result are mirrored."""
        slices: list[slice] = []
        mirrored: list[int] = []
        dims = zip(feed.box.lo[1:], feed.box.hi[1:], feed.spec.shape[1:], feed.spec.dims[1:], strict=True)
        for i, (lo, hi, extent, label) in enumerate(dims):
            if label in self.mirrored:
                lo, hi = extent - hi, extent - lo
                mirrored.append(i)
            begin = self.begins.get(str(label), 0)
            slices.append(slice(begin + lo, begin + hi))
        return tuple(slices), tuple(mirrored)


def generator(*key: int) -> np.random.Generator:
    """A random generator that depends only on these numbers."""
    return np.random.default_rng(np.random.SeedSequence(key))


def _check(read: Array, feed: BoxInput, index: int, what: str = "") -> None:
    """Raises LayerwiseError if a box's shape or type does not fit the model."""
    expected, integer = feed.box.shape[1:], "int" in feed.spec.dtype
    if read.shape != expected:
        raise LayerwiseError(
            f"{what}{feed.named(index)} has shape {read.shape}, but a box of {expected} was to be read"
        )
    if read.dtype.kind not in ("iub" if integer else "fiub"):
        raise LayerwiseError(f"{what}{feed.named(index)} is {read.dtype}, but the model takes {feed.spec.dtype}")
    if integer and read.size:
        least, most, limits = int(read.min()), int(read.max()), torch.iinfo(getattr(torch, feed.spec.dtype))
        if least < limits.min or most > limits.max:
            message = f"{what}{feed.named(index)} has values from {least} to {most}"
            raise LayerwiseError(f"{message}, but the model takes {feed.spec.dtype}, which cannot hold them")


def _check_values(values: Tensor, feed: BoxInput, index: int) -> None:
    """Raises LayerwiseError if values are not finite, or not classes."""
    if values.is_floating_point() and not bool(values.isfinite().all()):
        raise LayerwiseError(f"{feed.named(index)} has values that are not finite in {feed.spec.dtype}")
    for classes in feed.classes:
        wrong = classes.wrong(values)
        if wrong is not None:
            ignored = "" if classes.ignored is None else f" (and {classes.ignored}, which does not count)"
            message = f"has class {wrong}, but the model accepts 0 to {classes.count - 1}{ignored}"
            raise LayerwiseError(f"{feed.named(index)} {message}")
