"""Feed: what a user gives `fit` (tensors, or a data set) as numbered samples, of which a rank loads its share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from layerwise.api.loaders import split
from layerwise.errors import LayerwiseError
from layerwise.run.parallel import ParallelModule, of
from layerwise.train.data import order
from layerwise.train.sources import Batch, inputs_and_target

EXPECTED = "give (inputs, targets) tensors or a map-style Dataset of (input, target)"
IGNORED = -100  # ignore_index of torch's cross_entropy and nll_loss, by default


@dataclass(frozen=True, slots=True)
class Feed:
    """Samples by number."""

    name: str  # how errors call it
    dataset: Any  # has __len__ and __getitem__, or __getitems__
    loss: object  # which must leave no target out
    workers: int = 0
    collate: Callable[[list[Any]], Any] = default_collate

    def example(self) -> tuple[Tensor, ...]:
        """Returns the inputs of two samples, or of the only one, on the CPU."""
        return self._pair(next(iter(DataLoader(self.dataset, 2, collate_fn=self.collate))))[0]

    def batches(self, module: ParallelModule, numbers: list[list[int]]) -> Iterator[Batch]:
        """Yields this rank's samples of each of these batches of all ranks, the target on its device."""
        loader = DataLoader(self.dataset, batch_sampler=numbers, num_workers=self.workers, collate_fn=self.collate)
        for inputs, target in map(self._pair, split(loader, module)):
            check_targets(self.loss, target, self.name)
            yield inputs, target.to(of(module).device)

    def _pair(self, collated: object) -> Batch:
        batch = inputs_and_target(collated)
        if batch is None:
            raise LayerwiseError(f"{self.name}: its items are not (input, target): {EXPECTED}")
        return batch


NO_DATASETS = (str, tuple, list, Tensor, Mapping)


def feed(data: object, name: str, loss: object, workers: int) -> Feed:
    """Returns the samples of `data`; `name` is how errors call it."""
    tensors = inputs_and_target(data)
    if tensors is not None:
        inputs, target = tensors
        for x in inputs:
            if len(x) != len(target):
                raise LayerwiseError(f"{name}: {len(x)} inputs, but {len(target)} targets")
        check_targets(loss, target, name)
        return Feed(name, _Tensors(inputs, target), loss, workers, _as_it_is)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, NO_DATASETS):
        return Feed(name, data, loss, workers)
    if isinstance(data, DataLoader):
        raise LayerwiseError(f"{name} is a DataLoader: give its data set; fit makes batches of it")
    what = "an IterableDataset, whose samples have no numbers" if isinstance(data, IterableDataset) else ""
    raise LayerwiseError(f"{name} is {what or f'of type {type(data).__name__}'}: {EXPECTED}")


@dataclass(frozen=True, slots=True)
class _Tensors(Dataset[Any]):
    """Whole tensors, from which a batch is taken at once."""

    inputs: tuple[Tensor, ...]
    target: Tensor

    def __len__(self) -> int:
        return len(self.target)

    def __getitems__(self, numbers: list[int]) -> Batch:
        indices = torch.tensor(numbers, dtype=torch.int64)
        return tuple(x[indices] for x in self.inputs), self.target[indices]


def _as_it_is(batch: Any) -> Any:
    return batch


def shuffled(count: int, size: int, join: int, seed: int, epoch: int) -> list[list[int]]:
    """Returns the samples of each batch of an epoch; a last batch of fewer than `join` joins the one before."""
    numbers = order(count, seed, epoch).tolist()
    batches = [numbers[first : first + size] for first in range(0, count, size)]
    if len(batches) > 1 and len(batches[-1]) < join:
        batches[-2:] = [batches[-2] + batches[-1]]
    return batches


def check_loss(loss: object) -> None:
    """LayerwiseError for what cannot be called, sums, or weights the samples by their classes."""
    if not callable(loss):
        raise LayerwiseError(
            f"loss is of type {type(loss).__name__}: give a function of outputs and targets, such as "
            "nn.CrossEntropyLoss()"
        )
    if getattr(loss, "reduction", "mean") != "mean":
        raise LayerwiseError("the loss must be a mean over samples: give one with reduction='mean'")
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) and loss.weight is not None:
        raise LayerwiseError(
            f"{type(loss).__name__} with class weights is no mean over samples, so it would depend on the number of "
            "ranks: leave weight= out"
        )


def check_targets(loss: object, target: Tensor, name: str) -> None:
    """LayerwiseError where the loss leaves some of these out: the rest is not what its mean is taken for."""
    index = IGNORED if loss is F.cross_entropy or loss is F.nll_loss else None
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        index = int(loss.ignore_index)
    if index is not None and not target.is_floating_point() and bool((target == index).any()):
        raise LayerwiseError(
            f"{name} has targets of {index}, which the loss ignores (ignore_index), so it would be no mean over "
            "samples and depend on the number of ranks: leave these samples out"
        )
