"""Reading: this rank's boxes of a batch, cropped and mirrored alike on all ranks, and checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.graph.layer import Layer, LayerGraph
from layerwise.ops.nn.loss import IGNORED, Loss
from layerwise.ops.tensor.scatter import OneHot
from layerwise.ops.tensor.view import Permute, Reshape
from layerwise.tensor import TensorSpec
from layerwise.volumes.sources import Array, SampleSource

Crop = Literal["random", "center"]
Intensity = Callable[[Array, np.random.Generator], Array]
POSITIONS = ("d", "h", "w", "l", "s")  # labels of dimensions that can be cropped and flipped


@dataclass(frozen=True, slots=True)
class Classes:
    """0 to `count` - 1, and what a loss ignores."""

    count: int
    ignored: int | None = None

    def wrong(self, values: Tensor) -> int | None:
        """The first that is none of them."""
        outside = (values < 0) | (values >= self.count)
        if self.ignored is not None:
            outside &= values != self.ignored
        found = values[outside]
        return int(found[0]) if found.numel() else None


def classes_of(graph: LayerGraph, name: str) -> tuple[Classes, ...]:
    """What the losses and one-hot encodings that an input goes into, all of it as it is, make of its numbers."""
    found = []
    for layer in _users(graph, name):
        op = layer.main
        if isinstance(op, OneHot):
            found.append(Classes(op.count))
        elif isinstance(op, Loss) and op.classes:
            ignored = dict(op.arguments).get("ignore_index", IGNORED)
            found.append(Classes(layer.stages[0].specs[0].shape[1], int(ignored)))
    return tuple(found)


def _users(graph: LayerGraph, name: str) -> Iterator[Layer]:
    """The layers whose operator takes this one's output: the only input, or a loss's target; through views."""
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
    """An input of the model, and where its samples lie."""

    name: str
    spec: TensorSpec  # of the whole batch
    box: Box  # of that, which this rank reads
    source: SampleSource
    classes: tuple[Classes, ...] = ()  # which its numbers must be

    def named(self, index: int) -> str:
        """What errors call one of its samples."""
        file = self.source.file(index)
        return f"input {self.name!r}, sample {index}" + (f" (file {file!r})" if file else "")


@dataclass(frozen=True)
class BatchReader:
    """How a batch is read."""

    inputs: tuple[BoxInput, ...]
    crop: Crop | None
    flip: str
    intensity: Intensity | None
    seed: int

    def batch(self, samples: Sequence[int], epoch: int) -> list[Tensor]:
        """This rank's boxes of a batch of these samples."""
        drawn = {index: self._drawn(index, epoch) for index in samples}
        return [self._read(number, one, samples, drawn, epoch) for number, one in enumerate(self.inputs)]

    def _read(self, number: int, one: BoxInput, samples: Sequence[int], drawn: dict[int, _Drawn], epoch: int) -> Tensor:
        made = torch.empty(one.box.shape, dtype=getattr(torch, one.spec.dtype))
        if not one.box.volume:
            return made
        for row, index in enumerate(samples[one.box.lo[0] : one.box.hi[0]]):
            slices, mirrored = drawn[index].of(one)
            read = one.source.read(index, slices)
            _check(read, one, index)
            if number == 0 and self.intensity is not None:
                read = np.asarray(self.intensity(read, generator(self.seed, epoch, index, 1)))
                _check(read, one, index, "what intensity makes of ")
            values = np.flip(read, mirrored)
            if made.dtype == torch.bfloat16:  # which numpy has not
                made[row] = torch.from_numpy(values.astype(np.float32))
            else:
                made.numpy()[row] = values
            _check_values(made[row], one, index)
        return made

    def _drawn(self, index: int, epoch: int) -> _Drawn:
        """Where a sample is cut, and what is mirrored: the same for all its inputs, on all ranks."""
        room: dict[str, int] = {}
        for one in self.inputs:
            room |= self._room(one, index, room)
        rng = generator(self.seed, epoch, index, 0)
        begins = {
            label: int(rng.integers(0, room[label] + 1)) if self.crop == "random" else room[label] // 2
            for label in POSITIONS
            if label in room
        }
        return _Drawn(begins, {label for label in self.flip if rng.random() < 0.5})

    def _room(self, one: BoxInput, index: int, known: dict[str, int]) -> dict[str, int]:
        """How much longer a sample is than what the model takes of it, by label."""
        shape, wanted, labels = one.source.shape(index), one.spec.shape[1:], one.spec.dims[1:]
        fits = len(shape) == len(wanted)
        found: dict[str, int] = {}
        for extent, taken, label in zip(shape, wanted, labels, strict=False):
            room = extent - taken
            cut = label in POSITIONS and self.crop is not None and room > 0
            fits = fits and (room == 0 or cut) and (label not in POSITIONS or known.get(str(label), room) == room)
            if label in POSITIONS:
                found[str(label)] = room
        if not fits:
            hint = "" if self.crop else "; crop= cuts larger ones"
            raise LayerwiseError(f"{one.named(index)} has shape {shape}, and the model takes {wanted} of each{hint}")
        return found


