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
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

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


def alone(command: list[str], limit_s: int) -> Row | None:
    """A row in a process of its own, on one core; None where it takes more CPU seconds."""
    one_core = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    # The soft limit, which ends by a signal of its own: what is killed outright ran out of memory.
    limited = ["bash", "-c", f'ulimit -S -t {limit_s}; exec "$@"', "bash", *command]
    done = subprocess.run(limited, capture_output=True, text=True, env=one_core)
    if done.returncode == -signal.SIGXCPU:
        return None
    if done.returncode:
        why = done.stderr.strip()[-500:] or f"ended with {done.returncode}"
        raise SystemExit(f"{' '.join(command[:6])[:200]}: {why}")
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, nargs="?", help="of PaSE")
    parser.add_argument("--python", default=sys.executable, help="that runs PaSE (default: this one)")
    parser.add_argument("--models", default="alexnet,resnet101,inception3", help="of PaSE's graphs, with commas")
    parser.add_argument("--gpus", default="8,16,32", help="with commas")
    parser.add_argument("--limit", type=int, default=300, metavar="SECONDS", help="of CPU, of a row (default 300)")
    parser.add_argument("--peers", default="pase,all,left", help="pase; toulbar2 on all configurations; on those left")
    parser.add_argument("--row", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        which, name, gpus = args.row
        print(json.dumps(ours(name, int(gpus)) if which == "ours" else toulbar2(name, int(gpus), which)))
        return
    titles = {"ours": "layerwise", "pase": "PaSE", "all": "toulbar2, all", "left": "toulbar2, what is left"}
    peers, models = args.peers.split(","), args.models.split(",")
    for flag, given, known in (("--peers", peers, ("pase", "all", "left")), ("--models", models, tuple(OURS))):
        if unknown := [word for word in given if word not in known]:
            parser.error(f"{flag} {unknown[0]!r}: there are {', '.join(known)}")
    if wrong := [word for word in args.gpus.split(",") if not word.isdecimal() or word == "0"]:
        parser.error(f"--gpus {wrong[0]!r} is no number of GPUs")
    if "pase" in peers and (args.checkout is None or not (args.checkout / "scheduler.py").is_file()):
        parser.error("give the path of a checkout of github.com/baidu-research/PaSE, or other --peers")
    console = Console(width=140)
    columns = "layers", "configurations", "tables", "search", "both", "times ours", "peak"
    for name in models:
        for gpus in args.gpus.split(","):
            table = Table(f"{name} at {gpus}", *columns, box=None)
            least: Row = {}
            for which in ("ours", *peers):
                command = [sys.executable, "-m", "benchmarks.peers", "--row", which, name, gpus]
                if which == "pase":  # -O leaves its assertions out, and its checks of tables
                    given = [str(args.checkout), name, gpus, str(SAMPLES * int(gpus))]
                    command = [args.python, "-O", "-c", PASE, *given]
                row = alone(command, args.limit)
                if row is None and which == "ours":
                    raise SystemExit(f"{name} at {gpus}: ours takes longer than --limit {args.limit}: give it more")
                if row is None:
                    table.add_row(titles[which], "", "", "", "", f"> {args.limit} s")
                    continue
                least = least or row
                if "optimum_s" in row:  # the same problem; the file has 1e-12 s, and three costs a layer or fewer
                    assert abs(row["optimum_s"] - least["optimum_s"]) <= 3e-12 * row["layers"], (row, least)
                both, of_ours = row["tables"] + row["search"], least["tables"] + least["search"]
                counts = (f"{row[key]:.0f}" for key in ("layers", "configurations"))
                times = (units(row[key], "s") for key in ("tables", "search"))
                shown = (units(both, "s"), f"{both / of_ours:.3g}", units(row["peak"], "B"))
                table.add_row(titles[which], *counts, *times, *shown)
            console.print(table, "")  # after each, as they may take long


if __name__ == "__main__":
    main()
