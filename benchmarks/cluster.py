"""python -m benchmarks.cluster: plans against DDP and FSDP2 on an emulated cluster (needs root and iproute2).

Network namespaces on this machine are the nodes, of one rank each (benchmarks.emulate). In a run every variant
takes its turn on the same links; a step's time is the median. The compute : communication ratio beside each network is
of data parallelism: a step of one rank's share without communication, and the gradients' time on the wire alone. A
speed-up means nothing without it. Ratios are what counts: a rank here is a core or less.

    python -m benchmarks.cluster                                    # everything: about 45 minutes
    python -m benchmarks.cluster --only alexnet --nodes 4 --rates 1gbit
    python -m benchmarks.cluster --only unet,unet2 --nodes 2,4,8 --json volumes.json    # volumes: about an hour

A plan rests on links and layers that the ranks measure first; a rank has an equal
part of four fifths of the cores, and keeps what it allocates (see benchmarks.common.launch).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common.command import KEPT, Kept, numbers, some_of, words
from benchmarks.common.launch import equal_quota, launch
from benchmarks.emulate import parse_rate
from benchmarks.ranks.cluster import Job
from layerwise.quantities import units

Cell = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """A part of the benchmark."""

    variants: tuple[str, ...]
    against: str  # the variant that all others are compared with
    nodes: int | None = None  # only this number of them
    rate: str | None = None
    network: str | None = None  # default: that of the part's name


KINDS = {
    "alexnet": Kind(("alone", "DDP", "data", "capped", "DDP fp16", "FSDP2", "searched"), "DDP"),
    "vgg": Kind(("alone", "DDP", "data", "capped", "DDP fp16", "FSDP2", "searched"), "DDP"),
    "states": Kind(
        ("alone", "DDP", "data", "FSDP2 once", "sharded", "FSDP2", "gathered"), "FSDP2", 4, "1gbit", "alexnet"
    ),
    "unet": Kind(("one rank", "fixed d", "searched"), "one rank"),
    "unet2": Kind(("one rank", "DDP", "FSDP2", "fixed d", "searched"), "one rank"),
}
MEANING = {
    "alone": "no communication: a rank's share alone",
    "DDP": "DistributedDataParallel",
    "data": "data-parallel plan",
    "capped": "data-parallel plan, other buckets",
    "DDP fp16": "DDP, gradients sent in fp16",
    "FSDP2": "FSDP2 (fully_shard)",
    "FSDP2 once": "FSDP2, gathered once a step",
    "sharded": "data-parallel plan, states sharded",
    "gathered": "data-parallel plan, parameters gathered",
    "searched": "searched plan",
    "fixed d": "every layer split along depth",
    "one rank": "one rank, the others idle",
}


def run(kind: str, nodes: int, rate: str, args: argparse.Namespace) -> Cell:
    """One run on the emulated cluster."""
    variants = [v for v in KINDS[kind].variants if not args.variants or v in args.variants]
    network = KINDS[kind].network or kind
    job = Job(network, variants, args.seconds, args.rounds, kind == "states", args.measure_seconds)
    quota = args.cpu_quota or equal_quota(nodes)
    where: dict[str, Any] = {"nodes": nodes, "rate": rate, "quotas": [quota], "timeout_s": args.timeout}
    cell: Cell = launch("benchmarks.ranks.cluster", job, title=f"{kind} at {nodes} nodes of {rate}", **where)
    return cell | {"kind": kind, "nodes": nodes, "link": rate, "cpu_quota": quota}


def speed(cell: Cell, variant: str, against: str) -> float | None:
    """How many times as fast as another variant of the same run; None where one of them is missing."""
    rows = cell["variants"]
    return rows[against]["step_s"] / rows[variant]["step_s"] if {variant, against} <= set(rows) else None


def at_most(cell: Cell, variant: str, against: str) -> float | None:
    """The same, were no rank ever to wait: by the CPU time of each one's busiest rank. None where that is not known."""
    rows = cell["variants"]
    if not {variant, against} <= set(rows) or not all("busiest_cpu_s" in rows[name] for name in (variant, against)):
        return None
    return rows[against]["busiest_cpu_s"] / rows[variant]["busiest_cpu_s"]


def error(row: Cell) -> float:
    """Of the predicted time, relative to the measured one."""
    return row["predicted_s"] / row["step_s"] - 1


def ratio(cell: Cell) -> str:
    """compute : communication of data parallelism; of the searched plan where there is none."""
    rows, ranks, rate = cell["variants"], cell["ranks"], cell["rate"]
    if not rate:
        return ""
    if "alone" in rows:
        compute = rows["alone"]["step_s"]
        wire = 2 * (ranks - 1) / ranks * cell["parameter_bytes"] * 8 / rate
        return f", compute : communication 1 : {wire / compute:.2g}"
    if "searched" in rows and "one rank" in rows:
        wire = rows["searched"]["busiest_link_bytes"] * 8 / rate
        return f", compute : communication of the plan 1 : {wire * ranks / rows['one rank']['step_s']:.2g}"
    return ""