@dataclass(frozen=True)
class _Drawn:
    """Of one sample: where what is taken begins, and which dimensions are mirrored, by label."""

    begins: dict[str, int]
    mirrored: set[str] = field(default_factory=set)

    def of(self, one: BoxInput) -> tuple[tuple[slice, ...], tuple[int, ...]]:
        """The slices to be read of an input's sample, and which dimensions of what is read are mirrored."""
        slices: list[slice] = []
        mirrored: list[int] = []
        dims = zip(one.box.lo[1:], one.box.hi[1:], one.spec.shape[1:], one.spec.dims[1:], strict=True)
        for i, (lo, hi, extent, label) in enumerate(dims):
            if label in self.mirrored:
                lo, hi = extent - hi, extent - lo
                mirrored.append(i)
            begin = self.begins.get(str(label), 0)
            slices.append(slice(begin + lo, begin + hi))
        return tuple(slices), tuple(mirrored)


def generator(*key: int) -> np.random.Generator:
    """Numbers that follow from these alone."""
    return np.random.default_rng(np.random.SeedSequence(key))


def _check(read: Array, one: BoxInput, index: int, what: str = "") -> None:
    """LayerwiseError where a box has another shape or kind of number than the model takes."""
    wanted, whole = one.box.shape[1:], "int" in one.spec.dtype
    if read.shape != wanted:
        raise LayerwiseError(f"{what}{one.named(index)} has shape {read.shape} where a box of {wanted} was to be read")
    if read.dtype.kind not in ("iub" if whole else "fiub"):
        raise LayerwiseError(f"{what}{one.named(index)} is {read.dtype}, and the model takes {one.spec.dtype}")
    if whole and read.size:
        least, most, held = int(read.min()), int(read.max()), torch.iinfo(getattr(torch, one.spec.dtype))
        if least < held.min or most > held.max:
            said = f"{what}{one.named(index)} has values from {least} to {most}"
            raise LayerwiseError(f"{said}, and the model takes {one.spec.dtype}, which cannot hold them")


def _check_values(made: Tensor, one: BoxInput, index: int) -> None:
    """LayerwiseError where what the model is fed is not finite, or no class."""
    if made.is_floating_point() and not bool(made.isfinite().all()):
        raise LayerwiseError(f"{one.named(index)} has values that are no finite numbers in {one.spec.dtype}")
    for classes in one.classes:
        wrong = classes.wrong(made)
        if wrong is not None:
            ignored = "" if classes.ignored is None else f" (and {classes.ignored}, which does not count)"
            told = f"has a class {wrong}, and the model knows 0 to {classes.count - 1}{ignored}"
            raise LayerwiseError(f"{one.named(index)} {told}")
