"""Feed: the data that a user gives (tensors, a data set, a loader) as numbered samples, loaded batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from layerwise.checkpoint.signals import WorkerStart
from layerwise.errors import LayerwiseError
from layerwise.train.sources import inputs_and_target

EXPECTED = "give (inputs, targets) tensors, a map-style Dataset of (input, target), or a DataLoader of one"


@dataclass(frozen=True, slots=True)
class Feed:
    """Samples by number. What only a loader says has a default."""

    name: str  # how errors call it
    dataset: Any  # has __len__ and __getitem__, or __getitems__
    count: int
    collate: Callable[[list[Any]], Any]
    workers: int = 0
    start_worker: Callable[[int], None] | None = None
    batch: int | None = None
    shuffle: bool | None = None
    drop_last: bool = False
    per_rank: bool = False  # its batches are those of one rank, because its sampler is a distributed one
    target: Tensor | None = None  # all of it, where it is at hand

    def batches(self, numbers: Sequence[Sequence[int]]) -> Iterator[tuple[tuple[Tensor, ...], Tensor]]:
        """Yields the samples of each batch, on the CPU."""
        loader = DataLoader(
            self.dataset,
            batch_sampler=[list(batch) for batch in numbers],
            num_workers=self.workers,
            collate_fn=self.collate,
            worker_init_fn=WorkerStart(self.start_worker),
        )
        for collated in loader:
            batch = inputs_and_target(collated)
            if batch is None:
                raise LayerwiseError(f"{self.name}: its items are not (input, target): {EXPECTED}")
            yield batch


NO_DATASETS = (str, tuple, list, Tensor, Mapping)


def feed(data: object, name: str) -> Feed:
    """Returns the samples of `data`; `name` is how errors call it."""
    if isinstance(data, DataLoader):
        return _from_loader(data, name)
    tensors = inputs_and_target(data)
    if tensors is not None:
        inputs, target = tensors
        return Feed(name, _Tensors(inputs, target, name), len(target), _as_it_is, target=target)
    iterable = isinstance(data, IterableDataset)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, NO_DATASETS):
        return Feed(name, data, len(data), default_collate)
    what = "an IterableDataset, whose samples have no numbers" if iterable else f"of type {type(data).__name__}"
    raise LayerwiseError(f"{name} is {what}: {EXPECTED}")


def _from_loader(loader: DataLoader[Any], name: str) -> Feed:
    sampler = loader.sampler
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        raise LayerwiseError(f"{name} is a loader with a batch sampler or an IterableDataset: {EXPECTED}")
    if isinstance(sampler, DistributedSampler):
        shuffle = sampler.shuffle
    elif isinstance(sampler, RandomSampler | SequentialSampler):
        shuffle = isinstance(sampler, RandomSampler)
    else:
        raise LayerwiseError(
            f"{name} is a loader with a {type(sampler).__name__}: layerwise draws the samples itself, all of them once "
            "an epoch; give the Dataset"
        )
    return Feed(
        name,
        loader.dataset,
        len(loader.dataset),  # type: ignore[arg-type]
        loader.collate_fn,
        loader.num_workers,
        loader.worker_init_fn,
        loader.batch_size,
        shuffle,
        loader.drop_last,
        isinstance(sampler, DistributedSampler),
    )


class _Tensors(Dataset[Any]):
    """Whole tensors, from which a batch is taken at once."""

    def __init__(self, inputs: tuple[Tensor, ...], target: Tensor, name: str) -> None:
        for x in inputs:
            if len(x) != len(target):
                raise LayerwiseError(f"{name}: {len(x)} inputs, but {len(target)} targets")
        self.inputs, self.target = inputs, target

    def __getitems__(self, numbers: list[int]) -> tuple[tuple[Tensor, ...], Tensor]:
        indices = torch.tensor(numbers, dtype=torch.int64)
        return tuple(x[indices] for x in self.inputs), self.target[indices]


def _as_it_is(batch: Any) -> Any:
    return batch
