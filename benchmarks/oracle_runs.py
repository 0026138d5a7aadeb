"""python -m benchmarks.oracle_runs: the oracle's strategies against our own runs, on an emulated cluster (root).

Every launch (benchmarks.emulate) measures its links and the layers of each network as one device computes them,
asks the oracle about every strategy, and runs each: plans through layerwise.run, the pipeline through
torch.distributed.pipelining. Accuracy is the paper's, 1 - |predicted - measured| / measured; the aim is 0.90 each.

    python -m benchmarks.oracle_runs                           # two networks, 2 and 4 ranks: about 20 minutes
    python -m benchmarks.oracle_runs --only vgg --clusters 2x1
"""

from __future__ import annotations

import argparse
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common.networks import SMALL
from benchmarks.predictions import arguments, run_all
from benchmarks.ranks.oracle import STRATEGIES
from layerwise.oracle.runs import accuracy
from layerwise.quantities import units

Cell = dict[str, Any]
AIM = 0.90


def table(cells: list[Cell]) -> Table:
    """A row for each network, cluster and strategy."""
    result = Table("", "strategy", "predicted", "measured", "accuracy", box=None, pad_edge=False, header_style="bold")
    for cell in cells:
        for network, rows in cell["result"].items():
            title = f"{SMALL[network].title}, {cell['cluster'].replace('x', ' × ')}, {cell['rate']}"
            for name, row in rows.items():
                score = accuracy(row["predicted_s"], row["measured_s"])
                times = (units(row[key], "s") for key in ("predicted_s", "measured_s"))
                result.add_row(title, name, *times, f"{score:.1%}" + ("" if score >= AIM else " missed"))
                title = ""
    return result


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


def main() -> None:
    """Run and print."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments(p, ["alexnet", "vgg"], ["2x1", "4x1"], (10.0, 5.0, 3.0, 2400.0))
    p.add_argument("--rate", default="1gbit", metavar="1gbit")
    args = p.parse_args()
    places = [(cluster, args.rate) for cluster in args.clusters]
    cells = run_all("benchmarks.ranks.oracle", places, args, strategies=list(STRATEGIES))
    console = Console(width=170)
    console.print(table(cells), highlight=False)
    console.print(summary(cells), highlight=False)


if __name__ == "__main__":
    main()
