"""Loaders: a script's DataLoaders, for this rank of a parallel model. Their batches are those that one device has."""

from __future__ import annotations

import sys
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from layerwise.api.split import SplitDataset
from layerwise.checkpoint.signals import WorkerStart
from layerwise.errors import LayerwiseError
from layerwise.ops.ends import Input
from layerwise.run.parallel import ParallelModule, of
from layerwise.run.schedule.schedule import samples
from layerwise.train.loop import least

OTHERWISE = "give parallelize what one rank calls the model with, and split the data yourself: see layerwise.split"


def example_of(loader: DataLoader[Any]) -> tuple[Tensor | tuple[Tensor, ...] | Mapping[str, Tensor], int]:
    """Returns what the model is called with, of two samples, and a batch's number. LayerwiseError for unfit loaders."""
    check(loader)
    count = len(_sized(loader.dataset))
    if count < 1:
        raise LayerwiseError("the loader's data set has no samples")
    batch = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if not isinstance(batch, int):
        raise LayerwiseError(f"the loader's batch sampler has no batch_size: {OTHERWISE}")
    numbers = list(range(min(2, count)))
    data: Any = loader.dataset
    with torch.random.fork_rng(devices=[]):  # augmentation draws; the script draws as if without this
        items = data.__getitems__(numbers) if hasattr(data, "__getitems__") else [data[i] for i in numbers]
        collated = loader.collate_fn(items)
    inputs = collated[0] if isinstance(collated, tuple | list) and len(collated) == 2 else collated
    called = tuple(inputs) if isinstance(inputs, tuple | list) else inputs
    tensors = called.values() if isinstance(called, Mapping) else called if isinstance(called, tuple) else (called,)
    if (isinstance(collated, tuple | list) and len(collated) != 2) or not all(isinstance(x, Tensor) for x in tensors):
        raise LayerwiseError(f"the loader's batches are neither (inputs, target) nor tensors by name: {OTHERWISE}")
    return called, min(batch, count)


