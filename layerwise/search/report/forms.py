"""One layer of a plan: the cost of its other configurations and forms (recomputed or not; states replicated, sharded or
gathered), with sentences about these and the plan's memory limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from layerwise.config import Config
from layerwise.cost.model import CostModel
from layerwise.graph.layer import Layer
from layerwise.plan import Plan
from layerwise.quantities import units
from layerwise.report.content import Column, Table, Value, filled
from layerwise.search.find import candidate
from layerwise.search.priced.variants import OFFERS, Forms
from layerwise.search.report.found import costs_json
from layerwise.search.report.sentences import faster, price_line
from layerwise.search.report.tables import COSTS, memory, short, written
from layerwise.search.result import Candidate
from layerwise.search.solve.alternatives import Alternative

MOST = 12  # alternatives of a layer, beside those of the plan and the baselines
ALTERNATIVES = (
    Column("configuration", wraps=True),
    Column("configuration", wraps=True),  # without unsplit dimensions
    Column("devices", "#"),
    Column("t_C + t_S here", "s"),
    Column("step time", "s"),
    Column("against best", "%"),
)


def forms_of(
    model: CostModel, strategy: Mapping[str, Config], layer: str, memory_limit_bytes: float, bucket_bytes: int
) -> dict[Config, Candidate]:
    """The plan, with its buckets, for each form that makes sense for `layer`; the form that saves nothing first."""
    forms = Forms.of(model.graph, model.devices.count, OFFERS)
    configs = dict.fromkeys(forms.of_layer(layer, strategy[layer].cells, form) for form in forms.offered)
    return {
        c: candidate(model, form_name(c), {**strategy, layer: c}, memory_limit_bytes, bucket_bytes) for c in configs
    }


def form_name(config: Config) -> str:
    """`recomputed, sharded`."""
    return f"{'recomputed' if config.recompute else 'kept'}, {config.states}"


def forms_table(forms: Mapping[Config, Candidate], chosen: Config) -> Table:
    """A table with a row for each form."""
    rows = [
        (c.name, c.price.step_time_s, c.timeline.total_s, memory(c), "in the plan" if config == chosen else "")
        for config, c in forms.items()
    ]
    step, overlap, _, _, _, held = COSTS
    return Table(filled([Column("the plan with this layer"), step, overlap, held, Column("", wraps=True)], rows))


def forms_values(forms: Mapping[Config, Candidate], chosen: Config) -> list[dict[str, Any]]:
    """Values for each form, in seconds and bytes."""
    return [
        {"recompute": config.recompute, "states": config.states, **costs_json(c), "in_plan": config == chosen}
        for config, c in forms.items()
    ]


def why(forms: Mapping[Config, Candidate], chosen: Config, limit_bytes: float) -> Iterator[str]:
    """Why the layer is recomputed, and why its states are sharded: what the plan would be otherwise."""
    if chosen.recompute:
        yield _without("Recomputed", "kept", forms[replace(chosen, recompute=False)], limit_bytes)
    if chosen.states != "replicated":
        other = forms[replace(chosen, states="replicated")]
        yield _without(chosen.states.capitalize(), "replicated", other, limit_bytes)


def _without(chosen: str, plain: str, other: Candidate, limit_bytes: float) -> str:
    need, have = units(other.price.memory_bytes, "B"), units(limit_bytes, "B")
    if other.fits:
        return f"{chosen}: {plain}, the plan would need {need}, which also fits into {have}."
    return f"{chosen} to fit: {plain}, the plan would need {need}, but a device has {have}."


def limit_of(plan: Plan) -> Iterator[str]:
    """The cost of the plan's memory limit, by its provenance; nothing if it does not bind."""
    p, now_s = plan.provenance, plan.predicted.get("timeline_s")
    free, prices = p.get("without_limit"), p.get("memory_prices")
    limit = p.get("memory_limit_bytes")
    if not isinstance(free, dict) or not isinstance(prices, list) or not isinstance(limit, int) or now_s is None:
        return
    need = units(float(free["memory_bytes"]), "B")
    gain = faster(now_s / float(free["timeline_s"]) - 1)
    yield f"The plan was found under a limit of {units(limit, 'B')} a device; a plan that needs {need} would {gain}."
    for price in prices:
        if price["s_per_byte"] > 0:
            yield price_line(price["s_per_byte"], price["device"], price["instant"], limit)


def alternatives_table(
    layer: Layer,
    options: Sequence[Alternative],
    chosen: Config,
    baselines: Mapping[str, Mapping[str, Config]],
    most: int,
) -> Table:
    """A row for each configuration, best first: the best ones, and those of the plan and the baselines."""
    best_s = options[0].step_time_s
    rows, notes = list[tuple[Value, ...]](), list[list[str]]()
    for rank, a in enumerate(options):
        note = ["in the plan"] * (a.config == chosen)
        note += [name for name, strategy in baselines.items() if strategy[layer.name] == a.config]
        if rank < most or note:
            ratio = f"+{a.step_time_s / best_s - 1:.2%}" if a.step_time_s > best_s else "best"
            rows.append((written(layer, a.config), short(a.config), a.config.total, a.node_s, a.step_time_s, ratio))
            notes.append(note)
    full, brief, *numbers = filled(ALTERNATIVES, rows)
    noted, narrow = (Column("", cells=[comma.join(note) for note in notes], wraps=True) for comma in (", ", ",\n"))
    return Table([full, *numbers, noted], narrower=[[brief, *numbers, noted], [brief, *numbers, narrow]])
