"""python -m benchmarks.search: how long tables and search take, and how that grows; the paper's tables 2 and 3.

Power-of-two degrees, fused layers, batch 32 a GPU, one process a row (peak memory is the process's), on as many cores
as the environment allows: OMP_NUM_THREADS=1 for one.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel, CostOptions
from layerwise.graph.fuse import fuse
from layerwise.importers.load import load_model
from layerwise.machine import load
from layerwise.quantities import units
from layerwise.search.baselines import NAMES, baseline, depth_first
from layerwise.search.eliminate import eliminate
from layerwise.search.find import configurations, search

AIMS = [("vgg16", 16), ("inception_v3", 16), ("inception_v3", 64), ("resnet50", 64), ("vgg16", 256)]
GROWTH = [("vgg16", n) for n in (4, 8, 16, 32, 64, 128, 256)]
PAPER = ["lenet5", "alexnet", "vgg16", "inception_v3"]
P100 = [(name, n) for n in (4, 16) for name in ("alexnet", "vgg16", "inception_v3", "resnet50")]
Row = dict[str, float]


def measure(name: str, gpus: int, profile: str) -> Row:
    """One search as `python -m layerwise.search` does it."""
    started = time.perf_counter()
    graph = fuse(load_model(name, 32 * gpus))
    imported = time.perf_counter()
    devices = load(profile).device_graph(gpus)
    model = CostModel(graph, devices)
    result = search(model, SearchSpace(gpus, powers_of_two=True, spread=devices.nodes > 1))
    return {
        "layers": len(graph.inner),
        "K": result.optimum.final_nodes,
        "configurations": result.configurations["largest"],
        "import": imported - started,
        **result.seconds,
        "all": time.perf_counter() - started,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "proven": float(result.optimum.proven),
    }


def paper(name: str, limit_s: float) -> Row:
    """Table 3: elimination against depth-first search on the same unpruned tables, 4 P100, the paper's cost model."""
    graph = fuse(load_model(name, 128))
    model = CostModel(graph, load("p100").device_graph(4), CostOptions("sum", "parameter-server", "free"))
    named = {n: baseline(model, n) for n in NAMES}
    tables = model.tables(configurations(model, SearchSpace(4), named, {}))
    started = time.perf_counter()
    optimum = eliminate(tables)
    ours = time.perf_counter() - started
    theirs = depth_first(tables, limit_s)
    if theirs.finished:
        assert abs(theirs.cost_s - optimum.cost_s) < 1e-9 * optimum.cost_s, (theirs, optimum)
    return {
        "layers": len(graph.inner),
        "K": optimum.final_nodes,
        "elimination": ours,
        "depth-first": theirs.seconds,
        "finished": float(theirs.finished),
    }


def strategies(name: str, gpus: int) -> Row:
    """Predicted step times with overlap on the paper's cluster: what was found, and the baselines."""
    graph, devices = fuse(load_model(name, 32 * gpus)), load("p100").device_graph(gpus)
    result = search(CostModel(graph, devices), SearchSpace(gpus, spread=devices.nodes > 1))
    data = result.baselines["data"].timeline.total_s
    return {
        "layerwise": result.best.timeline.total_s,
        **{n: c.timeline.total_s for n, c in result.baselines.items()},
        "against data": data / result.best.timeline.total_s,
        "bytes against data": result.best.price.bytes_moved / result.baselines["data"].price.bytes_moved,
    }


def alone(*arguments: str) -> Row:
    """A row in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.search", "--row", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ)
    row: Row = json.loads(done.stdout)
    return row


def rows(kind: str, profile: str, limit_s: float) -> Iterator[tuple[str, Row]]:
    """The rows of one table."""
    if kind == "paper":
        for name in PAPER:
            yield name, alone("paper", name, str(limit_s))
    elif kind == "p100":
        for name, gpus in P100:
            yield f"{name} at {gpus}", alone("p100", name, str(gpus))
    else:
        for name, gpus in AIMS if kind == "aims" else GROWTH:
            yield f"{name} at {gpus}", alone("search", name, str(gpus), profile)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", default="h100")
    parser.add_argument(
        "--depth-first", type=float, default=60, metavar="SECONDS", help="limit of each run (default 60)"
    )
    parser.add_argument("--only", choices=["aims", "growth", "paper", "p100"])
    parser.add_argument("--row", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        kind, name, *rest = args.row
        if kind == "paper":
            print(json.dumps(paper(name, float(rest[0]))))
        elif kind == "p100":
            print(json.dumps(strategies(name, int(rest[0]))))
        else:
            print(json.dumps(measure(name, int(rest[0]), rest[1])))
        return
    console = Console(width=110)
    titles = {
        "aims": "search",
        "growth": "growth with the number of GPUs (table 2: O(E C^3))",
        "paper": "the paper's table 3",
        "p100": "the paper's cluster: predicted step times",
    }
    for kind, title in titles.items():
        if args.only not in (None, kind):
            continue
        table: Table | None = None
        for label, row in rows(kind, args.profile, args.depth_first):
            if table is None:
                table = Table("", *row, title=title, box=None)
            table.add_row(label, *(shown(column, value, row) for column, value in row.items()))
        console.print(table or "")


def shown(column: str, value: float, row: Row) -> str:
    """A cell."""
    if column in ("proven", "finished"):
        return "yes" if value else "no"
    if column == "depth-first" and not row["finished"]:
        return f"> {units(value, 's')}"
    if column.endswith("data") and column != "data":
        return f"{value:.2f}×"
    if column in ("layers", "K", "configurations"):
        return f"{value:.0f}"
    return units(value, "B" if column == "peak" else "s")


if __name__ == "__main__":
    main()
