"""One layer of a plan: the cost of its other configurations and of its other forms (recomputed or not, states
replicated, sharded or gathered), and what is said of them and of the memory limit that the plan was found under.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from layerwise.config import Config
from layerwise.cost.model import CostModel, CostTables
from layerwise.errors import LayerwiseError
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
from layerwise.search.solve.eliminate import Factor, join, min_fill_order

MOST = 12  # alternatives of a layer, beside those of the plan and of the baselines
ALTERNATIVES = (
    Column("configuration", wraps=True),
    Column("configuration", wraps=True),  # without the dimensions that are not split
    Column("devices", "#"),
    Column("t_C + t_S here", "s"),
    Column("step time", "s"),
    Column("against best", "%"),
)


def forms_of(
    model: CostModel, strategy: Mapping[str, Config], layer: str, memory_limit_bytes: float, bucket_bytes: int
) -> dict[Config, Candidate]:
    """The plan, with its buckets, with each form that means anything for `layer`, the one that saves nothing first."""
    forms = Forms.of(model.graph, model.devices.count, OFFERS)
    configs = dict.fromkeys(forms.of_layer(layer, strategy[layer].cells, form) for form in forms.offered)
    return {
        c: candidate(model, form_name(c), {**strategy, layer: c}, memory_limit_bytes, bucket_bytes) for c in configs
    }


def form_name(config: Config) -> str:
    """`recomputed, sharded`."""
    return f"{'recomputed' if config.recompute else 'kept'}, {config.states}"


def forms_table(forms: Mapping[Config, Candidate], chosen: Config) -> Table:
    """A row a form."""
    rows = [
        (c.name, c.price.step_time_s, c.timeline.total_s, memory(c), "in the plan" if config == chosen else "")
        for config, c in forms.items()
    ]
    step, overlap, _, _, _, held = COSTS
    return Table(filled([Column("the plan with this layer"), step, overlap, held, Column("", wraps=True)], rows))


def forms_values(forms: Mapping[Config, Candidate], chosen: Config) -> list[dict[str, Any]]:
    """Values for a program: a member a form, in seconds and bytes."""
    return [
        {"recompute": config.recompute, "states": config.states, **costs_json(c), "in_plan": config == chosen}
        for config, c in forms.items()
    ]


def why(forms: Mapping[Config, Candidate], chosen: Config, limit_bytes: float) -> Iterator[str]:
    """Why the layer is recomputed, and why its states are shared out: what the plan would be without that."""
    if chosen.recompute:
        yield _without("Recomputed", "kept", forms[replace(chosen, recompute=False)], limit_bytes)
    if chosen.states != "replicated":
        other = forms[replace(chosen, states="replicated")]
        yield _without(chosen.states.capitalize(), "replicated", other, limit_bytes)


def _without(chosen: str, plain: str, other: Candidate, limit_bytes: float) -> str:
    need, have = units(other.price.memory_bytes, "B"), units(limit_bytes, "B")
    if other.fits:
        return f"{chosen}: {plain}, the plan would take {need}, which fits into {have}, too."
    return f"{chosen} to fit: {plain}, the plan would take {need}, and a device has {have}."


def limit_of(plan: Plan) -> Iterator[str]:
    """The cost of the limit that the plan was found under, as its provenance says; nothing where it does not bind."""
    p, now_s = plan.provenance, plan.predicted.get("timeline_s")
    free, prices = p.get("without_limit"), p.get("memory_prices")
    limit = p.get("memory_limit_bytes")
    if not isinstance(free, dict) or not isinstance(prices, list) or not isinstance(limit, int) or now_s is None:
        return
    need = units(float(free["memory_bytes"]), "B")
    gain = faster(now_s / float(free["timeline_s"]) - 1)
    yield f"The plan was found under a limit of {units(limit, 'B')} a device: one of {need} would {gain}."
    for price in prices:
        if price["s_per_byte"] > 0:
            yield price_line(price["s_per_byte"], price["device"], price["instant"], limit)


@dataclass(frozen=True, slots=True)
class Alternative:
    """A configuration of one layer: its own t_C + t_S, and the best step time of any strategy that contains it."""

    config: Config
    node_s: float
    step_time_s: float


def alternatives(tables: CostTables, layer: str, memory_bytes: float = 2**31) -> list[Alternative]:
    """All configurations of `layer`, best first, the other layers chosen anew for each."""
    return all_alternatives(tables, memory_bytes)[layer]


def all_alternatives(tables: CostTables, memory_bytes: float = 2**31) -> dict[str, list[Alternative]]:
    """The `alternatives` of every layer, in two passes over the graph.

    The layers are eliminated one by one (Dechter's buckets), which leaves the cost of all before each; then, backwards,
    each passes on the cost of all but those. LayerwiseError where a table takes more than `memory_bytes`.
    """
    sizes = {name: len(cost) for name, cost in tables.node.items()}
    alive = [Factor((name,), cost) for name, cost in tables.node.items()]
    alive += [Factor(edge[:2], cost) for edge, cost in tables.transfer.items()]
    order = min_fill_order(sizes, [f.scope for f in alive])
    buckets, messages = dict[str, list[Factor]](), dict[str, Factor]()
    for name in order:
        bucket = buckets[name] = [f for f in alive if name in f.scope]
        alive = [f for f in alive if name not in f.scope]
        scope = {n for f in bucket for n in f.scope}
        if 16.0 * prod(sizes[n] for n in scope) > memory_bytes:
            raise LayerwiseError(
                f"explaining layer {name!r} needs a table over {len(scope)} layers that does not fit into "
                f"{memory_bytes / 2**30:.3g} GiB: restrict --dims or --degrees, or give more --search-memory"
            )
        joined = join(bucket, sizes, last=name)
        messages[name] = Factor(joined.scope[:-1], joined.cost.min(axis=-1))
        alive.append(messages[name])
    total = sum(float(f.cost) for f in alive)
    rest = {name: Factor((), np.array(total - messages[name].cost)) for name in order if not messages[name].scope}
    result = {}
    for name in reversed(order):
        joined = join([*buckets[name], rest.pop(name)], sizes, last=name)
        steps_s = joined.cost.min(axis=tuple(range(joined.cost.ndim - 1)))
        costs = zip(tables.configs[name], tables.node[name].tolist(), steps_s.tolist(), strict=True)
        result[name] = sorted((Alternative(*cost) for cost in costs), key=lambda a: a.step_time_s)
        for child in _senders(buckets[name], messages):
            others = tuple(i for i, n in enumerate(joined.scope) if n not in messages[child].scope)
            left = Factor(tuple(n for n in joined.scope if n in messages[child].scope), joined.cost.min(axis=others))
            rest[child] = Factor(messages[child].scope, left.over(messages[child].scope) - messages[child].cost)
    return {name: result[name] for name in tables.node}


def _senders(bucket: Sequence[Factor], messages: Mapping[str, Factor]) -> list[str]:
    """The layers whose messages are in a bucket."""
    there = {id(factor) for factor in bucket}
    return [name for name, message in messages.items() if id(message) in there]


def alternatives_table(
    layer: Layer,
    options: Sequence[Alternative],
    chosen: Config,
    baselines: Mapping[str, Mapping[str, Config]],
    most: int,
) -> Table:
    """A row a configuration, the best first: the best ones, those of the plan and of the baselines."""
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
