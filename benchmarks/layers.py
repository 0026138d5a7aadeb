"""python -m benchmarks.layers: steps of layerwise.run on one device, against the sum of its layers' measured t_C.

Every layer is measured by itself, as `layerwise measure layers` does it, and a plan for one device is priced with that.
Then the same network takes steps: before the layers are measured and after, as machines drift. The last column is
predicted over measured. On a GPU: --device cuda --networks vgg16 ...; these are taken with --batch samples.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.common.networks import NETWORKS
from layerwise.api.planning.measuring import module
from layerwise.comm.solo import SoloComm
from layerwise.config import Config, SearchSpace
from layerwise.cost.model import CostModel, CostOptions
from layerwise.cost.price import price
from layerwise.graph.fuse import fuse
from layerwise.importers.load import Network, load_network, network_of
from layerwise.measure.conditions import conditions, device_of, mode_of, modes
from layerwise.measure.layers.job import Job, base_profile
from layerwise.measure.layers.step import optimizer_of
from layerwise.measure.stopwatch import Reading, Stopwatch
from layerwise.plan import Plan
from layerwise.quantities import units
from layerwise.run.load import load


def _only(strategy: Mapping[str, Config], *_: object) -> list[Mapping[str, Config]]:
    """There is nothing to search on one device."""
    return [strategy]


def network(name: str, batch: int) -> Network:
    """A small network of this folder, or a built-in one."""
    if name not in NETWORKS:
        return load_network(name, batch, None)
    known = NETWORKS[name]
    torch.manual_seed(0)
    return network_of(known.build(), (torch.empty(2, *known.input_shape),), batch, name)


def main() -> None:
    """Print a row a network."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", default=["lenet5", "alexnet", "vgg"])
    parser.add_argument("--device", choices=["cuda", "cpu"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--optimizer", choices=["sgd", "momentum", "adam"], default="sgd")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds for a network's layers (default: 120)")
    parser.add_argument("--layers", action="store_true", help="a row for every layer")
    args = parser.parse_args()
    device = device_of(args.device)
    mode = mode_of(device, args.dtype, channels_last=False)
    table = Table("", "measured", "predicted", "of it measured cells", "predicted / measured", box=None)
    with modes(args.dtype, None, False) as tf32:
        where = conditions(mode, args.dtype, tf32, False)
        base = base_profile(None, None, where, device)
        for name in args.networks:
            batch = NETWORKS[name].global_batch(1) if name in NETWORKS else args.batch
            net = network(name, batch)
            graph = fuse(net.graph)
            serial = {layer.name: Config() for layer in graph.inner}
            plan = Plan(name, graph.digest, batch, 1, 1, "sample", fused=True, strategy=serial)
            before = real(plan, net, args, mode.dtype, mode.autocast, device)
            options = CostOptions(optimizer=args.optimizer, dtype=args.dtype)
            job = Job(base, where, None, mode, graph, base.device_graph(1), options, SearchSpace(1), args.budget)
            times = job.run(partial(_only, serial), module, quiet=False).times
            model = CostModel(graph, replace(base, layers=(times,)).device_graph(1), options)
            cost = price(model, serial)
            after = real(plan, net, args, mode.dtype, mode.autocast, device)
            measured = statistics.mean([sum(before.seconds), sum(after.seconds)])
            shown = (units(measured, "s"), units(cost.step_time_s, "s"))
            share = sum(p.measured_s for p in cost.layers.values()) / cost.step_time_s
            table.add_row(name, *shown, f"{share:.0%}", f"{cost.step_time_s / measured:.3f}")
            if args.layers:
                for layer, p in cost.layers.items():
                    if p.seconds["compute"]:
                        table.add_row(f"  {layer}", "", units(p.seconds["compute"], "s"), "", "")
    Console(width=110).print(table)


def real(
    plan: Plan, net: Network, args: argparse.Namespace, dtype: torch.dtype, autocast: torch.dtype | None,
    device: torch.device,
) -> Reading:  # fmt: skip
    """Whole steps of the runtime: forward, loss, backward, update."""
    runtime = load(plan, net, comm=SoloComm(device), dtype=dtype, autocast=autocast)
    update = optimizer_of(args.optimizer, list(runtime.parameters()))
    spec = next(layer.out for layer in runtime.graph.layers if layer.end)
    out = runtime.graph.layers[-1].specs[0]
    x = torch.randn(spec.shape, device=device, dtype=dtype)
    target = torch.randint(out.shape[1], (out.shape[0], *out.shape[2:]), device=device)

    def step() -> None:
        update.zero_grad()
        made = runtime(x)
        outputs = made if isinstance(made, tuple) else (made,)
        torch.stack([nn.functional.cross_entropy(o.float(), target) for o in outputs]).sum().backward()
        update.step()

    return Stopwatch(device, 8.0)([step])


if __name__ == "__main__":
    main()
