"""split: a rank's share of a data set or of a DataLoader's batches. What is left out or repeated is said."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence, Sized
from itertools import pairwise
from typing import Any, Literal, overload

import torch.distributed as dist
from torch.utils.data import DataLoader, Subset

from layerwise.api.loaders import split_loader
from layerwise.arguments import Count, checked
from layerwise.errors import LayerwiseError
from layerwise.geometry import boundaries
from layerwise.run.parallel import ParallelModule, of

Remainder = Literal["short", "repeat", "leave out"]


class SplitDataset(Subset[Any]):
    """A rank's share of a map-style data set: some of its samples, in its order.

    batch_size: how many of a whole batch, for a DataLoader. last: how many samples of all ranks together the last batch
    has, where it is not whole, else None. note: what became of the remainder.
    """

    def __init__(self, dataset: Any, numbers: Sequence[int], batch_size: int, last: int | None, note: str) -> None:
        super().__init__(dataset, numbers)
        self.batch_size, self.last, self.note = batch_size, last, note


@overload
def split(dataset: DataLoader[Any], model: ParallelModule) -> DataLoader[Any]: ...  # type: ignore[overload-overlap]


@overload
def split(
    dataset: Sized,
    model: ParallelModule | None = None,
    *,
    batch: Count | None = None,
    remainder: Remainder = "short",
    verbose: bool = True,
) -> SplitDataset: ...


@checked
def split(
    dataset: Sized | DataLoader[Any],
    model: ParallelModule | None = None,
    *,
    batch: Count | None = None,
    remainder: Remainder = "short",
    verbose: bool = True,
) -> SplitDataset | DataLoader[Any]:
    """Returns this rank's share of the data; all ranks call it alike, and together they have all of it.

        loader = layerwise.split(loader, model)                      # after layerwise.parallelize

    Of a DataLoader, as one device has it, rank 0 draws the batches, and each rank loads its share of each. What is not
    split has the same samples on all ranks, as a loader to evaluate with may. Of a map-style data set:

        share = layerwise.split(dataset, model)
        loader = DataLoader(share, share.batch_size)

    Batch i of all ranks' loaders (of a share: without shuffling) together is batch i of one device's: the numbers are
    equal to one device's, step by step. Without model and batch a share is one contiguous part of the data.

    Args:
        dataset: Samples by number; or a DataLoader, with a model alone.
        model: What `parallelize` returned.
        batch: Samples of all ranks together. None: the model's.
        remainder: What becomes of a last batch that is not full. "short": it is split as evenly as it goes; some ranks
            may have a sample less. "repeat": the first samples fill it up, so these count twice, as with torch's
            DistributedSampler. "leave out": it is not used.
        verbose: Rank 0 prints which of these happened, in one line.

    Returns:
        The share, a Dataset; its `batch_size` is for a DataLoader. Of a DataLoader another one.

    Raises:
        LayerwiseError: There are fewer samples than ranks, or the last batch has; or the loader cannot be shared.

    Examples:
        >>> len(split(range(10), batch=4, verbose=False))  # on one rank
        10
    """
    if isinstance(dataset, DataLoader):
        if model is None or batch is not None or remainder != "short":
            raise LayerwiseError("a DataLoader has its own batches: split(loader, model) takes the model, and no more")
        if isinstance(dataset.dataset, SplitDataset):
            raise LayerwiseError("the loader has a rank's share already, by layerwise.split: leave out one of the two")
        return split_loader(dataset, model)
    rank, size, free = seat(model)
    count = len(dataset)
    if count < size and not free:
        raise LayerwiseError(f"the data set has {count} samples, too few for {size} ranks: each needs one at least")
    full_batch = batch if batch is not None else of(model).plan.batch if model is not None else None
    each = count if full_batch is None else full_batch
    left = count % each if full_batch is not None else 0
    uneven = count % size if full_batch is None else left
    numbers, last, note = list(range(count)), None, ""
    if uneven and remainder == "leave out":
        numbers = numbers[: count - uneven]
        note = f"the last {uneven} of {count:,} samples are left out"
    elif uneven and remainder == "repeat":
        fill = (size if full_batch is None else each) - uneven
        numbers += [i % count for i in range(fill)]
        note = f"the first {fill} of {count:,} samples count twice, to fill the last batch"
    elif uneven:
        if left and left < size and not free:
            raise LayerwiseError(
                f"the last batch has {left} of {count:,} samples, too few for {size} ranks: take remainder='repeat' or "
                "'leave out', or another batch"
            )
        last = left or None
        note = (
            f"{count:,} samples over {size} ranks: some ranks have one more"
            if last is None
            else f"the last of {-(-count // each):,} batches has {last} samples"
        )
    if note and verbose and rank == 0:
        print(f"layerwise.split: {note}", file=sys.stderr)
    each = len(numbers) if full_batch is None else each
    batches = (numbers[first : first + each] for first in range(0, len(numbers), each))
    local = [number for samples in batches for number in _part(samples, rank, size, model)]
    return SplitDataset(dataset, local, max(1, len(_part(range(each), rank, size, model))), last, note)


def _part(numbers: Sequence[int], rank: int, size: int, model: ParallelModule | None) -> Sequence[int]:
    if model is not None:
        return numbers[of(model).share(len(numbers))]
    cuts = [slice(a, b) for a, b in pairwise(boundaries(len(numbers), size).tolist())]
    return numbers[cuts[rank]]


def seat(model: ParallelModule | None = None) -> tuple[int, int, bool]:
    """Returns this process's rank, the number of ranks, and whether every rank feeds everything."""
    if model is not None:
        return of(model).comm.rank, of(model).comm.size, of(model).plan.io != "sample"
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size(), False
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), False