def table(cell: Cell) -> Table:
    """The variants of one run."""
    against = KINDS[cell["kind"]].against
    title = (
        f"{cell['network']}: {cell['nodes']} nodes at {cell['link']}, {cell['cpu_quota']} core a rank, "
        f"batch {cell['batch']}, {units(cell['parameter_bytes'], 'B')} of parameters{ratio(cell)}"
    )
    head = ("step", "range", "steps", f"× {against}", "CPU a rank", "sent", "busiest link", "in use", "predicted")
    head += ("without waiting",)
    head += ("memory",) * any(row["live_bytes"] for row in cell["variants"].values())
    result = Table("", *head, title=title, title_justify="left", box=None)
    for name, row in cell["variants"].items():
        times, faster = row["times_s"], speed(cell, name, against)
        use = row["link_use"]
        result.add_row(
            MEANING[name],
            units(row["step_s"], "s"),
            f"{units(min(times), 's')} – {units(max(times), 's')}",
            str(len(times)),
            "" if faster is None else f"{faster:.2f}×",
            units(row["cpu_s"], "s"),
            units(row["sent_bytes"], "B") + ("" if row.get("as_predicted", True) else " ≠ predicted"),
            units(row["busiest_link_bytes"], "B"),
            "" if use is None else f"{use:.0%}",
            f"{units(row['predicted_s'], 's')} {error(row):+.0%}" if "predicted_s" in row else "",
            "" if (most := at_most(cell, name, against)) is None else f"{most:.2f}×",
            *([units(row["live_bytes"], "B")] if "memory" in head else []),
        )
    return result


def parts(cell: Cell) -> Iterator[str]:
    """Of plans whose parts were traced: seconds of each, over all layers, predicted / measured."""
    for name, row in cell["variants"].items():
        if "parts" in row:
            totals = row["parts"]["totals"]
            texts = [f"{units(p['predicted_s'] or 0.0, 's')} / {units(p['measured_s'], 's')}" for p in totals.values()]
            told = ", ".join(f"{key.removesuffix('_s')} {text}" for key, text in zip(totals, texts, strict=True))
            waiting = sum(part.get("waiting_s", 0.0) for part in totals.values())
            yield f"{MEANING[name]}: {told}, waiting {units(waiting, 's')}"


def show(cell: Cell, console: Console) -> None:
    """All of a run."""
    console.print(table(cell))
    console.print(*parts(cell), sep="\n", highlight=False)
    for name, row in cell["variants"].items():
        if "plan" in row:
            console.print(f"[dim]{MEANING[name]}: {row['plan']}[/dim]", highlight=False)
    console.print()


def wanted(args: argparse.Namespace) -> Iterator[tuple[str, int, str]]:
    """Parts, numbers of nodes and rates."""
    for kind in args.only:
        for nodes in args.nodes:
            for rate in args.rates:
                if KINDS[kind].nodes in (None, nodes) and KINDS[kind].rate in (None, rate):
                    yield kind, nodes, rate


def main() -> None:
    """Run and print."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", type=some_of(KINDS), default=list(KINDS), metavar=",".join(KINDS))
    p.add_argument("--rates", type=words, default=["100mbit", "1gbit"], metavar="100mbit,1gbit")
    p.add_argument("--nodes", type=numbers, default=[2, 4], metavar="2,4")
    p.add_argument("--variants", type=some_of(MEANING), help=f"of {', '.join(MEANING)} (default: all)")
    p.add_argument("--rounds", type=int, help="turns of each variant (default: as many as the time allows)")
    p.add_argument("--seconds", type=float, default=40.0, help="about how long the turns of one run take (default: 40)")
    p.add_argument("--cpu-quota", type=float, help="cores a rank may use (default: an equal part)")
    p.add_argument("--measure-seconds", type=float, default=60.0, metavar="SEC", help="for links and layers")
    p.add_argument("--timeout", type=float, default=600, metavar="SEC", help="of a run (default: %(default)s)")
    p.add_argument("--json", type=Path, metavar="FILE", help=KEPT)
    args = p.parse_args()
    for rate in args.rates:
        parse_rate(rate)
    console, kept, missing = Console(width=150), Kept(args.json), []
    for cell in kept.rows:
        show(cell, console)
    for kind, nodes, rate in wanted(args):
        if kept.find(kind=kind, nodes=nodes, link=rate) is not None:
            continue
        try:
            kept.add(run(kind, nodes, rate, args))
        except SystemExit as reason:  # the others go on
            missing.append(str(reason))
            continue
        show(kept.rows[-1], console)
    if missing:
        raise SystemExit("\n".join(missing))


if __name__ == "__main__":
    main()
