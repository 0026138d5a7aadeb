"""python -m layerwise.measure layers | links: what this machine's layers take and its links cost, into a profile."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias, cast

import torch

from layerwise.cli import (
    Parser,
    command,
    console,
    global_batch,
    machine_arguments,
    positive,
    run_main,
    search_space,
    seconds,
    settle_machine,
    space_arguments,
    training_arguments,
)
from layerwise.comm.base import Comm
from layerwise.comm.solo import SoloComm
from layerwise.comm.start import leave, read_environment, start
from layerwise.cost.model import CostOptions
from layerwise.errors import LayerwiseError
from layerwise.files import check_writable
from layerwise.graph.fuse import fuse
from layerwise.importers.load import HELP, load_model
from layerwise.machine import DEFAULT, Profile, save
from layerwise.machine import load as load_profile
from layerwise.machine.curves import Curve, Overlap
from layerwise.measure.conditions import base_profile, conditions, device_of, kind_here, mode_of, modes
from layerwise.measure.job import Job, KindRanks, Summary
from layerwise.measure.links import check_nodes, measure_links, with_links
from layerwise.measure.links import conditions as link_conditions
from layerwise.measure.topology import find_topology
from layerwise.progress import progress_bar
from layerwise.report import as_json, text
from layerwise.report.content import Column, Table

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

EPILOG = """examples:
  python -m layerwise.measure layers vgg16 --gpus 4 --out mine.json
      times of every distinct piece that a plan for 4 devices may need
  torchrun --nproc-per-node 4 -m layerwise.measure links --out mine.json
      latency and bandwidth between these ranks, into the same profile
  python -m layerwise.search vgg16 --gpus 4 --profile mine.json
      a plan that rests on them"""
LINKS_EPILOG = """examples:
  torchrun --nproc-per-node 4 -m layerwise.measure links --out mine.json
      the links between four ranks of this machine
  torchrun --nnodes 2 --nproc-per-node 8 ... -m layerwise.measure links \\
      --out mine.json --budget 5m
      two nodes: inside and between them, all collectives of all shapes"""


def parser() -> argparse.ArgumentParser:
    """The flags of both subcommands."""
    p = Parser(
        prog="layerwise measure",
        description="Measures layers and links of this machine, for plans that rest on it.",
        epilog=EPILOG,
    )
    actions = p.add_subparsers(dest="command", metavar="layers|links", required=True)
    subparsers = cast("Subparsers", actions)  # of Parsers, which are that
    _add_layers(subparsers)
    _add_links(subparsers)
    return p


@command(parser)
def main(args: argparse.Namespace) -> int:
    """Measures layers or links into a profile, and prints them. With several ranks it ends the process."""
    return _links(args) if args.command == "links" else _measure_layers(args)


def _add_layers(subparsers: Subparsers) -> None:
    p = subparsers.add_parser(
        "layers",
        main="--gpus --gpu --global-batch --input-shape --optimizer --dtype --out --budget --device --json",
        help="measure how long layers take",
        description="Runs every distinct piece of a network's layers that a plan for N devices may need, forward, "
        "backward and update, and writes their times into a profile: first those that the best plan and the baselines "
        "consist of. Run it again to go on where it stopped. --profile is what to begin with where --out is not there "
        "yet: its peaks, memory and links.",
    )
    p.add_argument("model", metavar="MODEL", help=HELP)
    machine_arguments(p, None, f"{DEFAULT}; cpu on a CPU")
    training_arguments(p)
    g = p.add_argument_group("measuring")
    g.add_argument(
        "--device", choices=["cuda", "cpu"], help="device that is measured (default: cuda, if there is a GPU)"
    )
    g.add_argument("--out", metavar="PROFILE.json", help="profile that is written or added to (default: none)")
    g.add_argument(
        "--budget", type=seconds, default=120.0, metavar="120s", help="time that measuring may take (default: 120s)"
    )
    space_arguments(g)
    g.add_argument("--local-batch-norm", action="store_true", help="batch norm takes each device's own samples")
    g.add_argument(
        "--tf32", choices=["off", "conv", "all"], help="what uses TF32 (default: convolutions, as PyTorch has it)"
    )
    g.add_argument("--channels-last", action="store_true", help="measure tensors whose channels are innermost")
    g.add_argument("--cudnn-benchmark", action="store_true", help="let cuDNN try its algorithms")
    g.add_argument(
        "--threads", type=int, metavar="T", help="threads of a kernel on a CPU (default: what the environment says)"
    )
    g.add_argument("--json", action="store_true", help="write what was done as JSON, for programs")


def _measure_layers(args: argparse.Namespace) -> int:
    from layerwise.api.machine import module, strategies  # here, so that --help is quick

    settle_machine(args)
    device = device_of(args.device)
    mode = mode_of(device, args.dtype, args.channels_last)
    if args.threads is not None:
        cores = os.cpu_count() or 1
        if not 1 <= args.threads <= cores:
            raise LayerwiseError(f"--threads must be from 1 to {cores}, the cores that there are, not {args.threads}")
        torch.set_num_threads(args.threads)
    if args.out is not None:
        check_writable(args.out)
    with modes(args.dtype, args.tf32, args.cudnn_benchmark) as tf32:
        where = conditions(mode, args.dtype, tf32, args.cudnn_benchmark)
        base = base_profile(args.out, args.profile, where, device)
        base.processor.peak(args.dtype)
        devices = base.device_graph(args.gpus, args.gpus_per_node)
        batch = global_batch(args.batch, args.global_batch, args.gpus)
        options = CostOptions(
            optimizer=args.optimizer,
            dtype=args.dtype,
            local_batch_norm=args.local_batch_norm,
        )
        space = search_space(args, spread=devices.nodes > 1)
        graph = fuse(load_model(args.model, batch, args.input_shape))
        comm, kind = SoloComm(device), kind_here(base, where.device)
        kinds = [KindRanks(where, kind)]
        job = Job(base, kinds, args.out, mode, graph, devices, options, space, args.budget, comm)
        with terminable():
            summary = job.run(strategies, module, quiet=args.json)
    if args.json:
        print(as_json.text(summary))
    else:
        console().print(_summary_text(summary), soft_wrap=True)
    return 0


def _summary_text(s: Summary) -> str:
    lines = [
        f"{s.measured} of {s.cells} distinct cells are measured on {s.device}, {s.measured_now} of them now, in "
        f"{s.spent_s:.0f} s; the median spread is {s.spread:.1%}.",
        f"Of the best plan's predicted compute time {s.best_share:.0%} is measured.",
    ]
    if s.missing:
        known = s.held_out_error
        error = "too few were measured to say how well" if known is None else f"median error {known:.1%}"
        lines.append(f"{s.missing} are left to the fit ({error}, on cells held out): run it again to go on.")
    lines += [f"Not to be measured here: {reason}." for reason in s.failed]
    lines.append(f"profile written to {s.out}" if s.out else "Nothing was written: give --out PROFILE.json to keep it.")
    return "\n".join(lines)


def _add_links(subparsers: Subparsers) -> None:
    p = subparsers.add_parser(
        "links",
        help="measure latency and bandwidth between ranks, which torchrun starts",
        description=(
            "Measures messages and collectives between these ranks, by size, by level (in a\n"
            "node, between nodes) and by how many share a port; and how much they and\n"
            "computation slow each other down."
        ),
        epilog=LINKS_EPILOG,
    )
    p.add_argument(
        "--out", required=True, metavar="FILE.json", help="profile that is written; other numbers in it are kept"
    )
    p.add_argument(
        "--gpu",
        "--profile",
        dest="profile",
        metavar="NAME",
        help=f"profile that a new file begins with (default: cpu; {DEFAULT} on GPUs)",
    )
    p.add_argument(
        "--budget", type=seconds, default=60.0, metavar="60s", help="time that measuring may take (default: 60s)"
    )
    p.add_argument("--json", action="store_true", help="write what was measured as JSON, for programs")
    p.add_argument(
        "--timeout",
        type=positive,
        default=30.0,
        metavar="S",
        help="seconds that a rank waits for another (default: 30)",
    )


def _links(args: argparse.Namespace) -> int:
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
    leave(run_main(lambda _: _measure_links(args)))


def _base(args: argparse.Namespace, *, cuda: bool) -> Profile:
    """The profile that the links are added to: the one in the file, or where there is none yet, one to begin with."""
    return load_profile(args.out if Path(args.out).is_file() else args.profile or (DEFAULT if cuda else "cpu"))


def _measure_links(args: argparse.Namespace) -> int:
    with start(args.timeout) as comm:
        where = find_topology(comm)
        base = _base(args, cuda=comm.device.type == "cuda") if comm.rank == 0 else None
        if base is not None:
            check_nodes(base, where)
        with progress_bar("measuring links", quiet=args.json or comm.rank > 0) as progress:
            measured = measure_links(comm, where, args.budget, progress)
        if base is not None:
            profile = with_links(base, measured, where, link_conditions(comm, where))
            save(profile, args.out)
            _print_links(args, comm, profile, {s.curve: s.spread for s in measured.series})
    return 0


def _print_links(args: argparse.Namespace, comm: Comm, profile: Profile, spreads: dict[object, float]) -> None:
    assert profile.links is not None
    if args.json:
        print(as_json.text({"out": args.out, "links": profile.links.as_json()}))
        return
    curves, rates = profile.links.curves, [curve.pieces[-1][2] for curve in profile.links.curves]
    switches = [[f"{size / 1024:,.0f} KiB" for size, _, _ in curve.pieces[1:]] for curve in curves]
    columns = [
        Column("operation", cells=[_operation(curve) for curve in curves]),
        Column("members", cells=[_members(curve) for curve in curves]),
        Column("load", "#", [curve.load for curve in curves]),
        Column("latency", "s", [curve.knots[0][1] for curve in curves]),
        Column("bandwidth", "#", [f"{1e-6 / rate:,.0f} MB/s" if rate > 0 else "" for rate in rates]),
        Column("switches at", cells=[", ".join(sizes) for sizes in switches], wraps=True),
        Column("spread", "%", [f"{spreads[curve]:.0%}" for curve in curves]),
    ]
    out = console()
    out.print(text.parts([Table(columns)]))
    for overlap in profile.links.overlaps:
        out.print(
            f"{_operation(overlap)} among {_members(overlap)} beside computation: it goes on at {overlap.sync:.0%}, "
            f"computation at {overlap.compute:.0%} of their speed alone"
        )
    out.print(f"written to {args.out}: layerwise search MODEL --gpus {comm.size} --profile {args.out}", soft_wrap=True)


def _operation(of: Curve | Overlap) -> str:
    return of.operation.replace("_", "-")


def _members(of: Curve | Overlap) -> str:
    return " × ".join(map(str, reversed(of.fan)))


@contextmanager
def terminable() -> Iterator[None]:
    """A context that turns SIGTERM into KeyboardInterrupt, so that measurements are written."""

    def interrupt(number: int, frame: types.FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(run_main(main))
