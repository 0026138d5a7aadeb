"""layerwise explain PLAN LAYER: what every other configuration of a layer would cost, the rest chosen anew.

And what each other form of it, recomputed or with shared-out states, would cost, the rest as in the plan.
"""

from __future__ import annotations

import argparse
import sys

from layerwise.cli import MODEL_HELP, Parser, check_files, command, output_arguments, positive, present, run_main
from layerwise.errors import LayerwiseError, nearest
from layerwise.plan import as_json, load_plan
from layerwise.report.content import Lines, Part, Report
from layerwise.search.baselines import baselines, configurations
from layerwise.search.rebuild import memory_limit, rebuild
from layerwise.search.report.forms import (
    MOST,
    alternatives_table,
    forms_of,
    forms_table,
    forms_values,
    limit_of,
    why,
)
from layerwise.search.solve.alternatives import all_alternatives

CHOSEN = "The plan was chosen by simulated time with overlap; equation 1 alone would choose the first row."


def parser() -> argparse.ArgumentParser:
    """The parser of the command's flags."""
    p = Parser(
        prog="layerwise explain",
        description="Says why a layer has its configuration. For each alternative it gives the step time (equation 1, "
        "without overlap) of the best strategy that contains it, whatever its memory. Then it gives time and memory of "
        "the plan with this layer saved or recomputed and its states replicated, sharded or gathered, and says what "
        "the plan's memory limit costs.",
    )
    p.add_argument("plan", metavar="PLAN.json", help="written by layerwise search --out")
    p.add_argument("layer", metavar="LAYER", help="name of a layer in the plan")
    p.add_argument("--model", metavar="MODEL", help=MODEL_HELP)
    p.add_argument(
        "--gpu",
        "--profile",
        dest="profile",
        metavar="NAME",
        help="the plan's profile, if it is a file; a file that only a plan names is never read",
    )
    p.add_argument("--all", action="store_true", help="print every alternative, not only the 12 best")
    p.add_argument(
        "--search-memory", type=positive, default=2.0, metavar="GIB", help="memory that tables may take (default: 2)"
    )
    output_arguments(p)
    return p


@command(parser)
def main(args: argparse.Namespace) -> None:
    """Prints what every other configuration and form of a layer would cost. LayerwiseError: the plan has none such."""
    check_files({"--html": args.html})
    plan = load_plan(args.plan)
    if args.layer not in plan.strategy:
        near = nearest(args.layer, plan.strategy) or f"; it has {', '.join(plan.strategy)}"
        raise LayerwiseError(f"the plan has no layer {args.layer!r}{near}")
    model, space = rebuild(plan, args.model, args.profile)
    named = baselines(model, space)
    tables = model.tables(configurations(model, space, {**named, "plan": plan.strategy}))
    options = all_alternatives(tables, args.search_memory * 2**30)[args.layer]
    best, chosen = options[0].step_time_s, plan.strategy[args.layer]
    limit = memory_limit(plan, model)
    forms = forms_of(model, plan.strategy, args.layer, limit, plan.bucket_bytes)
    layer = model.graph[args.layer]
    parts: list[Part] = [alternatives_table(layer, options, chosen, named, len(options) if args.all else MOST)]
    if layer.whole:
        parts.insert(0, Lines([f"It is not split: nothing is known of {layer.stages[0].label} but what it makes."]))
    bound = list(limit_of(plan))
    if bound:
        parts.append(Lines(["These step times heed no memory limit.", *bound]))
    elif best < next(a.step_time_s for a in options if a.config == chosen):
        parts.append(Lines([CHOSEN]))
    if len(forms) > 1:
        parts.append(forms_table(forms, chosen))
        if reasons := list(why(forms, chosen, limit)):
            parts.append(Lines(reasons))
    values = {
        "layer": args.layer,
        "alternatives": [
            {
                "config": as_json(a.config),
                "node_s": a.node_s,
                "step_time_s": a.step_time_s,
                "in_plan": a.config == chosen,
            }
            for a in options
        ],
        "forms": forms_values(forms, chosen),
        **{key: plan.provenance.get(key) for key in ("memory_limit_bytes", "without_limit", "memory_prices")},
    }
    about = f" {layer.out.describe()}: {len(options)} configurations"
    present(Report(args.layer, about, parts, lambda: values), args)


if __name__ == "__main__":
    sys.exit(run_main(main))
