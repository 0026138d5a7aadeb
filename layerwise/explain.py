"""layerwise explain PLAN LAYER: what every other configuration of a layer would cost, the rest chosen anew.

And what each other form of it, recomputed or with shared-out states, would cost, the rest as in the plan.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import cast, get_args, get_type_hints

from rich.table import Table
from rich.text import Text

from layerwise.cli import MODEL_HELP, Parser, console, positive, run_main
from layerwise.config import SearchSpace
from layerwise.cost.compute.roofline import OPTIMIZERS
from layerwise.cost.model import CostModel, CostOptions
from layerwise.errors import LayerwiseError
from layerwise.importers.load import load_model, planned_model, planned_shape
from layerwise.machine import DTYPES, load
from layerwise.plan import Plan, as_json, load_plan, nearest
from layerwise.quantities import units
from layerwise.search.alternatives import alternatives
from layerwise.search.baselines import NAMES, baseline
from layerwise.search.find import configurations
from layerwise.search.forms import forms_of
from layerwise.search.report.forms import forms_dict, forms_table, limit_of, why
from layerwise.search.report.text import Fitting, short, written

LINK_MODELS, SYNCS = (get_args(get_type_hints(CostOptions)[name]) for name in ("link_model", "sync"))


def parser() -> argparse.ArgumentParser:
    """The flags."""
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
    p.add_argument("--all", action="store_true", help="every alternative, not only the 12 best")
    p.add_argument("--search-memory", type=positive, default=2.0, metavar="GIB", help="bound on tables (default: 2)")
    p.add_argument("--json", action="store_true", help="for programs")
    return p


def rebuild(plan: Plan, model: str | None = None) -> tuple[CostModel, SearchSpace]:
    """The cost model and the space under which a plan was found; `model`: see `planned_model`."""
    p = plan.provenance
    try:
        shape = p["input_shape"]
        devices = load(cast(str, p["profile"])).device_graph(plan.gpus, plan.gpus_per_node)
        options = CostOptions(**cast(dict[str, str], p["cost_options"]))  # type: ignore[arg-type]
        dims = tuple(cast(list[str], p["dims"]))
        space = SearchSpace(plan.gpus, dims, bool(p["powers_of_two"]), devices.nodes > 1)
    except (KeyError, TypeError) as error:
        raise LayerwiseError(f"the plan's provenance does not say how it was found ({error}): search again") from None
    for option, known in (("optimizer", OPTIMIZERS), ("dtype", DTYPES), ("link_model", LINK_MODELS), ("sync", SYNCS)):
        if (value := getattr(options, option)) not in known:
            raise LayerwiseError(f"the plan's provenance has the {option} {value!r}; there are {', '.join(known)}")
    raw = load_model(planned_model(plan.model, model), plan.batch, planned_shape(shape))
    graph = plan.layers(raw)
    plan.check(graph)
    return CostModel(graph, devices, options), space


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, price, print."""
    args = parser().parse_args(argv)
    plan = load_plan(args.plan)
    if args.layer not in plan.strategy:
        raise LayerwiseError(f"the plan has no layer {args.layer!r}{nearest(args.layer, plan.strategy)}")
    model, space = rebuild(plan, args.model)
    named = {name: baseline(model, name) for name in NAMES}
    tables = model.tables(configurations(model, space, {**named, "plan": plan.strategy}, {}))
    options = alternatives(tables, args.layer, args.search_memory * 2**30)
    best, chosen = options[0].step_time_s, plan.strategy[args.layer]
    limit = plan.provenance.get("memory_limit_bytes", model.devices.usable_bytes)
    if not isinstance(limit, int | float) or isinstance(limit, bool):
        raise LayerwiseError(f"the plan's provenance has the memory limit {limit!r}: search again")
    forms = forms_of(model, plan.strategy, args.layer, limit)
    if args.json:
        rows = [
            {
                "config": as_json(a.config),
                "node_s": a.node_s,
                "step_time_s": a.step_time_s,
                "in_plan": a.config == chosen,
            }
            for a in options
        ]
        told = {key: plan.provenance.get(key) for key in ("memory_limit_bytes", "without_limit", "memory_prices")}
        print(
            json.dumps(
                {"layer": args.layer, "alternatives": rows, "forms": forms_dict(forms, chosen), **told}, indent=1
            )
        )
        return 0
    layer = model.graph[args.layer]
    shown: list[Table] = []
    for title in (lambda config: written(layer, config), short):
        table = Table(header_style="bold", box=None, pad_edge=False)
        table.add_column("configuration")
        for name in ("devices", "t_C + t_S here", "step time", "against best"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("")
        for rank, a in enumerate(options):
            notes = ["in the plan"] * (a.config == chosen) + [n for n in NAMES if named[n][args.layer] == a.config]
            if args.all or rank < 12 or notes:
                ratio = f"+{a.step_time_s / best - 1:.2%}" if a.step_time_s > best else "best"
                numbers = (str(a.config.total), units(a.node_s, "s"), units(a.step_time_s, "s"), ratio)
                table.add_row(title(a.config), *numbers, ", ".join(notes))
        shown.append(table)
    out = console()
    out.print(Text.assemble((args.layer, "bold"), f" {layer.out.describe()}: {len(options)} configurations\n"))
    if layer.whole:
        out.print(f"It is not split: nothing is known of {layer.stages[0].label} but what it makes.\n")
    out.print(Fitting(*shown))
    bound = list(limit_of(plan))
    if best < next(a.step_time_s for a in options if a.config == chosen) and not bound:
        out.print("\nThe plan was chosen by simulated time with overlap; equation 1 alone would choose the first row.")
    if bound:
        out.print("\nThese step times heed no memory limit.", *bound, sep="\n")
    if len(forms) > 1:
        out.print("", forms_table(forms, chosen), "", *why(forms, chosen, limit), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
