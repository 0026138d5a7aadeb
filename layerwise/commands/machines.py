"""layerwise machines [NAME]: the devices and machines that plans can be made for, and where each number comes from."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator

from layerwise.cli import Parser, command, output_arguments, present, run_main
from layerwise.machine import Profile, load, names
from layerwise.machine.catalogue import devices
from layerwise.machine.profiles import write
from layerwise.quantities import units
from layerwise.report.content import Column, Lines, Report, Table, filled

COLUMNS = (
    Column("name"),
    Column("memory", "B"),
    Column("bandwidth"),
    Column("float32"),
    Column("bf16"),
    Column("node", "#"),
    Column("in it"),
    Column("between"),
)
EPILOG = """examples:
  layerwise machines a100-80
      every number, with its source
  layerwise search vgg16 --gpu a100-80 --nodes 4 --link 4x200Gb/s
      four nodes, each with four ports of 200 Gb/s"""


def parser() -> argparse.ArgumentParser:
    """The parser of the command's flags."""
    p = Parser(
        prog="layerwise machines",
        description="Lists the machines that --gpu takes. FLOP/s are dense, bandwidths one way.\n"
        "--link says what joins the nodes.",
        epilog=EPILOG,
    )
    p.add_argument("name", nargs="?", metavar="NAME", help="show one machine: each number with its source")
    output_arguments(p)
    return p


@command(parser)
def main(args: argparse.Namespace) -> None:
    """Prints the machines, or the numbers of one."""
    if args.name is not None:
        profile = load(args.name)
        columns = [Column("number"), Column("value"), Column("source", wraps=True)]
        table = Table(filled(columns, _numbers(json.loads(write(profile)))))
        present(Report(profile.description, "", [table], lambda: json.loads(write(profile))), args)
        return
    profiles = [load(name) for name in (*names(), *devices())]
    lines = Lines(
        [
            "The columns float32 and bf16 are dense FLOP/s, and node is the number of devices in a node. Bandwidths "
            "are one way: of a device in a node, and of a port between nodes.",
            "--profile also takes a file that `layerwise measure` wrote, whose times are better than stated ones.",
        ]
    )
    table = Table(filled(COLUMNS, map(_row, profiles)))
    present(Report("machines", "", [table, lines], lambda: {p.name: p for p in profiles}), args)


def _numbers(value: object, path: str = "") -> Iterator[tuple[str, str, str]]:
    """Every number of a profile's document but the sizes of tiles, with its value and its source."""
    if isinstance(value, dict) and value.keys() == {"value", "source"}:
        number = value["value"]
        yield path.removeprefix("device."), number if isinstance(number, str) else f"{number:g}", value["source"]
    elif isinstance(value, dict):
        for name in (name for name in value if name not in ("rows", "columns", "layers", "links")):
            yield from _numbers(value[name], f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _numbers(item, f"{path}[{i}]")


def _row(profile: Profile) -> tuple[str | float | None, ...]:
    processor, (node, *between) = profile.processor, profile.levels
    sixteen = processor.peak_flops.get("bf16")
    return (
        profile.name,
        processor.memory_bytes,
        units(processor.memory_bandwidth_bytes_per_s, "B/s"),
        units(processor.peak_flops["float32"], ""),
        "" if sixteen is None else units(sixteen, ""),
        profile.gpus_per_node,
        units(node.bandwidth_bytes_per_s, "B/s"),
        units(between[0].bandwidth_bytes_per_s, "B/s") if between else "",
    )


if __name__ == "__main__":
    sys.exit(run_main(main))
