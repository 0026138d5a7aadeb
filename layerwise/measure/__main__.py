"""python -m layerwise.measure layers | links: what this machine's layers take and its links cost, into a profile."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import cast

from torch import nn

from layerwise.cli import Parser, run_main
from layerwise.comm.solo import SoloComm
from layerwise.config import Config, SearchSpace
from layerwise.cost.tables import CostModel
from layerwise.graph.layer import LayerGraph
from layerwise.measure import layers_command, links_command
from layerwise.measure.bench import Mode
from layerwise.plan import Plan
from layerwise.run.load import load
from layerwise.search.find import search

EPILOG = """examples:
  python -m layerwise.measure layers vgg16 --gpus 4 --out mine.json
      times of every distinct piece that a plan for 4 devices may need
  torchrun --nproc-per-node 4 -m layerwise.measure links --out mine.json
      latency and bandwidth between these ranks, into the same profile
  python -m layerwise.search vgg16 --gpus 4 --profile mine.json
      a plan that rests on them"""


def parser() -> argparse.ArgumentParser:
    """The flags of both subcommands."""
    p = Parser(
        prog="layerwise measure",
        description="Measures layers and links of this machine, for plans that rest on it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found = p.add_subparsers(dest="command", metavar="layers|links", required=True)
    subparsers = cast("argparse._SubParsersAction[argparse.ArgumentParser]", found)  # of Parsers, which are that
    layers_command.add(subparsers)
    links_command.add(subparsers)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, measure, print."""
    args = parser().parse_args(argv)
    if args.command == "links":
        return links_command.run(args)
    return layers_command.run(args, strategies, module)


def strategies(model: CostModel, space: SearchSpace) -> list[Mapping[str, Config]]:
    """The best strategy, the additive optimum and the baselines: whose times matter most."""
    result = search(model, space)
    found = [result.best, result.additive, *result.baselines.values()]
    return [{layer.name: c.strategy[layer.name] for layer in model.graph.inner} for c in found]


def module(plan: Plan, graph: LayerGraph, mode: Mode) -> nn.Module:
    """The runtime's module of a plan on one device."""
    return load(plan, graph, comm=SoloComm(mode.device), dtype=mode.dtype, autocast=mode.autocast)


if __name__ == "__main__":
    sys.exit(run_main(main))
