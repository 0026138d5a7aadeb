"""python -m benchmarks.planner: how long a search takes, how that grows with the GPUs, its memory; the paper's table 3.

CPU seconds on one core, a process a row; fused layers, batch 32 a GPU (4 of a GPT). `tables` has the
configurations, all costs and the message passing that bounds them, `search` the elimination.
Neither has the import of the network, nor the choice among the optima by simulated steps.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common.command import KEPT, Kept, words
from benchmarks.common.depth_first import depth_first
from benchmarks.common.launch import in_a_process
from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel, CostOptions
from layerwise.cost.price import complete
from layerwise.graph.fuse import fuse
from layerwise.importers.load import load_model
from layerwise.machine import load
from layerwise.oracle.__main__ import counts
from layerwise.quantities import units
from layerwise.search.baselines import NAMES, baseline, configurations
from layerwise.search.find import search
from layerwise.search.solve.eliminate import eliminate
from layerwise.search.solve.narrow import exact_optimum, narrow

NETWORKS = ("inception_v3", "resnet50", "vgg16")
GPUS = "16,64,256"
PAPER = ["lenet5", "alexnet", "vgg16", "inception_v3"]
P100 = [(name, n) for n in (4, 16) for name in ("alexnet", "vgg16", "inception_v3", "resnet50")]
PUBLISHED = {"alexnet": (12.2, 6.1), "vgg16": (14.8, 10.2), "inception_v3": (15.5, 11.2)}  # Jia et al., section 6.3
READINGS = {
    "sum": CostOptions("sum", "parameter-server", "free"),
    "connection": CostOptions("connection", "parameter-server", "free"),
    "overlap": CostOptions(),
}
TRANSFORMERS = ("benchmarks.common.gpt:", "benchmarks.common.large:")
Row = dict[str, float]


def measure(name: str, gpus: int, profile: str, degrees: str) -> Row:
    """The optimum of equation 1, as `layerwise search` finds them without a memory limit."""
    graph = fuse(load_model(name, (4 if name.startswith(TRANSFORMERS) else 32) * gpus))
    devices = load(profile).device_graph(gpus)
    space = SearchSpace(gpus, powers_of_two=degrees == "2", spread=devices.nodes > 1)
    return optimum_of(CostModel(graph, devices), space)[0]


def optimum_of(model: CostModel, space: SearchSpace) -> tuple[Row, float]:
    """How the optimum of equation 1 was found, and its seconds a step."""
    started = time.process_time()
    named = {n: complete(model, baseline(model, n)) for n in NAMES}
    configs = configurations(model, space, named)
    tables, upper_s = narrow(model, configs, list(named.values()))
    built = time.process_time()
    _, optimum = exact_optimum(model, tables, upper_s, 2.0**31)
    row = {
        "layers": len(model.graph.inner),
        "K": optimum.final_nodes,
        "configurations": max(map(len, configs.values())),
        "kept": max(map(len, tables.configs.values())),
        "tables": built - started,
        "search": time.process_time() - built,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "proven": float(optimum.proven),
    }
    return row, optimum.cost_s


def paper(name: str, limit_s: float) -> Row:
    """Table 3: elimination against depth-first searches, on the same unpruned tables of 4 P100."""
    graph = fuse(load_model(name, 128))
    model = CostModel(graph, load("p100").device_graph(4), CostOptions("sum", "parameter-server", "free"))
    named = {n: baseline(model, n) for n in NAMES}
    tables = model.tables(configurations(model, SearchSpace(4), named))
    started = time.perf_counter()
    optimum = eliminate(tables)
    ours = time.perf_counter() - started
    row = {"layers": len(graph.inner), "K": optimum.final_nodes, "elimination": ours}
    for kind, bounded in (("exhaustive", False), ("branch and bound", True)):
        found = depth_first(tables, limit_s, bounded=bounded)
        if found.finished:
            assert abs(found.cost_s - optimum.cost_s) < 1e-9 * optimum.cost_s, (found, optimum)
        row[kind], row[f"{kind} finished"] = found.seconds, float(found.finished)
    return row


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


def readings(name: str) -> Row:
    """Speed-ups from 1 to 16 P100, and the best other's: two readings of the paper's cost model, and with overlap."""
    row = dict(zip(("published", "other published"), PUBLISHED[name], strict=True))
    for label, options in READINGS.items():
        rates: dict[str, dict[int, float]] = {"": {}, "other ": {}}
        for gpus in (1, 16):
            model = CostModel(fuse(load_model(name, 32 * gpus)), load("p100").device_graph(gpus), options)
            space, additive = SearchSpace(gpus, powers_of_two=True, spread=gpus > 4), options.link_model != "port"
            result = search(model, space, objective="additive" if additive else "timeline")
            for kind, candidates in (("", [result.best]), ("other ", result.baselines.values())):
                each = (c.price.step_time_s if additive else c.timeline.total_s for c in candidates)
                rates[kind][gpus] = 32 * gpus / min(each)
        row |= {f"{kind}{label}": rate[16] / rates[""][1] for kind, rate in rates.items()}
    return row


def print_table(console: Console, title: str, rows: Iterable[tuple[str, Row]]) -> None:
    """Rows with the same columns."""
    table: Table | None = None
    for label, row in rows:
        if table is None:
            table = Table("", *row, title=title, box=None)
        table.add_row(label, *(shown(column, value, row) for column, value in row.items()))
    console.print(table or "")


def growth(found: Mapping[tuple[str, int], Row]) -> Iterator[tuple[str, Row]]:
    """Of each network the power of the number of GPUs with which seconds and bytes grow, fitted to all rows."""
    for name in dict.fromkeys(name for name, _ in found):
        rows = {gpus: row for (other, gpus), row in found.items() if other == name}
        if len(rows) > 1:
            x = np.log(list(rows))
            powers = {c: np.polyfit(x, np.log([row[c] for row in rows.values()]), 1)[0] for c in ("tables", "peak")}
            yield name, {f"{column} ~ N^": float(power) for column, power in powers.items()}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=words, default=NETWORKS, help=f"with commas (default {','.join(NETWORKS)})")
    parser.add_argument(
        "--gpus", type=counts, default=GPUS, help=f"with commas, or 16..1024, the powers of two (default {GPUS})"
    )
    parser.add_argument("--degrees", choices=["2", "divisors"], default="2", help="powers of two, or all divisors")
    parser.add_argument("--profile", default="h100")
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"of the first table: {KEPT}")
    parser.add_argument(
        "--depth-first", type=float, default=60, metavar="SECONDS", help="limit of each run (default 60)"
    )
    parser.add_argument("--only", choices=["planner", "paper", "p100", "readings"])
    args = parser.parse_args()
    console = Console(width=120)
    if args.only in (None, "planner"):
        kept, found = Kept(args.json), dict[tuple[str, int], Row]()
        for name, gpus in [(name, gpus) for name in args.models for gpus in args.gpus]:
            key = {"model": name, "gpus": gpus, "profile": args.profile, "degrees": args.degrees}
            known = kept.find(**key)
            found[name, gpus] = (
                known or kept.add(key | {"row": in_a_process("benchmarks.planner:measure", *key.values())})
            )["row"]
        print_table(console, "CPU seconds of a search", [(f"{n} at {g}", row) for (n, g), row in found.items()])
        print_table(console, "growth with the number of GPUs N", growth(found))
    if args.only in (None, "paper"):
        rows = ((name, in_a_process("benchmarks.planner:paper", name, args.depth_first)) for name in PAPER)
        print_table(console, "the paper's table 3", rows)
    if args.only in (None, "p100"):
        rows = ((f"{name} at {gpus}", in_a_process("benchmarks.planner:strategies", name, gpus)) for name, gpus in P100)
        print_table(console, "the paper's cluster: predicted step times", rows)
    if args.only in (None, "readings"):
        rows = ((name, in_a_process("benchmarks.planner:readings", name)) for name in PUBLISHED)
        print_table(console, "speed-ups from 1 to 16 GPUs, and those of the best other strategy", rows)


def shown(column: str, value: float, row: Row) -> str:
    """A cell."""
    if column.removeprefix("other ") in ("published", *READINGS):
        return f"{value:.1f}"
    if column == "proven" or column.endswith("finished"):
        return "yes" if value else "no"
    if not row.get(f"{column} finished", 1.0):
        return f"> {units(value, 's')}"
    if column.endswith("data") and column != "data":
        return f"{value:.2f}×"
    if column.endswith("^"):
        return f"{value:.2f}"
    if column in ("layers", "K", "configurations", "kept"):
        return f"{value:.0f}"
    return units(value, "B" if column.startswith("peak") else "s")


if __name__ == "__main__":
    main()
