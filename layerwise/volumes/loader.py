"""BoxLoader: batches of which every rank reads only its own boxes, cropped and flipped alike on all ranks."""

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
    """Batches of all ranks together: each batch has, for every input of the model, a tensor with this rank's box.

        for x, target in BoxLoader(model, "images.npy", "labels.npy", crop="random", flip="dhw", shuffle=True):
            loss = model(x, target)

    All randomness is drawn from seed, epoch and sample: any plan gets the same samples. An incomplete last batch is
    dropped.

    Args:
        model: A model from `parallelize` with `ParallelOptions(io="boxes")` or from `load` (with another io, a rank's
            box is its samples).
        sources: One for each input, in order: an array (samples, ...) of numpy, h5py or zarr, a file of one (.npy,
            .zarr, .h5::name), a list of files, one for each sample, or a function (index, slices) -> array. Only the
            needed boxes are read.
        samples: The number of samples, for functions.
        crop: How to crop samples that are larger than the model's input: "random" or "center".
        flip: Labels of dimensions to mirror, each with probability 1/2.
        intensity: (box, rng) -> box for the first input; it must treat all elements alike, as it sees a part only.
        shuffle: Whether every epoch has another order (`set_epoch`, or consecutive epochs).
        seed: Seed of all random numbers.
        workers: Number of processes that read in advance.
        prefetch: Batches that each process reads in advance.

    Raises:
        LayerwiseError: Sources and model do not fit; values are not finite, or are not classes of the loss or one-hot
            encoding that reads them (it names the file, if there is one, and the sample).

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
            raise LayerwiseError(
                f"the model takes {len(boxes)} inputs ({', '.join(boxes)}), but there are {len(sources)} sources"
            )
        opened = [
            source_of(source, name, samples, spec.shape[1:])
            for source, name, spec in zip(sources, boxes, specs, strict=True)
        ]
        counts = {len(source) for source in opened}
        if len(counts) > 1:
            numbers = " and ".join(map(str, sorted(counts)))
            raise LayerwiseError(f"the inputs have {numbers} samples, but all must have the same number")
        there = [label for label in POSITIONS if any(label in spec.dims for spec in specs)]
        unknown = [label for label in flip if label not in there]
        if unknown:
            raise LayerwiseError(f"flip={flip!r}: {unknown[0]!r} is not one of {', '.join(there) or 'no dimensions'}")
        (self.samples,) = counts
        self.batch, self.shuffle, self.seed, self.epoch, self._done = of(model).plan.batch, shuffle, seed, 0, 0
        if self.samples < self.batch:
            raise LayerwiseError(f"{self.samples} samples are fewer than a batch of {self.batch}")
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
        """The model's inputs, and the sources of their samples."""
        return self._reading.inputs

    @property
    def as_they_are(self) -> bool:
        """True if samples come in order, in full and unchanged."""
        reading = self._reading
        return not (self.shuffle or reading.crop or reading.flip or reading.intensity)

    def set_epoch(self, epoch: int, done: int = 0) -> None:
        """Sets the epoch of the next pass over the samples, and how many of its batches to skip as done."""
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
            if isinstance(batch, str):  # a worker's error, without its traceback
                raise LayerwiseError(batch)
            yield tuple(batch)


class _Batches(Dataset[Any]):
    """One item a batch, for DataLoader. Errors are returned as text, as a worker's exception includes its traceback."""

    def __init__(self, reading: BatchReader, batches: Sequence[Sequence[int]], epoch: int) -> None:
        self.reading, self.batches, self.epoch = reading, batches, epoch

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> list[Tensor] | str:
        try:
            return self.reading.batch(self.batches[number], self.epoch)
        except LayerwiseError as error:
            return str(error)
