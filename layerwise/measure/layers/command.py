"""`layerwise measure layers`: the times of a network's layers on this machine, into a profile."""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch

from layerwise.cli import (
    console,
    global_batch,
    machine_arguments,
    search_space,
    seconds,
    space_arguments,
    training_arguments,
)
from layerwise.cost.model import CostOptions
from layerwise.errors import LayerwiseError
from layerwise.files import check_writable
from layerwise.graph.fuse import fuse
from layerwise.importers.load import HELP, load_model
from layerwise.machine import DEFAULT
from layerwise.measure.conditions import conditions, device_of, mode_of, modes
from layerwise.measure.layers.job import Job, Strategies, Summary, base_profile, terminable
from layerwise.measure.layers.overhead import MakeModule
from layerwise.report import as_json


def add(subparsers: Any) -> None:
    """The flags."""
    p = subparsers.add_parser(
        "layers",
        help="how long layers take",
        description="Runs every distinct piece of a network's layers that a plan for N devices may need, forward, "
        "backward and update, and writes their times into a profile: first those that the best plan and the baselines "
        "consist of. Run it again to go on where it stopped. --profile is what to begin with where --out is not there "
        "yet: its peaks, memory and links.",
    )
    p.add_argument("model", metavar="MODEL", help=HELP)
    machine_arguments(p, None, f"{DEFAULT}; cpu on a CPU")
    training_arguments(p)
    g = p.add_argument_group("measuring")
    g.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda, where there is a GPU")
    g.add_argument("--out", metavar="PROFILE.json", help="the profile to write or to add to (default: none is written)")
    g.add_argument("--budget", type=seconds, default=120.0, metavar="120s", help="time to spend (default: 120s)")
    space_arguments(g)
    g.add_argument("--local-batch-norm", action="store_true", help="statistics of each device's own samples")
    g.add_argument("--tf32", choices=["off", "conv", "all"], help="what uses TF32 (default: PyTorch's, convolutions)")
    g.add_argument("--channels-last", action="store_true", help="tensors with channels innermost")
    g.add_argument("--cudnn-benchmark", action="store_true", help="let cuDNN try its algorithms out")
    g.add_argument("--threads", type=int, metavar="T", help="of a kernel on a CPU (default: as the environment says)")
    g.add_argument("--json", action="store_true", help="what was done, for programs")


def run(args: argparse.Namespace, strategies: Strategies, make_module: MakeModule) -> int:
    """Measures, writes, prints.

    strategies: what a search thinks best, whose cells go first; make_module: the runtime, whose overhead is measured.
    """
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
            io="sample" if batch >= args.gpus else "free",
            optimizer=args.optimizer,
            dtype=args.dtype,
            local_batch_norm=args.local_batch_norm,
        )
        space = search_space(args, spread=devices.nodes > 1)
        graph = fuse(load_model(args.model, batch, args.input_shape))
        job = Job(base, where, args.out, mode, graph, devices, options, space, args.budget)
        with terminable():
            summary = job.run(strategies, make_module, quiet=args.json)
    if args.json:
        print(as_json.text(summary.as_dict()))
    else:
        console().print(_told(summary), soft_wrap=True)
    return 0


def _told(s: Summary) -> str:
    """For people."""
    lines = [
        f"{s.measured} of {s.cells} distinct cells are measured on {s.device}, {s.measured_now} of them now, in "
        f"{s.spent_s:.0f} s; the median spread is {s.spread:.1%}.",
        f"Of the best plan's predicted compute time {s.best_share:.0%} is measured.",
    ]
    if s.missing:
        error = (
            "too few were measured to say how well"
            if s.held_out_error is None
            else f"median error {s.held_out_error:.1%}"
        )
        lines.append(f"{s.missing} are left to the fit ({error}, on cells held out): run it again to go on.")
    lines += [f"Not to be measured here: {reason}." for reason in s.failed]
    lines.append(f"profile written to {s.out}" if s.out else "Nothing was written: give --out PROFILE.json to keep it.")
    return "\n".join(lines)
