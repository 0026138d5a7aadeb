"""python -m benchmarks.host_time: the host time of a training step on one device, against the plain PyTorch model.

On a GPU the host has to be ahead of the device, so what layerwise adds on the host counts where layers are short.
Images are tiny here, so that the host's share is large. Both models take the same steps turn about, on one thread, by
process time; the ratio is that of the medians, the spread the quartiles of the ratios of neighbouring steps.

    python -m benchmarks.host_time              against eager
    python -m benchmarks.host_time --compile    parallelize(compile=True) against torch.compile of the model
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import layerwise.models
import torch
from torch import Tensor, nn

import layerwise

# (network, side of its images); two samples a step.
NETWORKS = (("mobilenet_v2", 32), ("densenet121", 32), ("resnet18", 32), ("resnet50", 64))
BATCH = 2


@dataclass(frozen=True)
class Row:
    """What one network's steps took."""

    network: str
    side: int
    layers: int  # of the plan
    eager_s: float
    layerwise_s: float
    ratio: float  # of these two medians
    quartiles: tuple[float, float]  # of the ratios of neighbouring steps
    added_s_per_layer: float


def step_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], Tensor]:
    """One step of SGD, which returns the loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss: Tensor = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def seconds(step: Callable[[], object]) -> float:
    """Process time of one call, over all threads."""
    begun = time.process_time()
    step()
    return time.process_time() - begun


def compare(name: str, side: int, steps: int, *, compiled: bool) -> Row:
    """Both models' steps, turn about. compiled: both through torch.compile."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(BATCH, 3, side, side), torch.zeros(BATCH, dtype=torch.long)
    plain = layerwise.models.find(name).build()
    model = layerwise.models.find(name).build()
    parallel = layerwise.parallelize(
        model, inputs, options=layerwise.ParallelOptions(measure_s=0, verbose=False), compile=compiled
    )
    if compiled:
        plain.compile()
    contestants = {"eager": step_of(plain, inputs, targets), "layerwise": step_of(parallel, inputs, targets)}
    for step in contestants.values():
        for _ in range(3):
            step()
    times: dict[str, list[float]] = {which: [] for which in contestants}
    for turn in range(steps):
        for which in sorted(contestants, reverse=turn % 2 == 1):
            times[which].append(seconds(contestants[which]))
    medians = {which: statistics.median(each) for which, each in times.items()}
    ratios = [mine / theirs for mine, theirs in zip(times["layerwise"], times["eager"], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    layers = len(parallel.plan.strategy)
    added = (medians["layerwise"] - medians["eager"]) / layers
    ratio = medians["layerwise"] / medians["eager"]
    return Row(name, side, layers, medians["eager"], medians["layerwise"], ratio, (low, high), added)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_time", description=__doc__.split(": ", 1)[1])
    parser.add_argument("--steps", type=int, default=60, help="of each model, turn about (default: %(default)s)")
    parser.add_argument("--only", choices=[name for name, _ in NETWORKS], help="one network")
    parser.add_argument("--compile", action="store_true", help="both models through torch.compile")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        compare(name, side, args.steps, compiled=args.compile) for name, side in NETWORKS if args.only in (None, name)
    ]
    print("network       pixels  layers      eager  layerwise  ratio  (quartiles)      added a layer")
    for row in rows:
        times = f"{row.eager_s * 1e3:6.1f} ms  {row.layerwise_s * 1e3:6.1f} ms  {row.ratio:.3f}"
        spread = f"({row.quartiles[0]:.3f} … {row.quartiles[1]:.3f})"
        print(
            f"{row.network:12}  {row.side:6}  {row.layers:6}  {times}  {spread}  {row.added_s_per_layer * 1e6:10.0f} µs"
        )
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
