"""Feed: the data that a user gives `fit` (tensors, or a data set) as numbered samples, loaded batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from layerwise.checkpoint.signals import WorkerStart
from layerwise.errors import LayerwiseError
from layerwise.train.sources import Batch, inputs_and_target

EXPECTED = "give (inputs, targets) tensors or a map-style Dataset of (input, target)"


@dataclass(frozen=True, slots=True)
class Feed:
    """Samples by number."""

    name: str  # how errors call it
    dataset: Any  # has __len__ and __getitem__, or __getitems__
    count: int
    collate: Callable[[list[Any]], Any]
    workers: int
    target: Tensor | None = None  # all of it, where it is at hand

    def batches(self, numbers: Sequence[Sequence[int]]) -> Iterator[Batch]:
        """Yields the samples of each batch, on the CPU."""
        for collated in DataLoader(
            self.dataset,
            batch_sampler=[list(batch) for batch in numbers],
            num_workers=self.workers,
            collate_fn=self.collate,
            worker_init_fn=WorkerStart(),
        ):
            batch = inputs_and_target(collated)
            if batch is None:
                raise LayerwiseError(f"{self.name}: its items are not (input, target): {EXPECTED}")
            yield batch


NO_DATASETS = (str, tuple, list, Tensor, Mapping)


def feed(data: object, name: str, workers: int = 0) -> Feed:
    """Returns the samples of `data`; `name` is how errors call it."""
    tensors = inputs_and_target(data)
    if tensors is not None:
        inputs, target = tensors
        return Feed(name, _Tensors(inputs, target, name), len(target), _as_it_is, workers, target)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, NO_DATASETS):
        return Feed(name, data, len(data), default_collate, workers)
    if isinstance(data, DataLoader):
        raise LayerwiseError(f"{name} is a DataLoader: give its data set; fit makes batches of it")
    what = "an IterableDataset, whose samples have no numbers" if isinstance(data, IterableDataset) else ""
    raise LayerwiseError(f"{name} is {what or f'of type {type(data).__name__}'}: {EXPECTED}")


class _Tensors(Dataset[Any]):
    """Whole tensors, from which a batch is taken at once."""

    def __init__(self, inputs: tuple[Tensor, ...], target: Tensor, name: str) -> None:
        for x in inputs:
            if len(x) != len(target):
                raise LayerwiseError(f"{name}: {len(x)} inputs, but {len(target)} targets")
        self.inputs, self.target = inputs, target

    def __getitems__(self, numbers: list[int]) -> Batch:
        indices = torch.tensor(numbers, dtype=torch.int64)
        return tuple(x[indices] for x in self.inputs), self.target[indices]


def _as_it_is(batch: Any) -> Any:
    return batch
