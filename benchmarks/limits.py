"""python -m benchmarks.limits: plans under a memory limit, how near they are to proven, and how long the search takes.

Limits are shares of what the plan without a limit needs, with Adam. Times are CPU times of one process, of the whole
search but the import of the network: without the limit, and with it. A process a row, one core.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common.gpt import Gpt2
from benchmarks.common.launch import in_a_process
from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel, CostOptions
from layerwise.graph.fuse import fuse
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.load import load_model, network_of
from layerwise.machine import load
from layerwise.quantities import units
from layerwise.search.find import search
from layerwise.search.result import SearchResult

SAMPLES = {"vgg16": 32, "resnet50": 32, "inception_v3": 32, "densenet121": 32, "unet3d": 2, "gpt2": 2}  # a GPU
GPUS = (8, 64)
SHARES = (0.8, 0.6)
Row = dict[str, float]


def graph_of(name: str, gpus: int) -> LayerGraph:
    """The fused network at its global batch."""
    batch = SAMPLES[name] * gpus
    if name != "gpt2":
        return fuse(load_model(name, batch))
    with torch.device("meta"):
        return fuse(network_of(Gpt2(), (torch.zeros(2, 1024, dtype=torch.long),), batch, name).graph)


def timed(graph: LayerGraph, gpus: int, profile: str, limit_bytes: float) -> tuple[SearchResult, float]:
    """A search by a model of its own, and its CPU seconds."""
    started = time.process_time()
    devices = load(profile).device_graph(gpus)
    model = CostModel(graph, devices, CostOptions(optimizer="adam"))
    found = search(model, SearchSpace(gpus, spread=devices.nodes > 1), memory_limit_bytes=limit_bytes)
    return found, time.process_time() - started


def measure(name: str, gpus: int, share: float, profile: str) -> Row:
    """One row of the table."""
    graph = graph_of(name, gpus)
    free, without_s = timed(graph, gpus, profile, 1e18)
    limit = share * free.best.price.memory_bytes
    found, with_s = timed(graph, gpus, profile, limit)
    within = found.within
    assert within is not None
    assert not found.best.fits or found.best.price.memory_bytes <= limit
    return {
        "limit": limit,
        "fits": float(found.best.fits),
        "without limit": free.additive.price.step_time_s,
        "step": within.cost_s,
        "bound": within.lower_bound_s,
        "proven": float(within.proven),
        "time without": without_s,
        "time": with_s,
    }


def shown(row: Row) -> list[str]:
    """The cells of a row."""
    if not row["fits"]:
        proof = "nothing fits (proven)" if row["bound"] == float("inf") else "nothing found"
    else:
        proof = "proven" if row["proven"] else f"{row['step'] / row['bound'] - 1:.2%}"
    steps = [units(row[column], "s") for column in ("without limit", "step", "bound")]
    times = [f"{row[column]:.1f} s" for column in ("time without", "time")]
    return [units(row["limit"], "B"), *steps, proof, *times, f"{row['time'] / row['time without']:.1f}×"]


def report(names: Iterable[str], gpus: Iterable[int], shares: Iterable[float], profile: str) -> tuple[Table, str]:
    """All rows, each told on standard error as it comes, and a line on them together."""
    columns = ("limit", "no limit", "step", "bound", "gap", "search, no limit", "search", "ratio")
    table, rows = Table("", "GPUs", "share", *columns, box=None), list[Row]()
    for name in names:
        for count in gpus:
            for share in shares:
                rows.append(in_a_process("benchmarks.limits:measure", name, count, share, profile))
                cells = shown(rows[-1])
                print(name, count, share, *cells, file=sys.stderr, flush=True)
                table.add_row(name, str(count), f"{share:g}", *cells)
    gaps = [row["step"] / row["bound"] - 1 for row in rows if row["fits"]]
    ratio = median(row["time"] / row["time without"] for row in rows)
    told = f"gaps {median(gaps):.2%} in the median, at most {max(gaps):.2%}" if gaps else "nothing fits"
    return table, f"{len(rows)} searches take {ratio:.1f} times as long as without a limit in the median; {told}."


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", default="h100")
    parser.add_argument("--only", nargs="+", choices=list(SAMPLES), default=list(SAMPLES), metavar="NETWORK")
    parser.add_argument("--gpus", nargs="+", type=int, default=GPUS)
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES)
    args = parser.parse_args()
    Console(width=140).print(*report(args.only, args.gpus, args.shares, args.profile), sep="\n")


if __name__ == "__main__":
    main()
