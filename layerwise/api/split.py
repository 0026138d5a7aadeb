"""split: a rank's share of a data set or of a DataLoader's batches. What is left out or repeated is said."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence, Sized
from typing import Any, Literal, overload

from torch.utils.data import DataLoader, Subset

from layerwise.api.loaders import split_loader
from layerwise.arguments import checked
from layerwise.errors import LayerwiseError
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
def split(dataset: Sized, model: ParallelModule, *, remainder: Remainder = "short") -> SplitDataset: ...


@checked
def split(
    dataset: Sized | DataLoader[Any], model: ParallelModule, *, remainder: Remainder = "short"
) -> SplitDataset | DataLoader[Any]:
    """Returns this rank's share of the data. Every rank calls it alike; together they have all of the data.

        loader = layerwise.split(loader, model)                      # after layerwise.parallelize

    Rank 0 draws the batches of a DataLoader, which is that of one device, and each rank loads its share of each. A
    loader that is not split gives all ranks the same samples. A map-style data set is split for a loader of your own:

        share = layerwise.split(dataset, model)
        loader = DataLoader(share, share.batch_size)                 # without shuffling

    The numbers are those of one device, step by step: batch i of all ranks together is batch i of one device.

    Args:
        dataset: Samples by number, or a DataLoader.
        model: What `parallelize` returned.
        remainder: What happens to the last batch of a data set if it is not full. "short": it is split as evenly as
            possible. "repeat": the first samples fill it up, so they count twice, as with torch's DistributedSampler.
            "leave out": it is not used. Rank 0 prints a line where there is such a batch.

    Returns:
        The share, a Dataset whose `batch_size` is for a DataLoader; or, of a DataLoader, another one.

    Raises:
        LayerwiseError: There are fewer samples than ranks, also in the last batch; or the loader cannot be shared.

    Examples:
        >>> import torch, layerwise
        >>> x, quiet = torch.randn(8, 4), layerwise.ParallelOptions(verbose=False)
        >>> model = layerwise.parallelize(torch.nn.Linear(4, 2), x, options=quiet)  # on one rank
        >>> share = layerwise.split(x, model)
        >>> len(share), share.batch_size
        (8, 8)
    """
    if isinstance(dataset, DataLoader):
        if remainder != "short":
            raise LayerwiseError("a DataLoader has its own batches: leave remainder= out, and give it drop_last=True")
        if isinstance(dataset.dataset, SplitDataset):
            raise LayerwiseError("the loader has a rank's share already, by layerwise.split: leave out one of the two")
        return split_loader(dataset, model)
    run = of(model)
    made = share_of(dataset, run.share, run.plan.batch, run.comm.size, run.plan.io != "sample", remainder)
    if made.note and run.comm.rank == 0:
        print(f"layerwise.split: {made.note}", file=sys.stderr)
    return made


def share_of(
    dataset: Sized, share: Callable[[int], slice], batch: int, size: int, free: bool, remainder: Remainder
) -> SplitDataset:
    """Returns the share of one of `size` ranks, which has `share` of a batch. free: every rank feeds all of it."""
    count = len(dataset)
    if count < size and not free:
        raise LayerwiseError(f"the data set has {count} samples, too few for {size} ranks: each needs one at least")
    left, last, note = count % batch, None, ""
    numbers = list(range(count))
    if left and remainder == "leave out":
        numbers = numbers[: count - left]
        note = f"the last {left} of {count:,} samples are left out"
    elif left and remainder == "repeat":
        numbers += [i % count for i in range(batch - left)]
        note = f"the first {batch - left} of {count:,} samples count twice, to fill the last batch"
    elif left:
        if left < size and not free:
            raise LayerwiseError(
                f"the last batch has {left} of {count:,} samples, too few for {size} ranks: take remainder='repeat' or "
                "'leave out', or another batch"
            )
        last, note = left, f"the last of {-(-count // batch):,} batches has {left} samples"
    batches = (numbers[first : first + batch] for first in range(0, len(numbers), batch))
    local = [number for samples in batches for number in samples[share(len(samples))]]
    return SplitDataset(dataset, local, max(1, len(range(batch)[share(batch)])), last, note)
