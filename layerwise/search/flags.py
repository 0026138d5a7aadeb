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
from layerwise.search.overlap import EFFORTS
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
        help="loss behind a built-in network, whose target becomes an input; the same as MODEL+LOSS (default: none)",
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
        help="configuration that some layers keep, such as --fix 'fc*' c=4 or --fix encoder n=2,h=2; 1 means one "
        "device; can be repeated",
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
        help="outer data parallelism: each of R groups of N/R neighbouring GPUs has samples of its own",
    )
    g.add_argument(
        "--memory-limit",
        metavar="14GB",
        help="memory that a step may take on a device (default: what the profile's device has; on a GPU without the "
        "1.5 GB, at most a tenth, that libraries take)",
    )
    g.add_argument(
        "--offer",
        type=offered,
        default=OFFERS,
        metavar="recompute,shard",
        help="what may save memory, layer by layer, if the limit binds; or none (default: both)",
    )
    g.add_argument(
        "--no-fuse", action="store_true", help="make every operator a layer of its own, element-wise ones too"
    )
    g.add_argument(
        "--search-memory",
        type=positive,
        default=2.0,
        metavar="GIB",
        help="memory that the search's tables may take (default: 2)",
    )
    g.add_argument(
        "--effort",
        choices=EFFORTS,
        default="normal",
        help="how long the plan is improved by its simulated step; quick means not at all (default: normal)",
    )


def _cost_flags(g: Flags) -> None:
    g.add_argument(
        "--inference",
        action="store_true",
        help="plan the forward pass alone, with running statistics and nothing saved",
    )
    g.add_argument(
        "--link-model",
        choices=["port", "sum", "connection"],
        default="port",
        help="how transfers are timed: by the busiest port (default), or by one of two readings of the paper, all "
        "bytes over the bandwidth (sum), or each device's own connection without latency (connection)",
    )
    g.add_argument(
        "--sync",
        choices=["all-reduce", "parameter-server"],
        default="all-reduce",
        help="how sums of gradients are timed (default: all-reduce; parameter-server is the paper's, and a plan is run "
        "with all-reduces)",
    )
    g.add_argument(
        "--io",
        choices=["auto", "sample", "free", "boxes"],
        default="auto",
        help="what each device feeds: its own samples, the whole batch (free), or the boxes that it needs (default: "
        "sample if each has one, else boxes if the network has a loss or one output, else free)",
    )
    g.add_argument(
        "--local-batch-norm", action="store_true", help="batch norm takes each device's own samples, as with DDP"
    )
    g.add_argument(
        "--objective",
        choices=["timeline", "additive"],
        default="timeline",
        help="choose the plan by simulated time (default), or by equation 1 alone",
    )


def _output_flags(g: Flags) -> None:
    output_arguments(g)
    g.add_argument("--layers", action="store_true", help="print a row for every layer")
    g.add_argument("--memory", action="store_true", help="print what a step holds when its memory is fullest")
    g.add_argument("--plot", metavar="FILE.svg", help="draw the plan into a file")
    g.add_argument("--out", metavar="PLAN.json", help="write the plan, for layerwise run")
    g.add_argument("--timeline", metavar="FILE.json", help="write the predicted step of every device as a Chrome trace")
    g.add_argument(
        "--price",
        metavar="STRATEGY",
        help="price this strategy instead of searching: data, model, owt; grid:RxC, which splits an MLP's samples over "
        "R groups and its outputs over C; or a .json file, {layer: {dim: degree}}",
    )
    g.add_argument(
        "--export-costs",
        metavar="FILE.cfn",
        help="write the full cost tables, without a memory limit, as a problem for toulbar2",
    )


def offered(text: str) -> tuple[str, ...]:
    """Returns the OFFERS that `recompute,shard` names, each once; `none` names none."""
    if text == "none":
        return ()
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not words or set(words) - set(OFFERS):
        raise argparse.ArgumentTypeError(f"{text!r}: choose from {', '.join(OFFERS)}, joined by commas, or none")
    return words


def fixed_degrees(args: argparse.Namespace) -> dict[str, dict[str, int]]:
    """The degrees in --fix, by layer name."""
    found = {}
    for layers, degrees in args.fix:
        parts = [] if degrees == "1" else [part.partition("=") for part in degrees.split(",")]
        if any(not label or not re.fullmatch("[0-9]{1,9}", degree) for label, _, degree in parts):
            raise LayerwiseError(
                f"--fix {layers} {degrees!r}: degrees must be like c=4 or n=2,h=2, or 1 for one device"
            )
        found[layers] = {label: int(degree) for label, _, degree in parts}
    return found