def check(loader: DataLoader[Any]) -> None:
    """LayerwiseError for what cannot be shared among ranks."""
    if not isinstance(loader, DataLoader):
        raise LayerwiseError(f"parallelize(model, loader, ...) takes further DataLoaders, not {type(loader).__name__}")
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        raise LayerwiseError(f"the loader draws no batches of numbered samples: {OTHERWISE}")
    if isinstance(getattr(loader.batch_sampler, "sampler", None), DistributedSampler):
        raise LayerwiseError(
            "the loader has a DistributedSampler: parallelize gives each rank its share of a batch by itself, so give "
            "it the loader that one device would have"
        )
    if isinstance(loader.dataset, SplitDataset):
        raise LayerwiseError(
            "the loader has a rank's share by layerwise.split: parallelize gives each rank its share of a batch by "
            "itself, so give it a loader of the whole data set"
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise LayerwiseError(
            f"the loader is a {type(loader).__name__} with an __iter__ of its own, which would not be used: {OTHERWISE}"
        )
    try:
        len(loader)
    except TypeError:
        raise LayerwiseError(f"the loader's sampler has no length, and may have no end: {OTHERWISE}") from None


def _sized(dataset: object) -> Sized:
    if not isinstance(dataset, Sized):
        raise LayerwiseError(f"the loader's data set has no length: {OTHERWISE}")
    return dataset


def shared(loaders: Iterable[DataLoader[Any]], module: ParallelModule) -> list[DataLoader[Any]]:
    """Returns loaders, the first to train on, the others to evaluate with. The module knows what they give it."""
    feeding = Feeding(module)
    return [SharedLoader(loader, feeding, full=number > 0) for number, loader in enumerate(loaders)]


class Feeding:
    """The batches that the module may be called with. live: of each loop over a loader, the latest last, its samples.

    full: every rank has all of it, not its share: without gradients each then computes its share only, and gets all
    outputs, where they have a row a sample. Else all ranks compute all of it, with the same result; so, too, where it
    may as well be a share of another loop's batch.
    """

    def __init__(self, module: ParallelModule) -> None:
        self.module, self.live = module, dict[object, tuple[int, bool]]()
        self._gathering = 0
        layers, batch = of(module).layer_graph.layers, of(module).layer_graph.batch
        sample_inputs = {layer.name for layer in layers if type(layer.op) is Input and layer.out.index("n") == 0}
        self._by_sample = [path for path, leaf in of(module).arguments.leaves.items() if leaf.name in sample_inputs]
        sink = layers[-1]
        losses = any(name in of(module).layer_graph.losses for name in sink.inputs)
        self._rows = not losses and all(x.index("n") == 0 and x.shape[0] == batch for x in sink.specs)
        module.register_forward_pre_hook(self._before, with_kwargs=True)
        module.register_forward_hook(self._after)

    def least(self) -> int:
        """Returns the samples that a batch must have for every rank to have a part of every layer."""
        return least(of(self.module).plan)

    def _before(
        self, _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._gathering = 0
        module = self.module
        if not self.live or "batch" in named or of(module).plan.io == "free" or of(module).arguments.takes("batch"):
            return None
        flat = of(module).arguments.named(inputs, named)
        by_sample = [x for path in self._by_sample if isinstance(x := flat.get(path), Tensor) and x.dim()]
        sizes = {x.shape[0] for x in by_sample}
        feeding = reversed(self.live.values())
        size, full = next(
            (loop for loop in feeding if sizes == {loop[0] if loop[1] else self._shares(loop[0])[0]}), (0, False)
        )
        if size and not full:
            return inputs, named | {"batch": size}
        others = {count for size, full in self.live.values() if not full for count in self._shares(size)}
        alone = torch.is_grad_enabled() or not self._rows or of(module).comm.size == 1 or size in others
        if alone or size < self.least():
            return None
        self._gathering, share = size, of(module).share(size)
        cut = set(map(id, by_sample))
        local, by_name = pytree.tree_map_only(Tensor, lambda x: x[share] if id(x) in cut else x, (inputs, named))
        return local, by_name | {"batch": size}

    def _shares(self, size: int) -> list[int]:
        """Returns how many samples of a batch this rank has, then how many the others have."""
        counts = [share.stop - share.start for share in samples(of(self.module).plan, size)]
        return [counts.pop(of(self.module).comm.rank), *counts]

    def _after(self, _: nn.Module, inputs: Any, outputs: Any) -> Any:
        return pytree.tree_map_only(Tensor, self._gather, outputs) if self._gathering else outputs

    def _gather(self, local: Tensor) -> Tensor:
        """Returns the rows of all ranks."""
        module, size = self.module, self._gathering
        shares = [(share.start, share.stop) for share in samples(of(module).plan, size)]
        padded = local.new_zeros((max(stop - start for start, stop in shares), *local.shape[1:]))
        padded[: len(local)] = local
        every = padded.new_empty((of(module).comm.size, *padded.shape))
        of(module).comm.all_gather(
            every, padded, tuple(range(of(module).comm.size)), "io", "outputs of an evaluation"
        ).wait()
        full = local.new_empty((size, *local.shape[1:]))
        for shard, (start, stop) in zip(every, shares, strict=True):
            full[start:stop] = shard[: stop - start]
        return full


class Shares(Sampler[list[int]]):
    """Draws this rank's share (full: all) of every batch that `theirs` draws on rank 0. sizes: of those batches."""

    def __init__(self, theirs: Iterable[list[int]], feeding: Feeding, *, full: bool) -> None:
        self.theirs, self.feeding, self.full = theirs, feeding, full
        self.sizes = deque[int]()

    def __iter__(self) -> Iterator[list[int]]:
        module, drawn = self.feeding.module, self._drawn()
        if not self.full or self.joining():
            _join(drawn, self.feeding.least())
        self.sizes = deque(map(len, drawn))
        for numbers in drawn:
            yield numbers if self.full else numbers[of(module).share(len(numbers))]

    def __len__(self) -> int:
        return len(_sized(self.theirs)) - bool(self.joining())

    def joining(self) -> int:
        """Returns the size of a last batch that is too small for the plan's cuts, and joins the one before; else 0."""
        theirs = self.theirs
        split = not self.full or (
            of(self.feeding.module).plan.io == "free" and getattr(theirs, "batch_size", 0) >= self.feeding.least()
        )
        if not split or not isinstance(theirs, BatchSampler) or theirs.drop_last:
            return 0
        left = len(_sized(theirs.sampler)) % theirs.batch_size
        return left if left < self.feeding.least() and len(theirs) > 1 else 0

    def _drawn(self) -> list[list[int]]:
        """Returns rank 0's batches on all ranks, whatever their random states: its sampler would draw there alone."""
        comm = of(self.feeding.module).comm
        state = torch.random.get_rng_state() if comm.rank == 0 else torch.empty(0, dtype=torch.uint8)
        random_state = comm.broadcast_text(state.numpy().tobytes().hex())
        with nullcontext() if comm.rank == 0 else torch.random.fork_rng(devices=[]):
            if comm.rank:
                torch.random.set_rng_state(torch.frombuffer(bytearray.fromhex(random_state), dtype=torch.uint8))
            most = len(_sized(self.theirs))
            drawn = [_numbers(batch) for batch in islice(self.theirs, most + 1)]
        if len(drawn) > most:
            raise LayerwiseError(f"the loader's sampler draws more than the {most} batches of its length: {OTHERWISE}")
        comm.handshake({"samples that the loader's sampler draws": f"{zlib.crc32(repr(drawn).encode()):08x}"})
        return drawn


def _numbers(batch: Iterable[Any]) -> list[int]:
    try:
        return list(map(int, batch))
    except (TypeError, ValueError):
        raise LayerwiseError(f"the loader's sampler draws other things than numbers of samples: {OTHERWISE}") from None


def _join(drawn: list[list[int]], least: int) -> None:
    """Joins a last batch that is too small for the plan's cuts with the one before."""
    if drawn and len(drawn[-1]) < least:
        if len(drawn) < 2:
            raise LayerwiseError(
                f"the loader's only batch has {len(drawn[-1])} samples, too few for the plan's cuts, which need "
                f"{least}: give more data, or start fewer ranks"
            )
        drawn[-2:] = [drawn[-2] + drawn[-1]]
    if any(len(batch) < least for batch in drawn):
        raise LayerwiseError(
            f"the loader's sampler draws batches of {min(map(len, drawn))} samples, too few for the plan's cuts, which "
            f"need {least}"
        )


class SharedLoader(DataLoader[Any]):
    """`theirs`, but each rank loads its share of the batches only, or each all of them (full)."""

    def __init__(self, theirs: DataLoader[Any], feeding: Feeding, *, full: bool) -> None:
        check(theirs)
        assert theirs.batch_sampler is not None
        self._feeding, self._full = feeding, full
        self._shares = Shares(theirs.batch_sampler, feeding, full=full)
        super().__init__(
            theirs.dataset,
            batch_sampler=self._shares,
            num_workers=theirs.num_workers,
            collate_fn=theirs.collate_fn,
            pin_memory=theirs.pin_memory,
            timeout=theirs.timeout,
            worker_init_fn=WorkerStart(theirs.worker_init_fn),
            multiprocessing_context=theirs.multiprocessing_context,
            generator=theirs.generator,
            prefetch_factor=theirs.prefetch_factor,
            persistent_workers=theirs.persistent_workers,
        )
        self.__dict__["batch_size"] = theirs.batch_size  # as scripts ask for it; of all ranks together
        left = self._shares.joining()
        if left and of(feeding.module).comm.rank == 0:
            print(
                f"layerwise: the last {left} samples are too few for a batch: they join the one before", file=sys.stderr
            )

    def __iter__(self) -> Any:
        live, loop, sizes = self._feeding.live, object(), None
        try:
            for batch in super().__iter__():
                sizes = self._shares.sizes if sizes is None else sizes  # of this loop: another may begin within it
                live.pop(loop, None)
                live[loop] = sizes.popleft(), self._full
                yield batch
        finally:  # also where the loop is left early
            live.pop(loop, None)
