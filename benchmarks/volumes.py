"""python -m benchmarks.volumes: networks of volumes, of which one sample is split over 2 and 4 ranks by space alone.

Each is planned for 8 GPUs at batch 1 with io "boxes" (profile h100). Then one sample of a small size is trained a step
on 2 and 4 ranks (threads), every layer split along space wherever it can be (along the first that has room; on four
ranks also two by two): loss, outputs, gradients, buffers and parameters against plain PyTorch on one device, and
bytes sent against those predicted.

    PYTHONPATH=.venv/zoo python -m benchmarks.volumes    # after `make zoo`
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.common.command import KEPT, Kept
from benchmarks.common.volumes import NETWORKS as OWN
from benchmarks.zoo.example import Example
from benchmarks.zoo.networks import build
from benchmarks.zoo.trial import one_line, prepared
from layerwise.comm.base import Comm
from layerwise.config import Config, SearchSpace
from layerwise.cost.model import CostModel, CostOptions
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.importers.load import Network, network_of
from layerwise.importers.torch.read.arguments import tensors
from layerwise.machine import load as load_profile
from layerwise.plan import Plan
from layerwise.run.load import load
from layerwise.run.local_tensor import local_tensor
from layerwise.search.find import search
from tests.comm.thread import run_threads
from tests.run.plans import KINDS, PREDICTED, difference, random_plan

GPUS, PROFILE = 8, "h100"
LARGER = 8  # times the sides of the sample that is trained are those of the one that is planned
EXACT = {"float64": 1e-9, "float32": 1e-3}
ZOO = (
    *("monai/UNet 3D", "monai/BasicUNet", "monai/SegResNet", "monai/SegResNetDS", "monai/DynUNet"),
    *("monai/AttentionUnet", "monai/VNet", "monai/HighResNet", "monai/DenseNet", "monai/ResNet 3D"),
    *("monai/UNETR", "monai/SwinUNETR", "nnunet/PlainConvUNet 3D", "nnunet/ResidualEncoderUNet 3D"),
)
SAMPLES = {"monai/VNet": 2, "monai/ResNet 3D": 2}  # where a batch norm comes down to one voxel; of others one
# The way in which every layer is split: the first of these that it can be, else not at all.
WAYS: Mapping[str, Sequence[Mapping[str, int]]] = {
    "2 ranks": ({"d": 2}, {"h": 2}, {"w": 2}, {"s": 2}),
    "2 ranks, w": ({"w": 2}, {"h": 2}, {"s": 2}),
    "4 ranks": ({"d": 4}, {"h": 4}, {"w": 4}, {"s": 4}, {"d": 2, "h": 2}, {"d": 2}, {"s": 2}),
    "4 ranks, 2 x 2": ({"d": 2, "h": 2}, {"h": 2, "w": 2}, {"d": 2}, {"s": 4}, {"s": 2}),
}


@dataclass
class Row:
    """What became of a network."""

    name: str
    size: str = ""  # of the sample that is trained
    layers: int = 0
    split: dict[str, int] = field(default_factory=dict)  # by way: how many of them are split
    differences: dict[str, float] = field(default_factory=dict)  # by way: the largest, relative
    said: dict[str, str] = field(default_factory=dict)  # by way: why not, or what differs most
    planned_at: str = ""  # the size that is planned for 8 GPUs
    gain: float = 0.0  # predicted: how many times as fast as one GPU
    proven: bool = False
    plan_s: float = 0.0  # CPU time


class Scored(nn.Module):
    """Outputs, and a loss that tells every element of every one from all others."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        outputs = [out for out in tensors(self.model(x)) if out.is_floating_point()]
        losses = [(out - 0.3 * (i + 1)).square().mean() for i, out in enumerate(outputs)]
        return (torch.stack(losses).sum(), *outputs)


def spatial(ways: Sequence[Mapping[str, int]], ranks: int) -> Callable[[Network], Plan]:
    """Every layer split in the first of these ways that it can be."""

    def pick(configs: Sequence[Config]) -> Config:
        return next((config for way in ways if (config := Config.of(way)) in configs), Config())

    return lambda network: random_plan(fuse(network.graph), ranks, 0, "boxes", pick)


