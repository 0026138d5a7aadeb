"""python -m benchmarks.memory_prediction: the memory of a training step, predicted and measured.

Networks at reduced size, on one rank and on two (processes, gloo) under the plans `data`, `model`, the searched one and
`space` (that splits volumes only), and with all layers recomputed; each rank's peak is measured (`common.live`) and the
fullest counts. Bytes are counted, so the table is the same on every run. On a GPU (--device cuda, one rank): the peak
of CUDA's allocator.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from layerwise.models import find

from benchmarks.common.live import step_bytes
from benchmarks.common.networks import NETWORKS as LIKE
from benchmarks.common.networks import SMALL
from layerwise.comm.base import Comm
from layerwise.comm.solo import SoloComm
from layerwise.config import Config, SearchSpace
from layerwise.cost.model import CostModel, CostOptions
from layerwise.cost.price import price
from layerwise.graph.fuse import fuse
from layerwise.importers.load import Network, network_of
from layerwise.machine import DeviceGraph
from layerwise.machine import load as load_profile
from layerwise.measure.conditions import TYPES, device_of
from layerwise.partition.blocks import recomputable
from layerwise.plan import Plan, parse_plan
from layerwise.quantities import units
from layerwise.search.baselines import baseline
from layerwise.search.find import search
from tests.comm.pool import run_ranks
from tests.traces import by_rank_0


@dataclass(frozen=True, slots=True)
class Case:
    """A network and its global batch. A built-in one: its samples' shape and options."""

    batch: int
    shape: tuple[int, ...] = ()
    options: dict[str, float] = field(default_factory=dict)


CASES = {
    "lenet5": Case(32, (1, 32, 32)),
    "alexnet-like": Case(64),
    "vgg-like": Case(64),
    "inception-like": Case(32),
    "vgg16": Case(8, (3, 64, 64), {"width": 0.25, "num_classes": 10}),
    "resnet18": Case(8, (3, 96, 96), {"width": 0.5, "num_classes": 10}),
    "resnet50": Case(8, (3, 96, 96), {"width": 0.5, "num_classes": 10}),
    "unet3d": Case(2, (1, 32, 32, 32), {"width": 0.25}),
    "unet3d, one sample": Case(1, (1, 32, 32, 64), {"width": 0.25}),  # io free
}
# And the states, and whether all layers that gain by it are recomputed.
SERIAL = ("serial", "serial, recompute")
PLANS = ("data", "model", "searched", "data, sharded", "data, gathered", "model, gathered")
PLANS += ("space", "data, recompute", "model, recompute", "data, gathered, recompute")
OPTIMIZERS = ("sgd", "momentum", "adam")
ROW = "{:19} {:5} {:25} {:9} {:>8} {:>9} {:>20}"


@cache
def network(name: str) -> Network:
    """One of the cases."""
    case, known = CASES[name], {f"{key}-like": made for key, made in (SMALL | LIKE).items()}
    torch.manual_seed(0)
    if name in known:
        module, shape = known[name].build(), known[name].input_shape
    else:
        module, shape = find(name.partition(",")[0]).build(**case.options), case.shape
    return network_of(module, (torch.empty(2, *shape),), case.batch, name, trusted=True)


def cpus(ranks: int) -> DeviceGraph:
    """CPU cores, taken to compute in bf16 as fast as in float32."""
    devices = load_profile("cpu").device_graph(ranks)
    rates = devices.processor.peak_flops
    return replace(devices, processor=replace(devices.processor, peak_flops={**rates, "bf16": rates["float32"]}))


def planned(name: str, kind: str, optimizer: str, ranks: int, dtype: str = "float32") -> tuple[Plan, float]:
    """A plan, and the bytes that it is predicted to take."""
    graph = fuse(network(name).graph)
    options = CostOptions(io="sample" if graph.batch >= ranks else "free", optimizer=optimizer, dtype=dtype)
    model = CostModel(graph, cpus(ranks), options)
    kind, *choices = kind.split(", ")
    if ranks == 1:
        strategy = {layer.name: Config() for layer in graph.inner}
    else:
        made = configs(model, kind, ranks)
        strategy = {layer.name: made[layer.name] for layer in graph.inner}
    again = recomputable(graph) if "recompute" in choices else frozenset()
    states = next((states for states in ("sharded", "gathered") if states in choices), "replicated")
    strategy = {name: replace(config, recompute=name in again, states=states) for name, config in strategy.items()}
    plan = Plan(name, graph.digest, graph.batch, ranks, ranks, options.io, fused=True, strategy=strategy)
    return plan, price(model, strategy).memory_bytes


def configs(model: CostModel, kind: str, ranks: int) -> Mapping[str, Config]:
    """By layer. `space`: each is cut along the first spatial dimension that has room."""
    if kind == "searched":
        return search(model, SearchSpace(ranks)).additive.strategy
    if kind != "space":
        return baseline(model, kind)
    rooms = {layer.name: [d for d in "dhw" if layer.space.max_degree(d) >= ranks] for layer in model.graph.inner}
    return {name: Config.of(dict.fromkeys(room[:1], ranks)) for name, room in rooms.items()}


def on_rank(comm: Comm, name: str, plan: str, optimizer: str, dtype: str) -> float:
    """What one of several ranks measures."""
    _, autocast = TYPES[dtype]
    with by_rank_0(comm):
        given = network(name)
    return step_bytes(given, parse_plan(plan, "the plan of this benchmark"), comm, optimizer, autocast)


def compared(
    name: str, kind: str, optimizer: str, ranks: int, device: torch.device, dtype: str = "float32"
) -> tuple[float, float]:
    """Bytes: predicted and measured."""
    plan, predicted = planned(name, kind, optimizer, ranks, dtype)
    if ranks == 1:
        return predicted, step_bytes(network(name), plan, SoloComm(device), optimizer, TYPES[dtype][1])
    peaks = run_ranks(ranks, "benchmarks.memory_prediction:on_rank", name, plan.dumps(), optimizer, dtype)
    return predicted, max(float(str(peak)) for peak in peaks)


def main() -> None:
    """Print a row a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--device", choices=["cuda", "cpu"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--dtype", choices=["float32", "bf16"], default="float32")
    args = parser.parse_args()
    device = device_of(args.device)
    print(ROW.format("", "ranks", "plan", "optimizer", "measured", "predicted", "predicted / measured"), flush=True)
    worst = 0.0
    for name in args.networks:
        rows = [(ranks, kind) for ranks in args.ranks for kind in (PLANS if ranks > 1 else SERIAL)]
        for ranks, kind in rows:
            for optimizer in OPTIMIZERS:
                predicted, real = compared(name, kind, optimizer, ranks, device, args.dtype)
                worst = max(worst, abs(predicted / real - 1))
                sizes = units(real, "B"), units(predicted, "B")
                print(ROW.format(name, ranks, kind, optimizer, *sizes, f"{predicted / real:.3f}"), flush=True)
    print(f"at most {worst:.1%} off")


if __name__ == "__main__":
    main()
