"""layerwise explain PLAN LAYER: what every other configuration of a layer would cost, the rest chosen anew.

And what each other form of it, recomputed or with shared-out states, would cost, the rest as in the plan.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

from layerwise.cli import MODEL_HELP, Parser, check_files, output_arguments, positive, present, run_main
from layerwise.config import Config
from layerwise.errors import LayerwiseError, nearest
from layerwise.graph.layer import Layer
from layerwise.plan import as_json, load_plan
from layerwise.report.content import Column, Lines, Part, Report, Table, Value, filled
from layerwise.search.baselines import baselines
from layerwise.search.find import configurations
from layerwise.search.rebuild import rebuild
from layerwise.search.report.forms import Alternative, alternatives, forms_of, forms_table, forms_values, limit_of, why
from layerwise.search.report.tables import short, written

CHOSEN = "The plan was chosen by simulated time with overlap; equation 1 alone would choose the first row."
ALTERNATIVES = (
    Column("configuration", wraps=True),
    Column("configuration", wraps=True),  # without the dimensions that are not split
    Column("devices", "#"),
    Column("t_C + t_S here", "s"),
    Column("step time", "s"),
    Column("against best", "%"),
)


def parser() -> argparse.ArgumentParser:
    """The parser of the command's flags."""
    p = Parser(
        prog="layerwise explain",
        description="Says why a layer has its configuration: the step time (equation 1, no overlap) of the best "
        "strategy that contains each alternative, every other layer re-optimised, whatever its memory. The tables are "
        "not pruned. Then time and memory of the plan itself with this layer kept or recomputed, and its states "
        "replicated, sharded or gathered; and what the plan's memory limit costs, where it binds.",
    )
    p.add_argument("plan", metavar="PLAN.json", help="written by layerwise search --out")
    p.add_argument("layer", metavar="LAYER", help="a layer's name, as in the plan")
    p.add_argument("--model", metavar="MODEL", help=MODEL_HELP)
    p.add_argument(
        "--gpu",
        "--profile",
        dest="profile",
        metavar="NAME",
        help="the plan's profile, where that is a file: a plan has none read",
    )
    p.add_argument("--all", action="store_true", help="every alternative, not only the 12 best")
    p.add_argument("--search-memory", type=positive, default=2.0, metavar="GIB", help="bound on tables (default: 2)")
    output_arguments(p)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what every other configuration and form of a layer of a plan would cost.

    Args:
        argv: The command line behind the command's name. None: this process's.

    Returns:
        0.

    Raises:
        LayerwiseError: The plan has no such layer, or cannot be priced anew.
    """
    args = parser().parse_args(argv)
    check_files({"--html": args.html})
    plan = load_plan(args.plan)
    if args.layer not in plan.strategy:
        raise LayerwiseError(f"the plan has no layer {args.layer!r}{nearest(args.layer, plan.strategy)}")
    model, space = rebuild(plan, args.model, args.profile)
    named = baselines(model, space)
    tables = model.tables(configurations(model, space, {**named, "plan": plan.strategy}, {}))
    options = alternatives(tables, args.layer, args.search_memory * 2**30)
    best, chosen = options[0].step_time_s, plan.strategy[args.layer]
    limit = plan.provenance.get("memory_limit_bytes", model.devices.usable_bytes)
    if not isinstance(limit, int | float) or isinstance(limit, bool):
        raise LayerwiseError(f"the plan's provenance has the memory limit {limit!r}: search again")
    forms = forms_of(model, plan.strategy, args.layer, limit)
    layer = model.graph[args.layer]
    parts: list[Part] = [_alternatives(layer, options, chosen, named, every=args.all)]
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
    return 0


def _alternatives(
    layer: Layer,
    options: Sequence[Alternative],
    chosen: Config,
    baselines: Mapping[str, Mapping[str, Config]],
    *,
    every: bool,
) -> Table:
    """A row a configuration, the best first: the 12 best, those of the plan and of the baselines, or all."""
    best_s = options[0].step_time_s
    rows, notes = list[tuple[Value, ...]](), list[list[str]]()
    for rank, a in enumerate(options):
        note = ["in the plan"] * (a.config == chosen)
        note += [name for name, strategy in baselines.items() if strategy[layer.name] == a.config]
        if every or rank < 12 or note:
            ratio = f"+{a.step_time_s / best_s - 1:.2%}" if a.step_time_s > best_s else "best"
            rows.append((written(layer, a.config), short(a.config), a.config.total, a.node_s, a.step_time_s, ratio))
            notes.append(note)
    full, brief, *numbers = filled(ALTERNATIVES, rows)
    noted, narrow = (Column("", cells=[comma.join(note) for note in notes], wraps=True) for comma in (", ", ",\n"))
    return Table([full, *numbers, noted], narrower=[[brief, *numbers, noted], [brief, *numbers, narrow]])


if __name__ == "__main__":
    sys.exit(run_main(main))
