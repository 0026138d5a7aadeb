"""The flags of `layerwise search`."""

from __future__ import annotations

import argparse
import re

from layerwise.cli import (
    Parser,
    count,
    machine_arguments,
    output_arguments,
    positive,
    space_arguments,
    training_arguments,
)
from layerwise.errors import LayerwiseError
from layerwise.importers.load import HELP
from layerwise.importers.with_loss import LOSSES
from layerwise.search.overlap.polish import EFFORTS
from layerwise.search.priced.variants import OFFERS

EPILOG = """examples:
  python -m layerwise.search vgg16 --gpus 16
      the best strategy on two H100 nodes
  python -m layerwise.search unet3d --gpus 8 --global-batch 2
      fewer samples than GPUs: split space
  python -m layerwise.search net.onnx --gpus 16 --profile p100 --out plan.json
      a model and a machine of your own, and a plan to run
  python -m layerwise.search mlp:784x1024x1024x10 --gpus 8 --price grid:4x2
      a process grid of an MLP, batch x model, beside the baselines
  python -m layerwise.search unet3d --gpus 8 --global-batch 1 --inference
      the quickest answer for one volume
  python -m layerwise.search vgg16 --gpus 4 --profile p100 --link-model sum \\
      --sync parameter-server --io free --objective additive
      one reading of the ICML 2018 paper's cost model (its table 5); with
      --link-model connection another (its figure 3)

Two times are given. The step time is equation 1, t_C + t_X + t_S summed over
layers: it is what is minimised and proven. The time with overlap is a
simulation of the devices in which gradients travel beside the backward pass,
as DistributedDataParallel has it: by it the plan is chosen among the optima
and the baselines."""


def parser() -> argparse.ArgumentParser:
    """The parser of the command's flags."""
    p = Parser(
        prog="layerwise search",
        main="--gpus --gpu --link --global-batch --optimizer --dtype --memory-limit --inference --price --out --html "
        "--json",
        description="Finds the cheapest way to split every layer of a network over N\ndevices, and proves it.",
        epilog=EPILOG,
    )
    p.add_argument("model", metavar="MODEL", help=HELP)
    p.add_argument(
        "--loss",
        choices=list(LOSSES),
        help="behind a built-in network, of the classes of positions, its target an input: MODEL+LOSS (default: none)",
    )
    machine_arguments(p)
    training_arguments(p)
    _space_flags(p.add_argument_group("search space"))
    p.add_argument(
        "--fix",
        nargs=2,
        action="append",
        default=[],
        metavar=("LAYERS", "DEGREES"),
        help="a configuration that layers keep: --fix 'fc*' c=4, --fix encoder n=2,h=2; 1: one device. Can be repeated",
    )
    _cost_flags(p.add_argument_group("cost model"))
    _output_flags(p.add_argument_group("output"))
    return p


Flags = argparse._ArgumentGroup


def _space_flags(g: Flags) -> None:
    space_arguments(g)
    g.add_argument(
        "--replicas",
        type=count,
        default=1,
        metavar="R",
        help="outer data parallelism: R groups of N/R neighbouring GPUs, each of which has samples of its own",
    )
    g.add_argument(
        "--memory-limit",
        metavar="14GB",
        help="that a step may take on a device (default: what the profile's devices have, of GPUs less what libraries "
        "take: 1.5 GB, at most a tenth)",
    )
    offers = g.add_mutually_exclusive_group()
    offers.add_argument(
        "--offer",
        type=offered,
        default=OFFERS,
        metavar="recompute,shard",
        help="what may save memory, layer by layer, where a limit binds (default: both)",
    )
    offers.add_argument("--no-offer", type=offered, default=(), metavar="recompute,shard", help="what may not")
    g.add_argument("--no-fuse", action="store_true", help="a layer for every operator, element-wise ones too")
    g.add_argument(
        "--search-memory", type=positive, default=2.0, metavar="GIB", help="bound on search tables (default: 2)"
    )
    g.add_argument(
        "--effort",
        choices=EFFORTS,
        default="normal",
        help="how long the plan is improved by simulated time, and that bounded; quick: not at all (default: normal)",
    )


def _cost_flags(g: Flags) -> None:
    g.add_argument(
        "--inference",
        action="store_true",
        help="plan for answers alone: the forward pass of one batch, with running statistics and nothing saved",
    )
    g.add_argument(
        "--link-model",
        choices=["port", "sum", "connection"],
        default="port",
        help="time of the busiest port; all bytes over bandwidth; or every device's own connection, all at once and "
        "without latency (two readings of the paper)",
    )
    g.add_argument(
        "--sync",
        choices=["all-reduce", "parameter-server"],
        default="all-reduce",
        help="how gradients are added (parameter-server: as in the paper; a plan is run with all-reduces)",
    )
    g.add_argument(
        "--io",
        choices=["auto", "sample", "free", "boxes"],
        default="auto",
        help="each device feeds and gets its own samples, or the whole batch, or the boxes that it needs (default: "
        "sample if each has one, else boxes if the network has a loss or one output, else free)",
    )
    g.add_argument(
        "--local-batch-norm", action="store_true", help="statistics of each device's own samples, as DDP has them"
    )
    g.add_argument(
        "--objective",
        choices=["timeline", "additive"],
        default="timeline",
        help="choose by simulated time, or by equation 1 alone",
    )


def _output_flags(g: Flags) -> None:
    output_arguments(g)
    g.add_argument("--layers", action="store_true", help="a row for every layer")
    g.add_argument("--memory", action="store_true", help="what a step holds where its memory is fullest")
    g.add_argument("--plot", metavar="FILE.svg", help="draw the plan")
    g.add_argument("--out", metavar="PLAN.json", help="write the plan")
    g.add_argument("--timeline", metavar="FILE.json", help="write the predicted step as a Chrome trace of every device")
    g.add_argument(
        "--price",
        metavar="STRATEGY",
        help="price this strategy instead of searching: data, model, owt; grid:RxC, of an MLP, samples over R groups, "
        "outputs over C; or a .json file, {layer: {dim: degree}}",
    )
    g.add_argument(
        "--export-costs",
        metavar="FILE.cfn",
        help="write the whole cost tables, without a memory limit, as a toulbar2 problem",
    )


def offered(text: str) -> tuple[str, ...]:
    """`recompute,shard`: of OFFERS, each once."""
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not words or set(words) - set(OFFERS):
        raise argparse.ArgumentTypeError(f"{text!r}: choose of {', '.join(OFFERS)}, joined by commas")
    return words


def fixed_degrees(args: argparse.Namespace) -> dict[str, dict[str, int]]:
    """The degrees of --fix, by layers' names."""
    found = {}
    for layers, degrees in args.fix:
        parts = [] if degrees == "1" else [part.partition("=") for part in degrees.split(",")]
        if any(not label or not re.fullmatch("[0-9]{1,9}", degree) for label, _, degree in parts):
            raise LayerwiseError(f"--fix {layers} {degrees!r}: degrees are such as c=4 or n=2,h=2; 1 is one device")
        found[layers] = {label: int(degree) for label, _, degree in parts}
    return found
