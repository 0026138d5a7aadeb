"""layerwise diff A.json B.json: where two plans differ, and what that is predicted to change."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from rich.table import Table

from layerwise.cli import Parser, console, run_main
from layerwise.config import Config
from layerwise.errors import LayerwiseError
from layerwise.plan import as_json, load_plan
from layerwise.quantities import units
from layerwise.search.report.text import short


def parser() -> argparse.ArgumentParser:
    """The flags."""
    p = Parser(prog="layerwise diff", description="Compares two plans of the same network, layer by layer.")
    p.add_argument("a", metavar="A.json")
    p.add_argument("b", metavar="B.json")
    p.add_argument("--json", action="store_true", help="for programs")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, compare, print."""
    args = parser().parse_args(argv)
    a, b = load_plan(args.a), load_plan(args.b)
    if not set(a.strategy) & set(b.strategy):
        raise LayerwiseError(f"the plans have no layer in common: {a.model!r} and {b.model!r} are other networks")
    layers = list(dict.fromkeys([*a.strategy, *b.strategy]))
    changed = [name for name in layers if a.strategy.get(name) != b.strategy.get(name)]
    settings = [
        (name, getattr(a, name), getattr(b, name))
        for name in ("model", "digest", "batch", "gpus", "gpus_per_node", "io", "fused", "halos_sent")
        if getattr(a, name) != getattr(b, name)
    ]
    shared = [key for key in a.predicted if key in b.predicted]
    if args.json:
        body = {
            "settings": {name: [x, y] for name, x, y in settings},
            "layers": {n: [as_json(p.strategy[n]) if n in p.strategy else None for p in (a, b)] for n in changed},
            "predicted": {key: [a.predicted[key], b.predicted[key]] for key in shared},
        }
        print(json.dumps(body, indent=1))
        return 0
    table = Table(header_style="bold", box=None, pad_edge=False)
    for name in ("", args.a, args.b):
        table.add_column(name)
    for setting, x, y in settings:
        table.add_row(setting, *(str(v)[:12] if setting == "digest" else str(v) for v in (x, y)))
    for name in changed:
        table.add_row(name, *(_written(p.strategy.get(name)) for p in (a, b)))
    for key in shared:
        unit = "s" if key.endswith("_s") else "B"
        table.add_row(key, units(a.predicted[key], unit), units(b.predicted[key], unit))
    out = console()
    out.print(table)
    out.print(f"\n{len(changed)} of {len(layers)} layers differ")
    return 0


def _written(config: Config | None) -> str:
    return "-" if config is None else short(config)


if __name__ == "__main__":
    sys.exit(run_main(main))
