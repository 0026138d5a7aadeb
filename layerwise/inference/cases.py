"""Cases: the samples to predict, and what the network takes and returns for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path

from torch import Tensor

from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.ops.base import Role
from layerwise.run.parallel import ParallelModule, of
from layerwise.run.shapes import Sizes
from layerwise.tensor import TensorSpec
from layerwise.volumes.loader import BoxLoader
from layerwise.volumes.reading import POSITIONS, BatchReader, BoxInput
from layerwise.volumes.sources import SampleRegion, SampleSource, source_of

ENDINGS = (".nii.gz", ".nii", ".npy", ".zarr", ".h5", ".hdf5")  # removed from the names of results


@dataclass(frozen=True, slots=True)
class Cases:
    """Samples of a network's inputs.

    Attributes:
        inputs: The network's inputs at the planned size, and the sources of their samples.
        returned: The network's output at the planned size.
        names: The names of results: those of the samples' files, else numbers.
        files: The file of each sample's first input; None if it has no file of its own.
    """

    inputs: tuple[BoxInput, ...]
    returned: TensorSpec
    names: tuple[str, ...]
    files: tuple[str | None, ...]

    @staticmethod
    def of(model: ParallelModule, samples: object, output: int) -> Cases:
        """Returns the cases of a user's `samples`. Raises LayerwiseError if they are not usable."""
        layers = [layer for layer in of(model).layer_graph.layers if layer.role is Role.INPUT]
        outputs = of(model).layer_graph.layers[-1].specs
        if not 0 <= output < len(outputs):
            raise LayerwiseError(f"output={output} is out of range: the model has {len(outputs)} outputs")
        sources: list[SampleSource]
        if isinstance(samples, BoxLoader):
            if not samples.as_they_are:
                raise LayerwiseError(
                    "predict writes every sample in its place: pass a loader that does not shuffle, crop, flip or "
                    "change samples"
                )
            sources = [box_input.source for box_input in samples.inputs]
        elif len(layers) != 1:
            raise LayerwiseError(f"the model takes {len(layers)} inputs: pass a BoxLoader of all of them")
        else:
            sources = [source_of(samples, layers[0].name, None, layers[0].out.shape[1:])]
        pairs = zip(layers, sources, strict=True)
        inputs = tuple(BoxInput(layer.name, layer.out, Box((), ()), source) for layer, source in pairs)
        files = tuple(sources[0].file(index) for index in range(len(sources[0])))
        return Cases(inputs, outputs[output], _names(files), files)

    @property
    def planned(self) -> Sizes:
        """Returns the shape of a sample of each input in the plan."""
        return tuple(box_input.spec.shape[1:] for box_input in self.inputs)

    def along(self, number: int = 0) -> tuple[int, ...]:
        """Returns the dimensions of an input's sample that are positions."""
        return tuple(i for i, label in enumerate(self.inputs[number].spec.dims[1:]) if label in POSITIONS)

    @property
    def labels(self) -> str:
        """Returns the labels of the first input's positions, such as "dhw"."""
        return "".join(str(self.inputs[0].spec.dims[1 + i]) for i in self.along())

    @property
    def follows(self) -> bool:
        """Returns whether an output (n, channels, ...) has the first input's positions, one by one.

        Other inputs must have the same positions, or none.
        """

        def positions(number: int) -> list[tuple[object, int]]:
            spec = self.inputs[number].spec
            return [(spec.dims[1 + i], spec.shape[1 + i]) for i in self.along(number)]

        first, out = positions(0), self.returned
        return (
            bool(first)
            and all(positions(number) in (first, []) for number in range(1, len(self.inputs)))
            and list(zip(out.dims[2:], out.shape[2:], strict=True)) == first
        )

    def extents(self, shapes: Sizes) -> tuple[int, ...]:
        """Returns the sizes of a sample's positions, from its inputs' shapes. Raises LayerwiseError if they differ."""
        first = tuple(shapes[0][i] for i in self.along())
        for number, (shape, box_input) in enumerate(zip(shapes, self.inputs, strict=True)):
            other = tuple(shape[i] for i in self.along(number))
            if other not in (first, ()):
                raise LayerwiseError(
                    f"input {box_input.name!r} has extents {other}, but {self.inputs[0].name!r} has {first}"
                )
        return first

    def sized(self, extents: Sequence[int]) -> Sizes:
        """Returns the shape of a sample of each input, for these extents."""
        sizes = []
        for number, planned in enumerate(self.planned):
            at = dict(zip(self.along(number), extents, strict=False))
            sizes.append(tuple(at.get(i, n) for i, n in enumerate(planned)))
        return tuple(sizes)

    def regions(self, extents: Sequence[int], place: Sequence[int], mirrored: Sequence[int]) -> list[SampleRegion]:
        """Returns what a pass reads from each input: `extents` from `place` on, dimensions in `mirrored` backwards."""
        regions = []
        for number, (size, box_input) in enumerate(zip(self.sized(extents), self.inputs, strict=True)):
            along = self.along(number)
            at = dict(zip(along, place, strict=False))
            lo = tuple(at.get(i, 0) for i in range(len(size)))
            box = Box(lo, tuple(a + n for a, n in zip(lo, size, strict=True)))
            regions.append(SampleRegion(box_input.source, box, frozenset(along[d] for d in mirrored if along)))
        return regions

    def shapes(self, number: int) -> Sizes:
        """Returns the shapes of a sample's inputs. Raises LayerwiseError if the network cannot take
        them at any size.
        """
        shapes = tuple(box_input.source.shape(number) for box_input in self.inputs)
        for shape, box_input in zip(shapes, self.inputs, strict=True):
            spec = box_input.spec
            fixed = [n for n, label in zip(shape, spec.dims[1:], strict=False) if label not in POSITIONS]
            wanted = [n for n, label in zip(spec.shape[1:], spec.dims[1:], strict=True) if label not in POSITIONS]
            if len(shape) != len(spec.shape) - 1 or fixed != wanted:
                raise LayerwiseError(
                    f"{box_input.named(number)} has shape {shape}, but the model takes {spec.shape[1:]} of each"
                )
        return shapes

    def batches(self, numbers: Sequence[int], most: int) -> Iterator[list[int]]:
        """Yields consecutive samples of equal shapes, at most `most` together."""
        for _, alike in groupby(numbers, self._shapes):
            while batch := list(islice(alike, most)):
                yield batch

    def _shapes(self, number: int) -> object:
        """Returns the shapes of a sample's inputs, or its number if it cannot be read, so that it is alone."""
        try:
            return tuple(box_input.source.shape(number) for box_input in self.inputs)
        except LayerwiseError:
            return number

    def read(self, numbers: Sequence[int], boxes: Sequence[Box], sources: Sequence[SampleSource]) -> list[Tensor]:
        """Returns a box of each input for some samples together, checked like a BoxLoader's."""
        inputs = tuple(
            replace(
                box_input,
                spec=replace(box_input.spec, shape=(len(numbers), *source.shape(numbers[0]))),
                box=box,
                source=source,
            )
            for box_input, box, source in zip(self.inputs, boxes, sources, strict=True)
        )
        return BatchReader(inputs, None, "", None, 0).batch(numbers, 0)


def _names(files: Sequence[str | None]) -> tuple[str, ...]:
    """Returns the samples' names: those of files, with enough of the path to tell them apart; else numbers."""
    if any(file is None for file in files) or len(set(files)) < len(files):
        return tuple(f"sample_{number:05d}" for number in range(len(files)))
    paths = [Path(str(file).partition("::")[0]).absolute().parts for file in files]
    depth = next(n for n in range(1, 1 + max(map(len, paths))) if len({path[-n:] for path in paths}) == len(paths))
    names = ["_".join(part.strip("/") for part in path[-depth:]) for path in paths]
    return tuple(next((name[: -len(end)] for end in ENDINGS if name.lower().endswith(end)), name) for name in names)