def trial(name: str, example: Example, dtype: str) -> Row:
    """All of one network."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    row = Row(name)
    given = prepared(example, getattr(torch, dtype))
    x = given.inputs[0][: SAMPLES.get(name, 1)]
    row.size = f"{len(x)} of " * (len(x) > 1) + " x ".join(map(str, x.shape[2:]))
    model = Scored(given.model)
    try:
        network = network_of(model, (x,), len(x), name)
    except LayerwiseError as error:
        row.said["import"] = str(error)
        return row
    row.layers = len(fuse(network.graph).inner)
    _plan(row, model, x, network)
    wanted = _reference(model, x)
    for way, splits in WAYS.items():
        made = spatial(splits, int(way[0]))(network)
        row.split[way] = sum(config.total > 1 for config in made.strategy.values())
        try:
            away = _compared(network, made, x, wanted)
        except (LayerwiseError, AssertionError) as error:
            row.said[way] = one_line(error)
            continue
        row.differences[way] = max(away.values())
        if not row.differences[way] <= EXACT[dtype]:
            row.said[way] = max(away, key=lambda key: away[key] if away[key] == away[key] else float("inf"))
    return row


def _plan(row: Row, module: nn.Module, x: Tensor, small: Network) -> None:
    """For 8 GPUs, of `LARGER` times the sides, where the network takes that."""
    shape = (*x.shape[:2], *(LARGER * extent for extent in x.shape[2:]))
    try:
        with torch.device("meta"):
            large = copy.deepcopy(module).float().to("meta")
            network = network_of(large, (torch.empty(shape),), len(x), row.name)
    except (LayerwiseError, RuntimeError, TypeError):  # it is built for one size, or asks for values
        network, shape = small, tuple(x.shape)
    row.planned_at = " x ".join(map(str, shape[2:]))
    begun = time.process_time()
    model = CostModel(fuse(network.graph), load_profile(PROFILE).device_graph(GPUS), CostOptions(io="boxes"))
    found = search(model, SearchSpace(GPUS))
    row.gain = found.baselines["data"].timeline.total_s / found.fastest.timeline.total_s
    row.proven = bool(found.optimum.proven)
    row.plan_s = time.process_time() - begun


def _reference(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Of one device."""
    own = copy.deepcopy(model)
    loss, *outputs = own(x)
    loss.backward()
    made = {f"output {i}": out.detach() for i, out in enumerate((loss, *outputs))}
    made |= {f"gradient of {name}": p.grad for name, p in own.named_parameters() if p.grad is not None}
    return made | {f"state {name}": value for name, value in own.state_dict().items()}


def _compared(network: Network, plan: Plan, x: Tensor, wanted: Mapping[str, Tensor]) -> dict[str, float]:
    """The largest differences of all ranks, by what differs. AssertionError where other bytes are sent."""

    def step(comm: Comm) -> tuple[dict[str, float], dict[str, int]]:
        torch.set_num_threads(1)
        module = load(plan, network, comm=comm, dtype=x.dtype)
        (box,) = module.read_boxes().values()
        before = dict(comm.sent)
        loss, *outputs = module(x[box.slices()].contiguous())
        loss.backward()
        sent = {kind: comm.sent[kind] - before.get(kind, 0) for kind in KINDS}
        away = {"output 0": difference(loss, wanted["output 0"])}
        for i, (out, its) in enumerate(zip(outputs, module.output_boxes()[1:], strict=True), start=1):
            whole = wanted[f"output {i}"]
            away[f"output {i}"] = difference(out, whole[its.slices()] if its else whole[:0])
        boxes = {shard.name: shard.box for shard in module.shards()}
        for name, p in module.named_parameters():
            if f"gradient of {name}" in wanted:
                mine = wanted[f"gradient of {name}"][boxes[name].slices()]
                got = torch.zeros_like(mine) if p.grad is None else local_tensor(p.grad).clone()
                away[f"gradient of {name}"] = difference(got, mine)
        state = module.full_state_dict()
        return away | {f"state {n}": difference(value, wanted[f"state {n}"]) for n, value in state.items()}, sent

    ranks = run_threads(plan.gpus, step, timeout_s=300)
    for kind in KINDS:
        sent, told = sum(sent[kind] for _, sent in ranks), round(plan.predicted[PREDICTED[kind]])
        assert sent == told, f"{kind}: {sent:,} bytes sent, {told:,} predicted"
    return {
        name: max(away.get(name, 0.0) for away, _ in ranks) for name in dict.fromkeys(n for a, _ in ranks for n in a)
    }


def main() -> int:
    """Prints rows as they come. Exit code 1 where one is not exact."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="GLOB", help="such as 'monai/*'")
    parser.add_argument("--dtype", default="float64", choices=list(EXACT))
    parser.add_argument("--json", type=Path, metavar="FILE", help=KEPT)
    asked = parser.parse_args()
    kept = Kept(asked.json)
    wanted = [name for name in (*OWN, *ZOO) if any(fnmatch(name, glob) for glob in asked.only)]
    for name in [name for name in wanted if kept.find(name=name) is None]:
        row = trial(name, OWN[name]() if name in OWN else build(name), asked.dtype)
        split = f"{row.size}, {min(row.split.values(), default=0)} of {row.layers} layers split"
        told = ", ".join(f"{way}: {away:.0e}" for way, away in row.differences.items())
        gain = f"gain at {row.planned_at}: {row.gain:.2f}{'' if row.proven else ' (not proven)'}, {row.plan_s:.1f} s"
        print(f"{name:32} {split}  {told}  {gain}", *row.said.items(), sep="\n    ", flush=True)
        kept.add(asdict(row))
    return int(any(row["said"] for row in kept.rows))


if __name__ == "__main__":
    sys.exit(main())
