"""python -m benchmarks.cells: what a rank's part of each layer takes under some splits, by CPU time, one thread.

Each piece is measured by itself, forward and backward, as `layerwise measure layers` does it. What has not so many
slices as a split wants is split into as many as it has. Beside other work CPU time says more than a clock does.

    python -m benchmarks.cells unet2 d=4 w=4 n=2,d=2 n=2,w=2
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from math import prod

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common.networks import NETWORKS
from benchmarks.ranks.cluster_plan import OPTIMIZER, graph_of
from benchmarks.ranks.side_by_side import MODE
from layerwise.config import Config
from layerwise.cost.model import CostModel, CostOptions
from layerwise.graph.fuse import fuse
from layerwise.graph.layer import Layer
from layerwise.machine import load
from layerwise.machine.layer_times import CellTime
from layerwise.measure.bench import CellSpec
from layerwise.measure.cells import Key, layer_cells
from layerwise.measure.measuring import timed
from layerwise.measure.timing import Stopwatch

Split = dict[str, int]


def split_of(text: str) -> Split:
    """`n=2,d=2`."""
    pairs = (part.partition("=") for part in text.split(","))
    return {dim: int(degree) for dim, _, degree in pairs}


def limited(layer: Layer, split: Split) -> Config:
    """As many as it has slices for."""
    return Config.of({dim: min(degree, layer.space.max_degree(dim)) for dim, degree in split.items()})


def times(model: CostModel, splits: Sequence[Split]) -> dict[str, list[tuple[float, float]]]:
    """By layer, forward and backward seconds under each split."""
    stopwatch = Stopwatch(MODE.device, 0.1, least=3, clock=time.process_time)
    known, rows = dict[Key, CellTime](), {}
    for layer in model.graph.inner:
        rows[layer.name] = []
        for split in splits:
            (cell,) = (c for c in layer_cells(model, layer, (limited(layer, split),)) if isinstance(c.spec, CellSpec))
            if cell.key not in known:
                known[cell.key] = timed(cell, MODE, stopwatch)
            rows[layer.name].append((known[cell.key].forward_s, known[cell.key].backward_s))
    return rows


def main() -> None:
    """Print a row a layer, milliseconds forward + backward."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("network", choices=list(NETWORKS))
    p.add_argument("splits", nargs="+", type=split_of, metavar="n=2,d=2")
    p.add_argument("--batch", type=int, help="default: the network's")
    args = p.parse_args()
    torch.set_num_threads(1)
    ranks = max(prod(split.values()) for split in args.splits)
    graph = fuse(graph_of(args.network, args.batch or NETWORKS[args.network].global_batch(ranks)))
    model = CostModel(graph, load("cpu").device_graph(ranks), CostOptions(io="free", optimizer=OPTIMIZER))
    rows = times(model, args.splits)
    result = Table("ms", *(str(Config.of(split)) for split in args.splits), box=None)
    for name, row in rows.items():
        result.add_row(name, *(f"{1e3 * forward:.1f} + {1e3 * backward:.1f}" for forward, backward in row))
    sums = [sum(forward + backward for forward, backward in column) for column in zip(*rows.values(), strict=True)]
    result.add_row("all", *(f"{1e3 * total:.0f}" for total in sums))
    Console(width=160).print(result)


if __name__ == "__main__":
    main()
