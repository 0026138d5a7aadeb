"""python -m benchmarks.predictions: predicted against measured step time on an emulated cluster (needs root).

Table 4 of Jia et al. (2018), re-made: every launch (benchmarks.emulate) measures its links and the layers of each
network on the cores that training has, plans with them, and runs the plans. A rank has two fifths of a core where there
are four on two, four fifths otherwise, and never more: a device of its own speed, whatever the others do.
Errors are predicted / measured - 1; a pair of strategies is in the right order if the one
that is predicted to be faster is, wherever the measured times differ by more than 5 %.

    python -m benchmarks.predictions                                        # everything: about an hour and a half
    python -m benchmarks.predictions --only alexnet --clusters 2x1 --rates 1gbit
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import combinations
from math import ceil, log
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common.command import KEPT, Kept, some_of, words
from benchmarks.common.launch import SHARE, equal_quota, launch
from benchmarks.common.networks import SMALL
from layerwise.quantities import units

Cell = dict[str, Any]
ALIKE = 0.05  # times that differ by less are in no order
AIM, STANDARD = 0.05, 0.10


def run_all(module: str, places: Sequence[tuple[str, str]], args: argparse.Namespace, **more: object) -> list[Cell]:
    """What `module` finds of every network at every (cluster, rate); what --json has already is not run again."""
    kept = Kept(args.json)
    for cluster, rate in places:
        nodes, ranks = map(int, cluster.split("x"))  # 2x2: two nodes of two ranks
        quota = args.cpu_quota or equal_quota(nodes * ranks)
        key = {"cluster": cluster, "rate": rate, "cpu_quota": quota}
        cell = kept.find(**key)
        left = [name for name in args.only if cell is None or name not in cell["result"]]
        if not left:
            continue
        job = {"networks": left} | more
        job |= {"links_s": args.links_seconds, "layers_s": args.layers_seconds, "plan_s": args.plan_seconds}
        title, where = f"{cluster} at {rate}", {"quotas": [quota], "timeout_s": args.timeout}
        new = launch(module, job, title=title, nodes=nodes, ranks_per_node=ranks, rate=rate, **where) | key
        Console(width=170).print(title, details(new), "", sep="\n", highlight=False)
        if cell is None:
            kept.add(new)
        else:
            for kind in ("result", "links"):
                cell[kind] = cell.get(kind, {}) | new[kind]
            kept.write()
    return kept.rows


def error(row: Cell) -> float:
    """Relative to the measured time."""
    return row["predicted_s"] / row["measured_s"] - 1


def orders(strategies: dict[str, Cell]) -> list[tuple[str, str, bool]]:
    """Pairs of strategies that differ, and whether the faster one was predicted to be."""
    pairs = []
    for a, b in combinations(strategies, 2):
        x, y = strategies[a], strategies[b]
        if abs(x["measured_s"] - y["measured_s"]) > ALIKE * min(x["measured_s"], y["measured_s"]):
            right = (x["predicted_s"] < y["predicted_s"]) == (x["measured_s"] < y["measured_s"])
            pairs.append((a, b, right))
    return pairs


def table(cells: list[Cell]) -> Table:
    """A row for each network and cluster: predicted, measured and the error of each strategy."""
    names = ("data", "model", "owt", "searched")
    result = Table("", *names, "order", box=None, pad_edge=False, header_style="bold")
    for network in SMALL:
        for cell in cells:
            rows = cell["result"].get(network)
            if not rows:
                continue
            title = f" {SMALL[network].title}, {cell['cluster'].replace('x', ' × ')}" + (
                f", {cell['rate']}" if cell["cluster"] != "1x1" else ""
            )
            texts = []
            for name in names:
                row = rows.get(name)
                texts.append(
                    f"{units(row['predicted_s'], 's')} / {units(row['measured_s'], 's')} {error(row):+.0%}"
                    if row
                    else ""
                )
            pairs = orders(rows)
            result.add_row(title, *texts, f"{sum(right for _, _, right in pairs)} of {len(pairs)}")
    return result


def covered(rows: list[Cell]) -> str:
    """The share of plans whose measured time lies in the predicted range, and how wide ranges would have to be.

    The law: nine of ten lie in it, and it is at most twice as wide as what would do.
    """
    ranged = [row for row in rows if "range_s" in row]
    if not ranged:
        return "no ranges"
    inside = sum(row["range_s"][0] <= row["measured_s"] <= row["range_s"][1] for row in ranged)
    # By what factor of their logarithms the ranges would just have nine of ten.
    needed = sorted(
        abs(log(row["measured_s"] / row["predicted_s"]))
        / abs(log(row["range_s"][row["measured_s"] > row["predicted_s"]] / row["predicted_s"]))
        for row in ranged
    )[ceil(0.9 * len(ranged)) - 1]
    return f"{inside} of {len(ranged)} in their ranges; ranges {needed:.2f} times as wide would have nine of ten"


def summary(cells: list[Cell]) -> str:
    """How many errors are within the standard and the aim, and within their ranges."""
    rows = [row for cell in cells for name in SMALL for row in cell["result"].get(name, {}).values()]
    pairs = [pair for cell in cells for name in SMALL for pair in orders(cell["result"].get(name, {}))]
    errors = [abs(error(row)) for row in rows]
    return (
        f"{len(rows)} plans: error {mean(errors):.1%} on average, at most {max(errors):.1%}; "
        f"{sum(e <= AIM for e in errors)} within {AIM:.0%}, {sum(e <= STANDARD for e in errors)} within "
        f"{STANDARD:.0%}. "
        f"{covered(rows)}. Order: {sum(right for _, _, right in pairs)} of {len(pairs)} pairs right."
    )


def details(cell: Cell) -> Table:
    """Of every plan of a launch, its parts."""
    result = Table("", "step", "compute", "transfers", "sums", "sums not hidden", "waiting", box=None, pad_edge=False)
    for network in SMALL:
        for name, row in cell["result"].get(network, {}).items():
            if "parts" not in row:  # a pipeline
                continue
            totals = row["parts"]["totals"]

            def pair(key: str, totals: Cell = totals) -> str:
                part = totals.get(key)
                if part is None:
                    return ""
                return f"{units(part['predicted_s'] or 0, 's')} / {units(part['measured_s'], 's')}"

            waiting = sum(part.get("waiting_s", 0.0) for part in totals.values())
            step = f"{units(row['predicted_s'], 's')} / {units(row['measured_s'], 's')} {error(row):+.0%}"
            parts = (pair(key) for key in ("compute_s", "transfers_s", "sync_s", "exposed_sync_s"))
            result.add_row(f"{network} {name}", step, *parts, units(waiting, "s"))
    return result


def arguments(p: argparse.ArgumentParser, networks: list[str], clusters: list[str], budgets: Sequence[float]) -> None:
    """What to run, and for how long: budgets of links, layers, steps and of a launch."""
    p.add_argument("--only", type=some_of(SMALL), default=networks, metavar=",".join(SMALL))
    p.add_argument("--clusters", type=words, default=clusters, metavar="1x1,2x1,4x1,2x2")
    p.add_argument(
        "--cpu-quota", type=float, help=f"part of a core a rank (default: an equal part of {SHARE:.0%}% of the cores)"
    )
    links, layers, plan, launch = budgets
    p.add_argument("--links-seconds", type=float, default=links, help="budget of the links (default: %(default)s)")
    p.add_argument("--layers-seconds", type=float, default=layers, help="of a network's layers (default: %(default)s)")
    p.add_argument("--plan-seconds", type=float, default=plan, help="timed steps of a plan (default: %(default)s)")
    p.add_argument("--timeout", type=float, default=launch, metavar="S", help="of a launch; what is done then counts")
    p.add_argument("--json", type=Path, metavar="FILE", help=KEPT)


def main() -> None:
    """Run and print."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments(p, list(SMALL), ["1x1", "2x1", "4x1", "2x2"], (10.0, 4.0, 3.0, 2400.0))
    p.add_argument("--rates", type=words, default=["100mbit", "1gbit"], metavar="100mbit,1gbit")
    args = p.parse_args()
    places = [
        (cluster, rate)
        for cluster in args.clusters
        for rate in (args.rates[:1] if cluster == "1x1" else args.rates)  # which has no links
    ]
    cells = run_all("benchmarks.ranks.predictions", places, args)
    console = Console(width=170)
    console.print(table(cells), highlight=False)
    console.print(summary(cells), highlight=False)


if __name__ == "__main__":
    main()
