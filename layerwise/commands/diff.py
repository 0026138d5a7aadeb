"""layerwise diff A.json B.json: where two plans differ, and what that is predicted to change."""

from __future__ import annotations

import argparse
import sys

from layerwise.cli import Parser, check_files, command, output_arguments, present, run_main
from layerwise.config import Config
from layerwise.errors import LayerwiseError
from layerwise.plan import as_json, load_plan
from layerwise.quantities import units
from layerwise.report.content import Column, Lines, Part, Report, Table, filled
from layerwise.search.report.tables import short


def parser() -> argparse.ArgumentParser:
    """The parser of the command's flags."""
    p = Parser(prog="layerwise diff", description="Compares two plans of the same network, layer by layer.")
    p.add_argument("a", metavar="A.json")
    p.add_argument("b", metavar="B.json")
    output_arguments(p)
    return p


@command(parser)
def main(args: argparse.Namespace) -> None:
    """Prints where two plans differ. LayerwiseError: one cannot be read, or their networks have no layer in common."""
    check_files({"--html": args.html})
    a, b = load_plan(args.a), load_plan(args.b)
    if not set(a.strategy) & set(b.strategy):
        raise LayerwiseError(f"the plans have no layer in common: {a.model!r} and {b.model!r} are other networks")
    layers = list(dict.fromkeys([*a.strategy, *b.strategy]))
    changed = [name for name in layers if a.strategy.get(name) != b.strategy.get(name)]
    settings = [
        (name, getattr(a, name), getattr(b, name))
        for name in ("model", "digest", "batch", "gpus", "gpus_per_node", "io", "fused", "bucket_bytes")
        if getattr(a, name) != getattr(b, name)
    ]
    shared = [key for key in a.predicted if key in b.predicted]
    rows: list[tuple[str, str, str]] = []
    for setting, *values in settings:
        first, second = (str(value)[:12] if setting == "digest" else str(value) for value in values)
        rows.append((setting, first, second))
    rows += [(name, _written(a.strategy.get(name)), _written(b.strategy.get(name))) for name in changed]
    for key in shared:
        unit = "s" if key.endswith("_s") else "B"
        rows.append((key, units(a.predicted[key], unit), units(b.predicted[key], unit)))
    columns = [Column(""), Column(args.a, wraps=True), Column(args.b, wraps=True)]
    body = {
        "settings": {name: [x, y] for name, x, y in settings},
        "layers": {n: [as_json(p.strategy[n]) if n in p.strategy else None for p in (a, b)] for n in changed},
        "predicted": {key: [a.predicted[key], b.predicted[key]] for key in shared},
    }
    parts: list[Part] = [Table(filled(columns, rows)), Lines([f"{len(changed)} of {len(layers)} layers differ"])]
    present(Report(a.model, f" in {args.a} and {args.b}", parts, lambda: body), args)


def _written(config: Config | None) -> str:
    return "-" if config is None else short(config)


if __name__ == "__main__":
    sys.exit(run_main(main))
