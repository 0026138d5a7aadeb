"""python -m tests.benchmarks.memory_prediction: the memory of a step on one device, predicted and measured.

On a GPU the peak of CUDA's allocator; on a CPU the most bytes of storages that are alive at once, seen by every
operator that PyTorch dispatches (what a kernel allocates for itself alone is not among them).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from layerwise.comm.solo import SoloComm
from layerwise.config import Config
from layerwise.cost.price import price
from layerwise.cost.tables import CostModel, CostOptions
from layerwise.graph.fuse import fuse
from layerwise.machine import load as load_profile
from layerwise.measure.conditions import device_of
from layerwise.measure.step import optimizer_of
from layerwise.plan import Plan
from layerwise.run.load import load
from layerwise.search.report import units
from tests.benchmarks.layers import network
from tests.benchmarks.networks import NETWORKS


class Live(TorchDispatchMode):
    """Counts the bytes of storages that are alive; `peak` is the most there were."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.known: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self.see(tensors)

    def see(self, tensors: Iterable[Tensor]) -> None:
        """Takes storages in, and lets those go that are gone."""
        for t in tensors:
            storage = t.untyped_storage()
            ref = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self.known[ref.cdata] = (ref, storage.nbytes())
        self.known = {key: (ref, size) for key, (ref, size) in self.known.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self.known.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.see(t for t in tree_leaves(out) if isinstance(t, Tensor))
        return out


def measured(name: str, batch: int, optimizer: str, device: torch.device) -> tuple[float, float]:
    """Bytes: predicted, and of the second step, when the optimizer has its state."""
    net = network(name, batch)
    graph = fuse(net.graph)
    serial = {layer.name: Config() for layer in graph.inner}
    plan = Plan(name, graph.digest, batch, 1, 1, "sample", fused=True, strategy=serial)
    model = CostModel(graph, load_profile("cpu").device_graph(1), CostOptions(optimizer=optimizer))
    runtime = load(plan, net, comm=SoloComm(device))
    update = optimizer_of(optimizer, list(runtime.parameters()))
    x = torch.randn(next(layer.out.shape for layer in graph.layers if layer.end), device=device)
    out = graph.layers[-1].specs[0].shape
    target = torch.randint(out[1], (out[0], *out[2:]), device=device)

    def step() -> None:
        update.zero_grad()
        made = runtime(x)
        outputs = made if isinstance(made, tuple) else (made,)
        torch.stack([nn.functional.cross_entropy(o, target) for o in outputs]).sum().backward()
        update.step()

    step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return price(model, serial).memory_bytes, float(torch.cuda.max_memory_allocated(device))
    held = [*runtime.parameters(), *runtime.buffers(), x, *(p.grad for p in runtime.parameters() if p.grad is not None)]
    state = [t for values in update.state.values() for t in values.values() if isinstance(t, Tensor)]
    live = Live([*held, *state])
    del held, state
    with live:
        step()
    return price(model, serial).memory_bytes, float(live.peak)


def main() -> None:
    """Print a row a network."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", default=["lenet5", "alexnet", "vgg", "unet"])
    parser.add_argument("--device", choices=["cuda", "cpu"])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--optimizers", nargs="+", default=["sgd", "adam"])
    args = parser.parse_args()
    device = device_of(args.device)
    table = Table("", "optimizer", "measured", "predicted", "predicted / measured", box=None)
    for name in args.networks:
        batch = NETWORKS[name].global_batch(1) if name in NETWORKS else args.batch
        for optimizer in args.optimizers:
            predicted, real = measured(name, batch, optimizer, device)
            table.add_row(name, optimizer, units(real, "B"), units(predicted, "B"), f"{predicted / real:.3f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
