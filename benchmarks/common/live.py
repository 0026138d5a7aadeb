"""The memory of a real training step: on a CPU the most bytes of storages that are alive at once, else CUDA's peak.

Storages are seen by every operator that PyTorch dispatches; what a kernel allocates for itself alone is not among them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from layerwise.comm.base import Comm
from layerwise.graph.fuse import fuse
from layerwise.importers.load import Network
from layerwise.importers.torch.read.arguments import tensors
from layerwise.measure.bench import optimizer_of
from layerwise.plan import Plan
from layerwise.run.load import load
from layerwise.run.local_tensor import local_tensor
from layerwise.train.score import cross_entropy


class Live(TorchDispatchMode):
    """Counts the bytes of storages that are alive; `peak` is the most there were."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.known: dict[int, StorageWeakRef] = {}
        self.peak = 0
        self.see(known)

    def see(self, new: Iterable[Tensor]) -> None:
        """Takes storages in, and lets those go that are gone."""
        for t in new:
            storage = local_tensor(t).untyped_storage()  # a DTensor has none of its own
            ref = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self.known[ref.cdata] = ref
        sizes = {key: size for key, ref in self.known.items() if (size := _nbytes(ref)) is not None}
        self.known = {key: self.known[key] for key in sizes}
        self.peak = max(self.peak, sum(sizes.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # What is in oneDNN's layout has no storage; it lives within one call, as a kernel's own buffers do.
        self.see(t for t in tree_leaves(out) if isinstance(t, Tensor) and not t.is_mkldnn and not t.is_meta)
        return out


def _nbytes(ref: StorageWeakRef) -> int | None:
    """What a storage has now, as its memory may come and go while it stays; None where it is gone."""
    storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
    return None if storage is None else storage.nbytes()


def step_bytes(
    network: Network, plan: Plan, comm: Comm, optimizer: str | None, autocast: torch.dtype | None = None
) -> float:
    """The peak of this rank in the second step, when the optimizer has its state, of `layerwise train`'s kind.

    optimizer: None for a step of inference.
    """
    module = load(plan, network, comm=comm, autocast=autocast)
    module.train(optimizer is not None)
    update = None if optimizer is None else optimizer_of(optimizer, list(module.parameters()))
    graph = fuse(network.graph)
    (entry,) = (layer for layer in graph.layers if layer.end and layer.name in {s for s, _, _ in graph.edges()})
    share = module.share()
    rows = share.stop - share.start
    x = torch.randn(rows, *entry.out.shape[1:], device=comm.device)
    targets = [
        torch.randint(spec.shape[1], (rows, *spec.shape[2:]), device=comm.device) for spec in graph.layers[-1].specs
    ]

    def loss() -> Tensor:
        pairs = zip(tensors(module(x)), targets, strict=True)
        return torch.stack([cross_entropy(out, target) for out, target in pairs]).sum()

    def step() -> None:
        if update is None:
            with torch.no_grad():
                module(x)
            return
        update.zero_grad()
        loss().backward()  # type: ignore[no-untyped-call]
        update.step()

    step()
    if comm.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(comm.device)
        step()
        return float(torch.cuda.max_memory_allocated(comm.device))
    held = [*module.parameters(), *module.buffers(), x, *targets]
    held += [p.grad for p in module.parameters() if p.grad is not None]
    states = [] if update is None else update.state.values()
    held += [t for values in states for t in values.values() if isinstance(t, Tensor)]
    live = Live(held)
    del held
    with live:
        step()
    return float(live.peak)
