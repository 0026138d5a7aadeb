"""python -m benchmarks.peers CHECKOUT: the search beside PaSE (Elango, IPDPS 2021) and toulbar2, on the same networks.

CHECKOUT is one of github.com/baidu-research/PaSE, of which nothing is here: its own graphs and program run, under
--python, a Python that has networkx and a pandas below 2. CPU seconds on one core, a process a row, in turn.

PaSE: its tables of its own costs, then its dynamic programming. layerwise: all configurations, costs and bounds, then
elimination, once: PaSE knows no overlap. toulbar2: equation 1 on our
tables, of every configuration and of those that our bounds leave; reading its file is part of it. A row that takes
longer than --limit is ended, and says so.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.common.command import numbers, some_of
from benchmarks.common.launch import in_a_process, printed
from benchmarks.planner import Row, optimum_of
from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel, CostTables
from layerwise.cost.price import complete
from layerwise.graph.fuse import fuse
from layerwise.importers.load import load_model
from layerwise.machine import load
from layerwise.quantities import units
from layerwise.search.baselines import NAMES, baseline, configurations
from layerwise.search.export import export_costs
from layerwise.search.solve.narrow import narrow

OURS = {"alexnet": "alexnet", "resnet101": "benchmarks.common.networks:resnet101", "inception3": "inception_v3"}
PEERS = {"pase": "PaSE", "all": "toulbar2, all", "left": "toulbar2, what is left"}
TITLES = {"ours": "layerwise", **PEERS}
SAMPLES = 8  # a GPU: PaSE's default is 128 of all, on 8 and more GPUs
# PaSE's main, without its printing. CreateGraph(name, batch, -, GPUs, TFLOP/s, GB/s) prices, Processor eliminates.
PASE = """
import contextlib, json, os, resource, sys, time, warnings
warnings.filterwarnings("ignore")
checkout, name, gpus, batch = sys.argv[1:]
sys.path.insert(0, checkout)
import graph, scheduler
with contextlib.redirect_stdout(open(os.devnull, "w")):
    started = time.process_time()
    built = graph.CreateGraph(name, int(batch), 128, int(gpus), 10.0, 16.0)
    priced = time.process_time()
    scheduler.Processor(built).ProcessGraph()
    ended = time.process_time()
configurations = [len(built.nodes[node]["op"].dom_config_tuples) for node in built]
print(json.dumps({"layers": len(configurations), "configurations": max(configurations), "tables": priced - started,
    "search": ended - priced, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
"""


def model_of(name: str, gpus: int) -> CostModel:
    """The network on the machine that the other tables of this folder are of."""
    return CostModel(fuse(load_model(OURS[name], SAMPLES * gpus)), load("h100").device_graph(gpus))


def ours(name: str, gpus: int) -> Row:
    """The optimum of equation 1, proven."""
    model = model_of(name, gpus)
    row, optimum_s = optimum_of(model, SearchSpace(gpus, spread=model.devices.nodes > 1))
    assert row["proven"]
    return row | {"optimum_s": optimum_s}


def toulbar2(name: str, gpus: int, which: str) -> Row:
    """Of the tables of `all` configurations, or of those that are `left`; its optimum is checked by the caller."""
    import pytoulbar2

    model = model_of(name, gpus)
    started = time.process_time()
    named = {n: complete(model, baseline(model, n)) for n in NAMES}
    configs = configurations(model, SearchSpace(gpus, spread=model.devices.nodes > 1), named)
    if which == "left":
        configs = narrow(model, configs, list(named.values()))[0].configs
    tables: CostTables = model.tables(configs)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "costs.cfn"
        export_costs(tables, path, name)
        built, problem = time.process_time(), pytoulbar2.CFN()
        problem.Read(str(path))
        answer = problem.Solve()
    assert answer is not None
    return {
        "layers": len(model.graph.inner),
        "configurations": max(map(len, configs.values())),
        "tables": built - started,
        "search": time.process_time() - built,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0,
        "optimum_s": float(answer[1]),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, nargs="?", help="of PaSE")
    parser.add_argument("--python", default=sys.executable, help="that runs PaSE (default: this one)")
    parser.add_argument("--models", type=some_of(OURS), default=list(OURS), metavar=",".join(OURS))
    parser.add_argument("--gpus", type=numbers, default=[8, 16, 32], metavar="8,16,32")
    parser.add_argument("--limit", type=int, default=300, metavar="SECONDS", help="of CPU, of a row (default 300)")
    parser.add_argument(
        "--peers", type=some_of(PEERS), default=list(PEERS), help="pase; toulbar2 on all configurations; on those left"
    )
    args = parser.parse_args()
    if "pase" in args.peers and (args.checkout is None or not (args.checkout / "scheduler.py").is_file()):
        parser.error("give the path of a checkout of github.com/baidu-research/PaSE, or other --peers")
    console = Console(width=140)
    columns = "layers", "configurations", "tables", "search", "both", "times ours", "peak"
    for name in args.models:
        for gpus in args.gpus:
            table = Table(f"{name} at {gpus}", *columns, box=None)
            least: Row = {}
            for which in ("ours", *args.peers):
                if which == "pase":  # -O leaves its assertions out, and its checks of tables
                    given = [str(args.checkout), name, str(gpus), str(SAMPLES * gpus)]
                    row = printed([args.python, "-O", "-c", PASE, *given], args.limit)
                elif which == "ours":
                    row = in_a_process("benchmarks.peers:ours", name, gpus, limit_s=args.limit)
                else:
                    row = in_a_process("benchmarks.peers:toulbar2", name, gpus, which, limit_s=args.limit)
                if row is None and which == "ours":
                    raise SystemExit(f"{name} at {gpus}: ours takes longer than --limit {args.limit}: give it more")
                if row is None:
                    table.add_row(TITLES[which], "", "", "", "", f"> {args.limit} s")
                    continue
                least = least or row
                if "optimum_s" in row:  # the same problem; the file has 1e-12 s, and three costs a layer or fewer
                    assert abs(row["optimum_s"] - least["optimum_s"]) <= 3e-12 * row["layers"], (row, least)
                both, of_ours = row["tables"] + row["search"], least["tables"] + least["search"]
                counts = (f"{row[key]:.0f}" for key in ("layers", "configurations"))
                times = (units(row[key], "s") for key in ("tables", "search"))
                shown = (units(both, "s"), f"{both / of_ours:.3g}", units(row["peak"], "B"))
                table.add_row(TITLES[which], *counts, *times, *shown)
            console.print(table, "")  # after each, as they may take long


if __name__ == "__main__":
    main()
