"""layerwise search --memory-curve: checks its flags, searches, and shows or draws the curve."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from layerwise.cli import present, progress_bar
from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel
from layerwise.errors import LayerwiseError
from layerwise.quantities import parse_bytes_range
from layerwise.report.content import Report
from layerwise.report.figures import check_plot, save_plot
from layerwise.search.curve import memory_curve
from layerwise.search.report.found import about
from layerwise.search.report.sentences import nothing_fits
from layerwise.search.report.tables import curve_table, curve_values, draw_curve

OTHERS = ("memory_limit", "price", "out", "export_costs", "timeline", "layers", "memory")


def check_curve(args: argparse.Namespace) -> None:
    """LayerwiseError for what does not go with --memory-curve, and for a --plot that cannot be drawn."""
    if args.plot is not None:
        check_plot(args.plot)
    if args.memory_curve is None:
        return
    wrong = [f"--{name.replace('_', '-')}" for name in OTHERS if getattr(args, name)]
    if wrong:
        raise LayerwiseError(f"--memory-curve is about many plans: leave out {' and '.join(wrong)}")
    parse_bytes_range(args.memory_curve, "--memory-curve")


def show_curve(model: CostModel, space: SearchSpace, offer: Sequence[str], args: argparse.Namespace) -> None:
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
        )
    if curve[0].best is None:
        raise LayerwiseError(f"--memory-curve {args.memory_curve}: {nothing_fits(curve[0].result)}")
    if args.plot is not None:
        save_plot(draw_curve(curve, args.model + about(model)), args.plot)
    values = {"model": args.model, "gpus": args.gpus, "curve": curve_values(curve)}
    present(Report(args.model, about(model), [curve_table(curve)], lambda: values), args, {"figure": args.plot})
