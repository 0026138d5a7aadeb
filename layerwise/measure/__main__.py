"""python -m layerwise.measure layers | links: what this machine's layers take and its links cost, into a profile."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import cast

from layerwise.cli import Parser, run_main
from layerwise.measure.layers import command as layers_command
from layerwise.measure.links import command as links_command

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
    actions = p.add_subparsers(dest="command", metavar="layers|links", required=True)
    subparsers = cast("argparse._SubParsersAction[argparse.ArgumentParser]", actions)  # of Parsers, which are that
    layers_command.add(subparsers)
    links_command.add(subparsers)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, measure, print."""
    args = parser().parse_args(argv)
    if args.command == "links":
        return links_command.run(args)
    from layerwise.api.planning.measuring import module, strategies  # here, so that --help is quick

    return layers_command.run(args, strategies, module)


if __name__ == "__main__":
    sys.exit(run_main(main))
