"""Cases: the samples that are to be predicted, and what the network takes and returns of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path

from torch import Tensor

from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.ops.base import Role
from layerwise.run.parallel import ParallelModule
from layerwise.run.sized import Sizes
from layerwise.tensor import TensorSpec
from layerwise.volumes.loader import BoxLoader
from layerwise.volumes.reading import POSITIONS, BatchReader, BoxInput
from layerwise.volumes.sources import SampleSource, source_of

ENDINGS = (".nii.gz", ".nii", ".npy", ".zarr", ".h5", ".hdf5")  # that names of results have not


@dataclass(frozen=True, slots=True)
class Cases:
    """Samples of a network's inputs.

    Attributes:
        inputs: Of the network at the planned size, and where their samples lie.
        returned: The output at the planned size.
        names: What results are called: as the files of the samples, else by number.
        files: Of each sample's first input; None where it lies in none of its own.
    """

    inputs: tuple[BoxInput, ...]
    returned: TensorSpec
    names: tuple[str, ...]
    files: tuple[str | None, ...]

    @staticmethod
    def of(model: ParallelModule, samples: object, output: int) -> Cases:
        """Those of a user's `samples`. LayerwiseError where they will not do."""
        layers = [layer for layer in model.graph.layers if layer.role is Role.INPUT]
        outputs = model.graph.layers[-1].specs
        if not 0 <= output < len(outputs):
            raise LayerwiseError(f"the model has {len(outputs)} outputs: there is no number {output}")
        sources: list[SampleSource]
        if isinstance(samples, BoxLoader):
            if not samples.as_they_are:
                raise LayerwiseError(
                    "predict writes every sample in its place: give a loader that does not shuffle, crop, flip or "
                    "change them"
                )
            sources = [one.source for one in samples.inputs]
        elif len(layers) != 1:
            raise LayerwiseError(f"the model takes {len(layers)} inputs: give a BoxLoader of all of them")
        else:
            sources = [source_of(samples, layers[0].name, None, layers[0].out.shape[1:])]
        pairs = zip(layers, sources, strict=True)
        inputs = tuple(BoxInput(layer.name, layer.out, Box((), ()), source) for layer, source in pairs)
        files = tuple(sources[0].file(index) for index in range(len(sources[0])))
        return Cases(inputs, outputs[output], _names(files), files)

    @property
    def planned(self) -> Sizes:
        """The shape of a sample of each input that the plan is for."""
        return tuple(one.spec.shape[1:] for one in self.inputs)

    @property
    def along(self) -> tuple[int, ...]:
        """The dimensions of a sample of the first input that are positions."""
        return tuple(i for i, label in enumerate(self.inputs[0].spec.dims[1:]) if label in POSITIONS)

    @property
    def labels(self) -> str:
        """Of these, such as "dhw"."""
        return "".join(str(self.inputs[0].spec.dims[1 + i]) for i in self.along)

    @property
    def follows(self) -> bool:
        """Whether the network has one input, and an output (n, channels, ...) with its positions, one by one."""
        spec, out = self.inputs[0].spec, self.returned
        inside = [spec.shape[1 + i] for i in self.along]
        return (
            len(self.inputs) == 1
            and bool(inside)
            and out.dims[2:] == tuple(self.labels)
            and list(out.shape[2:]) == inside
        )

    def shapes(self, number: int) -> Sizes:
        """Of a sample's inputs. LayerwiseError where the network takes no such shape, at whatever size."""
        shapes = tuple(one.source.shape(number) for one in self.inputs)
        for shape, one in zip(shapes, self.inputs, strict=True):
            spec = one.spec
            fixed = [n for n, label in zip(shape, spec.dims[1:], strict=False) if label not in POSITIONS]
            wanted = [n for n, label in zip(spec.shape[1:], spec.dims[1:], strict=True) if label not in POSITIONS]
            if len(shape) != len(spec.shape) - 1 or fixed != wanted:
                raise LayerwiseError(
                    f"{one.named(number)} has shape {shape}, and the model takes {spec.shape[1:]} of each"
                )
        return shapes

    def batches(self, numbers: Sequence[int], most: int) -> Iterator[list[int]]:
        """Samples of equal shapes that follow one another, at most that many together."""
        for _, alike in groupby(numbers, self._shapes):
            while batch := list(islice(alike, most)):
                yield batch

    def _shapes(self, number: int) -> object:
        """Of a sample's inputs; of one that cannot be read, its number, as no other has it."""
        try:
            return tuple(one.source.shape(number) for one in self.inputs)
        except LayerwiseError:
            return number

    def read(self, numbers: Sequence[int], boxes: Sequence[Box], sources: Sequence[SampleSource]) -> list[Tensor]:
        """A box of each input of some samples together, checked as a BoxLoader does."""
        inputs = tuple(
            replace(
                one, spec=replace(one.spec, shape=(len(numbers), *source.shape(numbers[0]))), box=box, source=source
            )
            for one, box, source in zip(self.inputs, boxes, sources, strict=True)
        )
        return BatchReader(inputs, None, "", None, 0).batch(numbers, 0)


def _names(files: Sequence[str | None]) -> tuple[str, ...]:
    """What samples are called: as their files, with as much of the path as tells them apart; else by number."""
    if any(file is None for file in files) or len(set(files)) < len(files):
        return tuple(f"sample_{number:05d}" for number in range(len(files)))
    paths = [Path(str(file).partition("::")[0]).absolute().parts for file in files]
    depth = next(n for n in range(1, 1 + max(map(len, paths))) if len({path[-n:] for path in paths}) == len(paths))
    names = ["_".join(part.strip("/") for part in path[-depth:]) for path in paths]
    return tuple(next((name[: -len(end)] for end in ENDINGS if name.lower().endswith(end)), name) for name in names)
