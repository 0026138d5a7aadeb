"""BoxLoader: batches of which every rank reads its own boxes only, cropped and flipped alike on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.ops.base import Role
from layerwise.run.parallel import ParallelModule
from layerwise.tensor import TensorSpec
from layerwise.volumes.sources import Array, Source, source_of

Crop = Literal["random", "center"]
Intensity = Callable[[Array, np.random.Generator], Array]
POSITIONS = ("d", "h", "w", "l", "s")  # labels of dimensions that can be cropped and flipped


class BoxLoader:
    """Batches of all ranks together, of which each has a tensor for every input of the model: its box of it.

        for x, target in BoxLoader(model, "images.npy", "labels.npy", crop="random", flip="dhw", shuffle=True):
            loss = model(x, target)

    model: as `parallelize(..., io="boxes")` or `load` returns it (with another io a rank's box is its samples).
    sources: one an input, in their order: an array (samples, ...) of numpy, h5py or zarr, a file of one (.npy, .zarr,
    .h5::name), a list of files, one a sample, or a function (index, slices) -> array, which also needs `samples`. Only
    boxes are read of them.
    crop: samples larger than what the model takes are cut to it, at random or in the middle. flip: the labels of
    dimensions that are mirrored, each with probability 1/2. intensity: (box, rng) -> box for the first input; it must
    do alike with every element, for it sees a part. All of it is drawn by seed, epoch and sample: any plan has the same
    samples. shuffle: another order in every epoch (`set_epoch`, or one after the other). workers: processes that read
    ahead, `prefetch` batches each. A last batch that is not full is left out.

    LayerwiseError where sources and model do not fit, and where what is read is not finite.
    """

    def __init__(
        self,
        model: ParallelModule,
        *sources: object,
        samples: int | None = None,
        crop: Crop | None = None,
        flip: str = "",
        intensity: Intensity | None = None,
        shuffle: bool = False,
        seed: int = 0,
        workers: int = 0,
        prefetch: int = 2,
    ) -> None:
        specs = [layer.out for layer in model.graph.layers if layer.role is Role.INPUT]
        boxes = model.read_boxes()
        if len(sources) != len(boxes):
            raise LayerwiseError(f"the model takes {len(boxes)} inputs ({', '.join(boxes)}), not {len(sources)}")
        given = [
            source_of(source, name, samples, spec.shape[1:])
            for source, name, spec in zip(sources, boxes, specs, strict=True)
        ]
        counts = {len(source) for source in given}
        if len(counts) > 1:
            told = " and ".join(map(str, sorted(counts)))
            raise LayerwiseError(f"the inputs have {told} samples: all must have as many")
        unknown = [label for label in flip if label not in POSITIONS]
        if unknown:
            raise LayerwiseError(f"flip={flip!r}: {unknown[0]!r} is none of {', '.join(POSITIONS)}")
        (self.samples,) = counts
        self.batch, self.shuffle, self.seed, self.epoch = model.plan.batch, shuffle, seed, 0
        if self.samples < self.batch:
            raise LayerwiseError(f"{self.samples} samples are no batch of {self.batch}")
        rows = zip(boxes.items(), specs, given, strict=True)
        inputs = tuple(_Input(name, spec, box, source) for (name, box), spec, source in rows)
        self._reading = _Reading(inputs, crop, flip, intensity, seed)
        self._workers, self._prefetch, self._pinned = workers, prefetch, model.device.type == "cuda"

    def __len__(self) -> int:
        return self.samples // self.batch

    @property
    def as_they_are(self) -> bool:
        """Whether samples come in their order, whole and unchanged."""
        reading = self._reading
        return not (self.shuffle or reading.crop or reading.flip or reading.intensity)

    def set_epoch(self, epoch: int) -> None:
        """Which one the next pass over the samples is."""
        self.epoch = epoch

    def order(self) -> list[int]:
        """The samples of this epoch, in the order in which they are fed."""
        if not self.shuffle:
            return list(range(self.samples))
        return [int(index) for index in _generator(self.seed, self.epoch).permutation(self.samples)]

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        order = self.order()
        batches = [order[i * self.batch : (i + 1) * self.batch] for i in range(len(self))]
        reading = _Batches(self._reading, batches, self.epoch)
        self.epoch += 1
        ahead = self._prefetch if self._workers else None
        loader: DataLoader[Any] = DataLoader(
            reading, batch_size=None, num_workers=self._workers, pin_memory=self._pinned, prefetch_factor=ahead
        )
        for made in loader:
            if isinstance(made, str):  # an error of a worker's, without its traceback
                raise LayerwiseError(made)
            yield tuple(made)


@dataclass(frozen=True)
class _Input:
    """An input of the model, and where its samples lie."""

    name: str
    spec: TensorSpec  # of the whole batch
    box: Box  # of that, which this rank reads
    source: Source


@dataclass(frozen=True)
class _Reading:
    """How a batch is read."""

    inputs: tuple[_Input, ...]
    crop: Crop | None
    flip: str
    intensity: Intensity | None
    seed: int

    def batch(self, samples: Sequence[int], epoch: int) -> list[Tensor]:
        """This rank's boxes of a batch of these samples."""
        drawn = {index: self._drawn(index, epoch) for index in samples}
        return [self._read(number, one, samples, drawn, epoch) for number, one in enumerate(self.inputs)]

    def _read(self, number: int, one: _Input, samples: Sequence[int], drawn: dict[int, _Drawn], epoch: int) -> Tensor:
        made = torch.empty(one.box.shape, dtype=getattr(torch, one.spec.dtype))
        if not one.box.volume:
            return made
        for row, index in enumerate(samples[one.box.lo[0] : one.box.hi[0]]):
            slices, mirrored = drawn[index].of(one)
            read = one.source.read(index, slices)
            _check(read, one, index)
            if number == 0 and self.intensity is not None:
                read = np.asarray(self.intensity(read, _generator(self.seed, epoch, index, 1)))
            values = np.flip(read, mirrored)
            if made.dtype == torch.bfloat16:  # which numpy has not
                made[row] = torch.from_numpy(values.astype(np.float32))
            else:
                made.numpy()[row] = values
        return made

    def _drawn(self, index: int, epoch: int) -> _Drawn:
        """Where a sample is cut, and what is mirrored: the same for all its inputs, on all ranks."""
        room: dict[str, int] = {}
        for one in self.inputs:
            room |= self._room(one, index, room)
        rng = _generator(self.seed, epoch, index, 0)
        begins = {
            label: int(rng.integers(0, room[label] + 1)) if self.crop == "random" else room[label] // 2
            for label in POSITIONS
            if label in room
        }
        return _Drawn(begins, {label for label in self.flip if rng.random() < 0.5})

    def _room(self, one: _Input, index: int, known: dict[str, int]) -> dict[str, int]:
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
            raise LayerwiseError(
                f"input {one.name!r}, sample {index} has shape {shape}, and the model takes {wanted} of each{hint}"
            )
        return found


@dataclass(frozen=True)
class _Drawn:
    """Of one sample: where what is taken begins, and which dimensions are mirrored, by label."""

    begins: dict[str, int]
    mirrored: set[str] = field(default_factory=set)

    def of(self, one: _Input) -> tuple[tuple[slice, ...], tuple[int, ...]]:
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


class _Batches(Dataset[Any]):
    """One item a batch, for DataLoader; what goes wrong is returned as text, for a worker's error has its traceback."""

    def __init__(self, reading: _Reading, batches: Sequence[Sequence[int]], epoch: int) -> None:
        self.reading, self.batches, self.epoch = reading, batches, epoch

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> list[Tensor] | str:
        try:
            return self.reading.batch(self.batches[number], self.epoch)
        except LayerwiseError as error:
            return str(error)


def _generator(*key: int) -> np.random.Generator:
    """Numbers that follow from these alone."""
    return np.random.default_rng(np.random.SeedSequence(key))


def _check(read: Array, one: _Input, index: int) -> None:
    """LayerwiseError where a box has another shape or kind of number than the model takes, or is not finite."""
    wanted, whole = one.box.shape[1:], "int" in one.spec.dtype
    if read.shape != wanted:
        raise LayerwiseError(f"input {one.name!r}, sample {index}: {read.shape} was read for a box of {wanted}")
    if read.dtype.kind not in ("iub" if whole else "fiub"):
        raise LayerwiseError(
            f"input {one.name!r}, sample {index} is {read.dtype}, and the model takes {one.spec.dtype}"
        )
    if read.dtype.kind == "f" and not np.isfinite(read).all():
        raise LayerwiseError(f"input {one.name!r}, sample {index} has values that are no finite numbers")
