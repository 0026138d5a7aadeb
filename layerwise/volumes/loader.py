"""BoxLoader: batches of which every rank reads its own boxes only, cropped and flipped alike on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from layerwise.arguments import Count, Natural, Seed, checked
from layerwise.checkpoint.signals import WorkerStart
from layerwise.errors import LayerwiseError
from layerwise.ops.base import Role
from layerwise.run.parallel import ParallelModule, of
from layerwise.volumes.reading import POSITIONS, BatchReader, BoxInput, Crop, Intensity, classes_of, generator
from layerwise.volumes.sources import source_of


@checked
class BoxLoader:
    """Batches of all ranks together, of which each has a tensor for every input of the model: its box of it.

        for x, target in BoxLoader(model, "images.npy", "labels.npy", crop="random", flip="dhw", shuffle=True):
            loss = model(x, target)

    All randomness is drawn by seed, epoch and sample: any plan has the same samples. A last batch that is not full is
    left out.

    Args:
        model: What `parallelize` with `ParallelOptions(io="boxes")` or `load` returned; with another io a rank's box
            is its samples.
        sources: One an input, in their order: an array (samples, ...) of numpy, h5py or zarr, a file of one (.npy,
            .zarr, .h5::name), a list of files, one a sample, or a function (index, slices) -> array. Only boxes are
            read of them.
        samples: How many a function has.
        crop: Samples larger than what the model takes are cut to it, "random" or "center".
        flip: Labels of dimensions that are mirrored, each with probability 1/2.
        intensity: (box, rng) -> box for the first input; it must do alike with every element, for it sees a part.
        shuffle: Another order in every epoch (`set_epoch`, or one after the other).
        seed: Of all that is drawn.
        workers: Processes that read in advance.
        prefetch: Batches that each of them reads in advance.

    Raises:
        LayerwiseError: Sources and model do not fit; what is read is not finite, or is no class of the loss or one-hot
            encoding that takes it as it is (with the file, if there is one, and the number of the sample).

    Examples:
        >>> import layerwise, numpy, torch
        >>> options = layerwise.ParallelOptions(io="boxes", verbose=False)
        >>> model = layerwise.parallelize(torch.nn.Linear(4, 1), torch.randn(2, 4), options=options)
        >>> [x.shape for (x,) in BoxLoader(model, numpy.ones((4, 4), numpy.float32))]
        [torch.Size([2, 4]), torch.Size([2, 4])]
    """

    def __init__(
        self,
        model: ParallelModule,
        *sources: object,
        samples: Count | None = None,
        crop: Crop | None = None,
        flip: str = "",
        intensity: Intensity | None = None,
        shuffle: bool = False,
        seed: Seed = 0,
        workers: Natural = 0,
        prefetch: Count = 2,
    ) -> None:
        specs = [layer.out for layer in of(model).layer_graph.layers if layer.role is Role.INPUT]
        boxes = of(model).read_boxes()
        if len(sources) != len(boxes):
            raise LayerwiseError(f"the model takes {len(boxes)} inputs ({', '.join(boxes)}), not {len(sources)}")
        opened = [
            source_of(source, name, samples, spec.shape[1:])
            for source, name, spec in zip(sources, boxes, specs, strict=True)
        ]
        counts = {len(source) for source in opened}
        if len(counts) > 1:
            numbers = " and ".join(map(str, sorted(counts)))
            raise LayerwiseError(f"the inputs have {numbers} samples: all must have as many")
        there = [label for label in POSITIONS if any(label in spec.dims for spec in specs)]
        unknown = [label for label in flip if label not in there]
        if unknown:
            raise LayerwiseError(f"flip={flip!r}: {unknown[0]!r} is none of {', '.join(there) or 'no dimensions'}")
        (self.samples,) = counts
        self.batch, self.shuffle, self.seed, self.epoch, self._done = of(model).plan.batch, shuffle, seed, 0, 0
        if self.samples < self.batch:
            raise LayerwiseError(f"{self.samples} samples are no batch of {self.batch}")
        described = zip(boxes.items(), specs, opened, strict=True)
        inputs = tuple(
            BoxInput(name, spec, box, source, classes_of(of(model).layer_graph, name))
            for (name, box), spec, source in described
        )
        self._reading = BatchReader(inputs, crop, flip, intensity, seed)
        self._workers, self._prefetch, self._pinned = workers, prefetch, of(model).device.type == "cuda"

    def __len__(self) -> int:
        return self.samples // self.batch

    @property
    def inputs(self) -> tuple[BoxInput, ...]:
        """The model's inputs, and where their samples lie."""
        return self._reading.inputs

    @property
    def as_they_are(self) -> bool:
        """True if samples come in their order, whole and unchanged."""
        reading = self._reading
        return not (self.shuffle or reading.crop or reading.flip or reading.intensity)

    def set_epoch(self, epoch: int, done: int = 0) -> None:
        """Sets the epoch of the next pass over the samples, and how many of its batches are done and left out."""
        self.epoch, self._done = epoch, done

    def order(self) -> list[int]:
        """The samples of this epoch, in the order in which they are fed."""
        if not self.shuffle:
            return list(range(self.samples))
        return [int(index) for index in generator(self.seed, self.epoch).permutation(self.samples)]

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        order = self.order()
        batches = [order[i * self.batch : (i + 1) * self.batch] for i in range(self._done, len(self))]
        reading = _Batches(self._reading, batches, self.epoch)
        self.epoch, self._done = self.epoch + 1, 0
        prefetch = self._prefetch if self._workers else None
        loader: DataLoader[Any] = DataLoader(
            reading,
            batch_size=None,
            num_workers=self._workers,
            pin_memory=self._pinned,
            prefetch_factor=prefetch,
            worker_init_fn=WorkerStart(),
        )
        for batch in loader:
            if isinstance(batch, str):  # an error of a worker's, without its traceback
                raise LayerwiseError(batch)
            yield tuple(batch)


class _Batches(Dataset[Any]):
    """One item a batch, for DataLoader; what goes wrong is returned as text, for a worker's error has its traceback."""

    def __init__(self, reading: BatchReader, batches: Sequence[Sequence[int]], epoch: int) -> None:
        self.reading, self.batches, self.epoch = reading, batches, epoch

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> list[Tensor] | str:
        try:
            return self.reading.batch(self.batches[number], self.epoch)
        except LayerwiseError as error:
            return str(error)
