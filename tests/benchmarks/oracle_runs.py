"""python -m tests.benchmarks.oracle_runs: the oracle's strategies against our own runs, on an emulated cluster (root).

Every launch (tests.benchmarks.emulate) measures its links and the layers of each network as one device computes them,
asks the oracle about every strategy, and runs each: plans through layerwise.run, the pipeline through
torch.distributed.pipelining. Accuracy is the paper's, 1 - |predicted - measured| / measured; the aim is 0.90 each.

    python -m tests.benchmarks.oracle_runs                           # two networks, 2 and 4 ranks: about 8 minutes
    python -m tests.benchmarks.oracle_runs --only vgg --clusters 2x1
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.table import Table

from layerwise.oracle.measured import accuracy
from layerwise.search.report import units
from tests.benchmarks.networks import SMALL
from tests.benchmarks.oracle_rank import STRATEGIES, Job
from tests.benchmarks.predictions import MALLOC, details

Cell = dict[str, object]
AIM = 0.90


def launch(cluster: str, args: argparse.Namespace) -> Cell:
    """One launch on the emulated cluster: `2x2` is two nodes of two ranks."""
    nodes, ranks = map(int, cluster.split("x"))
    job = Job(args.only, args.strategies, args.links_seconds, args.layers_seconds, args.plan_seconds)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "cell.json"
        harness = [sys.executable, "-m", "tests.benchmarks.emulate", "--nodes", str(nodes), "--rate", args.rate]
        harness += ["--ranks-per-node", str(ranks), "--timeout", str(args.timeout)]
        rank = [sys.executable, "-W", "ignore", "-m", "tests.benchmarks.oracle_rank", json.dumps(asdict(job)), out]
        environment = os.environ | MALLOC | {"TORCH_CPP_LOG_LEVEL": "ERROR"}
        done = subprocess.run([*harness, "--", *map(str, rank)], env=environment)
        if done.returncode:
            raise SystemExit(f"{cluster} at {args.rate}: a rank failed ({done.returncode})")
        cell: Cell = json.loads(out.read_text())
    return cell | {"cluster": cluster, "rate": args.rate}


def table(cells: list[Cell]) -> Table:
    """A row for each network, cluster and strategy."""
    result = Table("", "strategy", "predicted", "measured", "accuracy", box=None, pad_edge=False, header_style="bold")
    for cell in cells:
        for network, rows in cell["result"].items():
            at = f"{SMALL[network].title}, {cell['cluster'].replace('x', ' × ')}, {cell['rate']}"
            for name, row in rows.items():
                found = accuracy(row["predicted_s"], row["measured_s"])
                times = (units(row[key], "s") for key in ("predicted_s", "measured_s"))
                result.add_row(at, name, *times, f"{found:.1%}" + ("" if found >= AIM else " missed"))
                at = ""
    return result


def of_plans(cell: Cell) -> Cell:
    """Without pipelines, which have no parts."""
    networks = cell["result"].items()
    return {"result": {network: {s: r for s, r in rows.items() if "parts" in r} for network, rows in networks}}


def summary(cells: list[Cell]) -> str:
    """Mean accuracy of each strategy and of all."""
    by_name: dict[str, list[float]] = {}
    for cell in cells:
        for rows in cell["result"].values():
            for name, row in rows.items():
                by_name.setdefault(name, []).append(accuracy(row["predicted_s"], row["measured_s"]))
    every = [value for values in by_name.values() for value in values]
    means = ", ".join(f"{name} {mean(values):.1%}" for name, values in by_name.items())
    return f"mean accuracy: {means}; all {mean(every):.1%}; {sum(v >= AIM for v in every)} of {len(every)} at {AIM:.0%}"


def words(text: str) -> list[str]:
    return text.split(",")


def main() -> None:
    """Run and print."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", type=words, default=["alexnet", "vgg"], metavar=",".join(SMALL))
    p.add_argument("--strategies", type=words, default=list(STRATEGIES), metavar=",".join(STRATEGIES))
    p.add_argument("--clusters", type=words, default=["2x1", "4x1"], metavar="2x1,4x1,2x2")
    p.add_argument("--rate", default="1gbit", metavar="1gbit")
    p.add_argument("--links-seconds", type=float, default=20.0, help="budget of the links (default: 20)")
    p.add_argument("--layers-seconds", type=float, default=20.0, help="budget of a network's layers (default: 20)")
    p.add_argument("--plan-seconds", type=float, default=4.0, help="timed steps of a plan (default: 4)")
    p.add_argument("--timeout", type=int, default=560, metavar="S", help="of a launch (default: 560)")
    p.add_argument("--json", metavar="FILE", help="write everything; cells that it has already are not run again")
    args = p.parse_args()
    known = Path(args.json) if args.json else None
    cells: list[Cell] = json.loads(known.read_text()) if known and known.exists() else []
    console = Console(width=170)
    for cluster in args.clusters:
        if not any((cell["cluster"], cell["rate"]) == (cluster, args.rate) for cell in cells):
            cells.append(launch(cluster, args))
            console.print(details(of_plans(cells[-1])), "", sep="\n", highlight=False)
            if known:
                known.write_text(json.dumps(cells))
    console.print(table(cells), highlight=False)
    console.print(summary(cells), highlight=False)


if __name__ == "__main__":
    main()
