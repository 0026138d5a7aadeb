"""The `links` command: torchrun ... -m layerwise.measure links --out FILE."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from layerwise.cli import console, positive, progress_bar, run_main, seconds
from layerwise.comm.base import Comm
from layerwise.comm.seat import read_environment
from layerwise.comm.start import leave, start
from layerwise.errors import LayerwiseError
from layerwise.files import check_writable
from layerwise.machine import DEFAULT, Profile, save
from layerwise.measure.links.measure import measure_links
from layerwise.measure.links.profile import base_profile, check_nodes, conditions, with_links
from layerwise.measure.links.shapes import find_topology
from layerwise.report import as_json, text
from layerwise.report.content import Column, Table, filled

EPILOG = """examples:
  torchrun --nproc-per-node 4 -m layerwise.measure links --out mine.json
      the links between four ranks of this machine
  torchrun --nnodes 2 --nproc-per-node 8 ... -m layerwise.measure links \\
      --out mine.json --budget 5m
      two nodes: inside and between them, all collectives of all shapes"""


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The flags of `links`."""
    p = subparsers.add_parser(
        "links",
        help="latency and bandwidth between ranks (torchrun starts them)",
        description=(
            "Measures messages and collectives between the ranks at hand, by size, by\n"
            "level (in a node, between nodes) and by how many share a port, and what\n"
            "these cost the computation beside them, and that them."
        ),
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "--out", required=True, metavar="FILE.json", help="profile to write; what else it has already is kept"
    )
    p.add_argument("--profile", metavar="NAME", help=f"what a new file starts from (default: cpu; {DEFAULT} on GPUs)")
    p.add_argument("--budget", type=seconds, default=60.0, metavar="60s", help="about how long it takes (default: 60s)")
    p.add_argument("--json", action="store_true", help="what was measured, for programs")
    p.add_argument(
        "--timeout", type=positive, default=30.0, metavar="S", help="seconds to wait for another rank (default: 30)"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, merge, write. With several ranks it ends the process, as `layerwise.comm.start.leave` says."""
    seat = read_environment(os.environ)
    if seat is None or seat.size < 2:
        raise LayerwiseError(
            "links are measured between ranks, and here is only one: "
            "torchrun --nproc-per-node 2 -m layerwise.measure links --out FILE"
        )
    if seat.rank == 0:
        check_writable(args.out)
        if args.profile is not None and Path(args.out).is_file():
            raise LayerwiseError(f"{args.out!r} is there and is added to: leave out --profile, or give a new --out")
        _base(args, cuda=False)
    leave(run_main(lambda _: _measure(args)))


def _base(args: argparse.Namespace, *, cuda: bool) -> Profile:
    return base_profile(args.out, args.profile or (DEFAULT if cuda else "cpu"))


def _measure(args: argparse.Namespace) -> int:
    with start(args.timeout) as comm:
        where = find_topology(comm)
        base = _base(args, cuda=comm.device.type == "cuda") if comm.rank == 0 else None
        if base is not None:
            check_nodes(base, where)
        with progress_bar("measuring links", quiet=args.json or comm.rank > 0) as progress:
            measured = measure_links(comm, where, args.budget, progress)
        if base is not None:
            profile = with_links(base, measured, where, conditions(comm, where))
            save(profile, args.out)
            _print(args, comm, profile, {s.curve: s.spread for s in measured.series})
    return 0


def _print(args: argparse.Namespace, comm: Comm, profile: Profile, spreads: dict[object, float]) -> None:
    assert profile.links is not None
    if args.json:
        print(as_json.text({"out": args.out, "links": profile.links.as_json()}))
        return
    columns = (
        Column("operation"),
        Column("members"),
        Column("load", "#"),
        Column("latency", "s"),
        Column("bandwidth", "#"),
        Column("switches at", wraps=True),
        Column("spread", "%"),
    )
    rows = [
        (
            curve.operation.replace("_", "-"),
            " × ".join(map(str, reversed(curve.fan))),
            curve.load,
            curve.knots[0][1],
            f"{1e-6 / rate:,.0f} MB/s" if (rate := curve.pieces[-1][2]) > 0 else "",
            ", ".join(f"{size / 1024:,.0f} KiB" for size, _, _ in curve.pieces[1:]),
            f"{spreads[curve]:.0%}",
        )
        for curve in profile.links.curves
    ]
    out = console()
    out.print(text.parts([Table(filled(columns, rows))]))
    for overlap in profile.links.overlaps:
        out.print(
            f"{overlap.operation.replace('_', '-')} among {' × '.join(map(str, reversed(overlap.fan)))} beside "
            f"computation: it goes on at {overlap.sync:.0%}, computation at {overlap.compute:.0%} of their speed alone"
        )
    out.print(f"written to {args.out}: layerwise search MODEL --gpus {comm.size} --profile {args.out}", soft_wrap=True)
