"""python -m layerwise.report PLAN: shows a plan as a page in seven sections."""

from __future__ import annotations

import argparse
import sys

from layerwise.cli import MODEL_HELP, Parser, check_files, command, output_arguments, present, run_main
from layerwise.plan import load_plan
from layerwise.quantities import parse_bytes_range
from layerwise.report.figures import check_drawable
from layerwise.search.curve import Point, memory_curve
from layerwise.search.priced.variants import OFFERS
from layerwise.search.rebuild import memory_limit, rebuild
from layerwise.search.report.page import Planned, plan_report
from layerwise.search.report.traces import read_trace

POINTS = 8  # of a curve, at most


def parser() -> Parser:
    """The parser of the command's flags."""
    p = Parser(
        prog="layerwise report",
        description="Shows a plan: where its time goes, why each layer is split so, who computes what, the step by "
        "device, and its memory. The page is self-contained.",
    )
    p.add_argument("plan", metavar="PLAN.json", help="written by layerwise search --out")
    p.add_argument(
        "--measured", metavar="TRACE.json", help="a trace of layerwise run --trace, shown beside the predictions"
    )
    p.add_argument("--memory-curve", metavar="8GB..80GB", help="search under some memory limits between these")
    p.add_argument("--model", metavar="MODEL", help=MODEL_HELP)
    p.add_argument("--profile", metavar="NAME", help="the plan's profile, if it is a file, which a plan may not open")
    output_arguments(p, page="--out")
    return p


@command(parser)
def main(args: argparse.Namespace) -> None:
    """Writes the report of a plan. Raises LayerwiseError if it cannot be priced again, or the trace is invalid."""
    check_files({"--out": args.html})
    if args.html is not None:
        check_drawable("--out of a report")
    limits = None if args.memory_curve is None else parse_bytes_range(args.memory_curve, "--memory-curve")
    plan = load_plan(args.plan)
    measured = None if args.measured is None else read_trace(args.measured)
    model, space = rebuild(plan, args.model, args.profile)
    curve: list[Point] = []
    if limits is not None:
        curve = memory_curve(model, space, *limits, offer=OFFERS, points=POINTS)
    present(plan_report(Planned(plan, model, space, memory_limit(plan, model)), measured, curve), args)


if __name__ == "__main__":
    sys.exit(run_main(main))
