"""layerwise search --memory-curve: checks its flags, searches, and shows or draws the curve."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from layerwise.cache import answers
from layerwise.cli import console, progress_bar
from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel
from layerwise.errors import LayerwiseError
from layerwise.figures import check_plot, save_plot
from layerwise.files import check_writable
from layerwise.quantities import parse_bytes_range
from layerwise.search.curve import memory_curve
from layerwise.search.report.limit import nothing_fits
from layerwise.search.report.memory import curve_dict, curve_table, draw_curve

OTHERS = ("memory_limit", "price", "grid", "out", "export_costs", "timeline", "depth_first", "layers", "memory")


def check_curve(args: argparse.Namespace) -> None:
    """LayerwiseError for what does not go with --memory-curve, or without it."""
    if args.plot is not None and args.memory_curve is None:
        raise LayerwiseError("--plot draws --memory-curve: give that, too, such as --memory-curve 8GB..80GB")
    if args.memory_curve is None:
        return
    wrong = [f"--{name.replace('_', '-')}" for name in OTHERS if getattr(args, name)]
    if wrong:
        raise LayerwiseError(f"--memory-curve is about many plans: leave out {' and '.join(wrong)}")
    parse_bytes_range(args.memory_curve, "--memory-curve")
    if args.plot is not None:
        check_plot(args.plot)
        check_writable(args.plot)


def show_curve(model: CostModel, space: SearchSpace, offer: Sequence[str], args: argparse.Namespace) -> int:
    """The fastest plan under each of some limits: a table, JSON, a figure."""
    least, most = parse_bytes_range(args.memory_curve, "--memory-curve")
    with progress_bar("pricing transfers", quiet=args.json) as progress:
        curve = memory_curve(
            model,
            space,
            least,
            most,
            objective=args.objective,
            offer=offer,
            memory_bytes=args.search_memory * 2**30,
            progress=progress,
            answers=answers(wanted=not args.no_cache),
        )
    if curve[0].best is None:
        raise LayerwiseError(f"--memory-curve {args.memory_curve}: {nothing_fits(curve[0].result)}")
    title = f"{args.model} on {args.gpus} × {model.devices.processor.name}, {model.graph.batch:,} samples a step"
    if args.plot is not None:
        save_plot(draw_curve(curve, title), args.plot)
    if args.json:
        print(json.dumps({"model": args.model, "gpus": args.gpus, "curve": curve_dict(curve)}, indent=1))
        return 0
    out = console()
    out.print(title)
    out.print(curve_table(curve))
    if args.plot is not None:
        out.print(f"figure written to {args.plot}", soft_wrap=True)
    return 0
