"""split: one device's DataLoader for this rank of a parallel model, which loads its share of every batch."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from layerwise.arguments import checked
from layerwise.checkpoint.signals import WorkerStart
from layerwise.errors import LayerwiseError
from layerwise.run.parallel import ParallelModule, of
from layerwise.train.loop import least

INSTEAD = "give parallelize what one rank calls the model with"
OTHERWISE = "make a DataLoader of its data set, and split that"


def example_of(loader: DataLoader[Any]) -> tuple[Tensor | tuple[Tensor, ...] | Mapping[str, Tensor], int]:
    """Returns what the model is called with, of two samples, and a batch's number. LayerwiseError for unfit loaders."""
    _check(loader)
    data: Any = loader.dataset
    batch, numbers = getattr(loader.batch_sampler, "batch_size", None), range(min(2, len(data)))
    if not isinstance(batch, int) or not numbers:
        raise LayerwiseError(f"the loader has no samples, or its batch sampler no batch_size: {INSTEAD}")
    with torch.random.fork_rng(devices=[]):  # augmentation draws; the script draws as if without this
        items = data.__getitems__(list(numbers)) if hasattr(data, "__getitems__") else [data[i] for i in numbers]
        collated = loader.collate_fn(items)
    pair = isinstance(collated, tuple | list) and len(collated) == 2
    inputs = collated[0] if pair else collated
    called = tuple(inputs) if pair and isinstance(inputs, tuple | list) else inputs
    tensors = called.values() if isinstance(called, Mapping) else called if isinstance(called, tuple) else (called,)
    if not all(isinstance(x, Tensor) for x in tensors):
        raise LayerwiseError(f"the loader's batches are neither (inputs, target) nor tensors by name: {INSTEAD}")
    return called, min(batch, len(data))


@checked
def split(loader: DataLoader[Any], model: ParallelModule) -> DataLoader[Any]:
    """Returns a loader of this rank's share of every batch. Every rank calls it alike; together they have all samples.

        loader = layerwise.split(loader, model)                      # after layerwise.parallelize

    Rank 0 draws the batches of the loader, which is that of one device, and each rank loads its share of each. The
    numbers are those of one device, step by step, also of a last batch that is not full. A loader that is not split
    gives all ranks the same samples.

    Args:
        loader: The loader of one device; its batch size is that of all ranks together.
        model: What `parallelize` returned.

    Returns:
        Another loader, of the same data set.

    Raises:
        LayerwiseError: The loader cannot be shared; when it is iterated, also where a batch has fewer samples than the
            plan needs: leave such a batch out with `drop_last=True`.

    Examples:
        >>> import layerwise
        >>> x, quiet = torch.randn(8, 4), layerwise.ParallelOptions(verbose=False)
        >>> model = layerwise.parallelize(torch.nn.Linear(4, 2), x, options=quiet)  # on one rank
        >>> [len(batch) for batch in layerwise.split(DataLoader(x, 8), model)]
        [8]
    """
    _check(loader)
    assert loader.batch_sampler is not None
    return DataLoader(
        loader.dataset,
        batch_sampler=Shares(loader.batch_sampler, model),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=WorkerStart(loader.worker_init_fn),
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def _check(loader: DataLoader[Any]) -> None:
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        raise LayerwiseError(f"the loader draws no batches of numbered samples: {INSTEAD}")
    if isinstance(loader.batch_sampler, Shares):
        raise LayerwiseError("the loader has a rank's share already, by layerwise.split: split it once")
    if isinstance(getattr(loader.batch_sampler, "sampler", None), DistributedSampler):
        raise LayerwiseError(
            "the loader has a DistributedSampler, which gives each rank its samples already: give parallelize what a "
            "rank calls the model with, and do not split it; or give both the loader that one device would have (as "
            "unequal devices need, whose shares are unequal)"
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise LayerwiseError(
            f"the loader is a {type(loader).__name__} with an __iter__ of its own, which would not be used: {OTHERWISE}"
        )
    try:
        len(loader)
    except TypeError:
        raise LayerwiseError(f"the loader's sampler has no length, and may have no end: {OTHERWISE}") from None


class Shares(Sampler[list[int]]):
    """Draws this rank's share of every batch that `batches` draws on rank 0."""

    def __init__(self, batches: Iterable[list[int]], module: ParallelModule) -> None:
        self.batches, self.module = batches, module

    def __iter__(self) -> Iterator[list[int]]:
        module, drawn = self.module, self._drawn()
        fewest = min(map(len, drawn), default=0)
        if drawn and fewest < least(of(module).plan):
            raise LayerwiseError(
                f"a batch of the loader has {fewest} samples, too few for the plan's cuts, which need "
                f"{least(of(module).plan)}: leave it out (drop_last=True), or take another batch size"
            )
        for numbers in drawn:
            yield numbers[of(module).share(len(numbers))]

    def __len__(self) -> int:
        assert isinstance(self.batches, Sized)
        return len(self.batches)

    def _drawn(self) -> list[list[int]]:
        """Returns rank 0's batches on all ranks, whatever their random states: its sampler would draw there alone."""
        comm = of(self.module).comm
        state = torch.random.get_rng_state() if comm.rank == 0 else torch.empty(0, dtype=torch.uint8)
        random_state = comm.broadcast_text(state.numpy().tobytes().hex())
        with nullcontext() if comm.rank == 0 else torch.random.fork_rng(devices=[]):
            if comm.rank:
                torch.random.set_rng_state(torch.frombuffer(bytearray.fromhex(random_state), dtype=torch.uint8))
            drawn = [_numbers(batch) for batch in islice(self.batches, len(self) + 1)]
        if len(drawn) > len(self):
            raise LayerwiseError(f"the loader's sampler draws more than the {len(self)} batches of its length")
        comm.handshake({"samples that the loader's sampler draws": f"{zlib.crc32(repr(drawn).encode()):08x}"})
        return drawn


def _numbers(batch: Iterable[Any]) -> list[int]:
    try:
        return list(map(int, batch))
    except (TypeError, ValueError):
        raise LayerwiseError(f"the loader's sampler draws other things than numbers of samples: {OTHERWISE}") from None
