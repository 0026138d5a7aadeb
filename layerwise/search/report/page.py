"""The report of a plan: the answer, where the time goes, each layer, the picture, the step, its memory, and everything
as tables. It is plain data, which `report.html` writes as a page; `plot` draws its pictures.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from layerwise.config import SearchSpace
from layerwise.cost.memory.course import Course, course
from layerwise.cost.memory.sizes import TensorSizes
from layerwise.cost.model import CostModel, EdgeName
from layerwise.cost.price import basis, complete, describe, warnings
from layerwise.cost.terms import COLUMNS, EDGE_TERMS
from layerwise.cost.timeline.shares import HIDDEN
from layerwise.errors import LayerwiseError
from layerwise.graph.layer import Layer
from layerwise.partition.place import Boxes, input_maps
from layerwise.plan import Plan
from layerwise.quantities import units
from layerwise.report.content import (
    Code,
    Column,
    Fold,
    Lines,
    Marked,
    Part,
    Picture,
    Report,
    Section,
    Table,
    Value,
    facts,
    filled,
)  # fmt: skip
from layerwise.report.figures import svg
from layerwise.search.baselines import baselines, configurations
from layerwise.search.curve import Point
from layerwise.search.find import candidate
from layerwise.search.plot import step
from layerwise.search.plot.structure import strategy
from layerwise.search.report.forms import alternatives_table, limit_of
from layerwise.search.report.found import about, price_dict
from layerwise.search.report.tables import (
    NUMBERS,
    candidates_table,
    curve_table,
    picture,
    row_numbers,
    short,
    step_part_s,
    strategy_table,
    time_by_block,
    written,
)  # fmt: skip
from layerwise.search.report.traces import TraceFile, differences_table
from layerwise.search.result import Candidate
from layerwise.search.solve.alternatives import Alternative, all_alternatives

MANY_PAIRS = 3_000_000  # of configurations of neighbours, beyond which alternatives are left out
MANY_LAYERS = 200  # beyond which there is no room for their graph
ALTERNATIVES = 6  # of a layer, beside those of the plan and the baselines


@dataclass(frozen=True)
class Planned:
    """A plan, and all that a report needs of it."""

    plan: Plan
    model: CostModel
    space: SearchSpace
    limit_bytes: float  # of a device

    @cached_property
    def best(self) -> Candidate:
        """The plan, priced."""
        name = str(self.plan.provenance.get("chosen", "plan"))
        return candidate(self.model, name, self.plan.strategy, self.limit_bytes, self.plan.bucket_bytes)

    @cached_property
    def baselines(self) -> dict[str, Candidate]:
        """Named strategies, priced."""
        named = baselines(self.model, self.space)
        return {name: candidate(self.model, name, strategy, self.limit_bytes) for name, strategy in named.items()}

    @cached_property
    def course(self) -> Course:
        """The memory of the fullest device over the step."""
        return course(self.model, complete(self.model, self.plan.strategy))

    @cached_property
    def alternatives(self) -> dict[str, list[Alternative]]:
        """The alternatives of every layer; {} if tables of all configurations would take too long."""
        strategies = baselines(self.model, self.space) | {"plan": self.best.strategy}
        configs = configurations(self.model, self.space, strategies)
        pairs = sum(len(configs[u]) * len(configs[v]) for u, v, _ in self.model.graph.edges())
        if pairs > MANY_PAIRS:
            return {}
        with contextlib.suppress(LayerwiseError):  # a table over several layers is too large
            return all_alternatives(self.model.tables(configs))
        return {}


def plan_report(
    planned: Planned, measured: TraceFile | None = None, curve: Sequence[Point] = (), more: Sequence[Part] = ()
) -> Report:
    """The seven sections. measured: a trace of the plan's run. curve: the best plans under some limits. more:
    additional parts from a search.
    """
    plan, model, best = planned.plan, planned.model, planned.best
    by_block, _, folds = time_by_block(best)
    table = Fold("The configurations as a table", [strategy_table(best)])
    parts = [
        Section("The answer", [*_answer(planned), *([Fold("All that the search says", more)] if more else [])]),
        Section("Where the time goes", [by_block, *folds]),
        Section("A layer", list(_layers(planned)), searched="Search a layer:"),
        Section("The picture", [picture(best, linked=True), *_graph(best), *_halos(best), table]),
        Section("The step", list(_step(best, plan.device_order, measured))),
        Section("Memory", list(_memory(planned, curve))),
        Section("All layers", list(_tables(planned)), searched="Search layers and edges:"),
    ]
    return Report(plan.model, about(model), parts, lambda: price_dict(best, planned.baselines, plan.model))


def _answer(planned: Planned) -> Iterator[Part]:
    plan, model, best, data = planned.plan, planned.model, planned.best, planned.baselines["data"]
    step_s, data_s = best.timeline.total_s, data.timeline.total_s
    gain = f"{data_s / step_s:.2f}× as fast as data parallelism ({units(data_s, 's')})"
    gain = "this is data parallelism" if best.key == data.key else gain
    need, have = units(best.memory_bytes, "B"), units(planned.limit_bytes, "B")
    at = f"device {planned.course.device} at {planned.course.instants[planned.course.fullest]}"
    yield Lines([
        f"A step takes {units(step_s, 's')}, predicted with overlap: {gain}.",
        _proof(plan),
        f"The fullest device needs {need} of {have}{'' if best.fits else ': it does NOT fit'} ({at}).",
    ])  # fmt: skip
    links = "measured" if isinstance(plan.provenance.get("links"), dict) else "as its profile states them"
    assumed = [describe(model, basis(model, best.price)), f"Links of {model.devices.name}: {links}.", *warnings(model)]
    yield Lines([*assumed, *limit_of(plan)])
    yield candidates_table([best, *planned.baselines.values()], best)


def _proof(plan: Plan) -> str:
    """A sentence on what is proven."""
    predicted, proven = plan.predicted, plan.provenance.get("additive_optimum_proven")
    if proven is None or "lower_bound_s" not in predicted:
        return "The plan is not the result of a search, so nothing is proven about it."
    bound = f"{units(predicted['lower_bound_s'], 's')} ({'proven' if proven else 'a bound'})"
    takes = units(predicted["step_time_s"], "s")
    text = f"By equation 1, without overlap, it takes {takes}, no strategy less than {bound}"
    text += " with its fixed layers" if plan.provenance.get("fixed") else ""
    if least_s := predicted.get("timeline_lower_bound_s"):
        text += f"; with overlap none less than {units(least_s, 's')} ({predicted['timeline_s'] / least_s - 1:.1%})"
    return f"{text}."


def _layers(planned: Planned) -> Iterator[Part]:
    """A fold for each layer, longest first: its cost and its alternatives."""
    best, found = planned.best, planned.alternatives
    sums = {name: step_part_s(parts) for name, parts in best.shares.layers.items()}
    strategies = {name: c.strategy for name, c in planned.baselines.items()}
    for layer in sorted(planned.model.graph.inner, key=lambda layer: -sums.get(layer.name, 0.0)):
        config, parts = best.strategy[layer.name], list[Part]([facts(_layer_facts(planned, layer))])
        if options := found.get(layer.name):
            parts.append(
                Lines(
                    [f"The best of {len(options)} configurations, by equation 1, with all other layers chosen again:"]
                )
            )
            parts.append(alternatives_table(layer, options, config, strategies, ALTERNATIVES))
        else:
            parts.append(Lines(["It has too many alternatives to list here: see layerwise explain."]))
        yield Fold(f"{layer.name}: {short(config)}, {units(sums.get(layer.name, 0.0), 's')}", parts, layer.name)


def _layer_facts(planned: Planned, layer: Layer) -> Iterator[tuple[str, str]]:
    best, price = planned.best, planned.best.price.layers[layer.name]
    step, compute_s = best.shares.layers.get(layer.name, {}), price.seconds["compute"]
    known = ((price.measured_s, "measured"), (price.fitted_s, "fitted to measured times"))
    source = ", ".join(f"{seconds / compute_s:.0%} {word}" for seconds, word in known if compute_s and seconds)
    yield "operator", layer.kinds
    yield "output", layer.out.describe()
    yield "inputs", ", ".join(layer.inputs) or "none"
    yield "configuration", f"{written(layer, price.config)} on {price.config.total} of {planned.plan.gpus} devices"
    yield "in the step", ", ".join(f"{part} {units(seconds, 's')}" for part, seconds in step.items()) or "nothing"
    yield "equation 1", ", ".join(f"{column} {units(price.column_s(column), 's')}" for column in COLUMNS)
    yield "computing times", source or f"an analytic roofline of {planned.model.devices.processor.name}"
    yield "sent", ", ".join(f"{kind} {units(size, 'B')}" for kind, size in price.bytes.items() if size) or "nothing"


def _tables(planned: Planned) -> Iterator[Part]:
    model, best = planned.model, planned.best
    heads = [Column(heading) for heading in ("layer", "operator", "output", "configuration")]
    full = filled([*heads, *NUMBERS], (_layer_row(layer, best) for layer in model.graph.inner))
    brief = [replace(column, wraps=not column.unit) for column in full if column.heading not in ("operator", "output")]
    yield Table(full, "Layers", narrower=[brief])
    heads = [Column(heading, wraps=True) for heading in ("from", "to", "tensor")]
    rows = (_edge_row(model, best, name) for name in model.graph.edges())
    yield Table(filled([*heads, Column("transfer", "s"), Column("sent", "B")], rows), "Edges, in all directions")
    yield Fold("The plan as JSON", [Code(planned.plan.dumps())])


def _layer_row(layer: Layer, best: Candidate) -> tuple[Value, ...]:
    price, name = best.price.layers[layer.name], Marked(layer.name, "layer")
    return name, layer.kinds, layer.out.describe(), short(price.config), *row_numbers([price])


def _edge_row(model: CostModel, best: Candidate, name: EdgeName) -> tuple[Value, ...]:
    source, target, _ = name
    ends = (best.strategy[source],), (best.strategy[target],)
    times, edge = model.directions(name), model.edge(name, *ends)
    sent = sum(term.sent_bytes(model, edge, times) for term in EDGE_TERMS if times)
    names = [Marked(end, "" if model.graph[end].end else "layer") for end in (source, target)]
    return *names, model.graph[source].out.describe(), float(model.edge_cost(name, *ends)[0, 0]), sent


def _step(best: Candidate, ranks: Sequence[int], measured: TraceFile | None) -> Iterator[Part]:
    """The step by device, with measurements. ranks: of the plan's devices, in order."""
    if measured is None:
        rows = list(step.rows_of(best))
    else:
        rows = []
        for rank in measured.ranks:
            if rank not in ranks:
                raise LayerwiseError(
                    f"the trace has rank {rank}, but the plan has {len(ranks)} ranks: pass the plan's own trace"
                )
            rows.append((f"rank {rank}, predicted", step.bars_of(best, ranks.index(rank))))
            rows.append((f"rank {rank}, measured", measured.step(rank)))
    shown = rows[: step.ROWS]
    yield Picture(lambda: svg(step.draw_timeline(shown)), "a step by device: computation, and below it communication")
    if len(rows) > step.ROWS:
        yield Lines([f"{len(rows) - step.ROWS:,} more rows are not shown."])
    yield facts([
        ("a step", f"{units(best.timeline.total_s, 's')}, predicted"),
        ("forward pass", units(best.timeline.forward_s, "s")),
        ("backward pass", units(best.timeline.backward_s, "s")),
        ("sums that nothing hides", units(best.timeline.exposed_sync_s, "s")),
        ("communication beside computation", units(best.shares.total(HIDDEN), "s")),
    ])  # fmt: skip
    if measured is not None:
        by_rank = {rank: step.bars_of(best, device) for device, rank in enumerate(ranks)}
        spans = {r: {(b.part, b.name): [(b.start_s, b.end_s)] for b in bars} for r, bars in by_rank.items()}
        yield differences_table(TraceFile(spans), measured, "The largest differences")


def _memory(planned: Planned, curve: Sequence[Point]) -> Iterator[Part]:
    """The memory of the fullest device over the step, and the step's time under other limits."""
    held, at, devices = planned.course, planned.course.fullest, planned.model.devices
    limit = planned.limit_bytes / float(np.broadcast_to(devices.memory_scale, devices.count)[held.device])
    over = "memory of the fullest device over a step, by what it is held for"
    yield Picture(lambda: svg(step.memory(held.instants, held.kinds, at, limit)), over)
    rows = [(kind, sizes[at], max(sizes)) for kind, sizes in held.kinds.items() if any(sizes)]
    columns = filled([Column("held for"), Column("at the fullest instant", "B"), Column("at most", "B")], rows)
    yield Table(columns, f"Device {held.device}: fullest at {held.instants[at]}; its limit is {units(limit, 'B')}")
    plans = {c.key: c for c in [*list(planned.baselines.values())[::-1], planned.best]}
    points = [(c.name, c.memory_bytes, c.timeline.total_s) for c in plans.values()]
    under = [(f"under {units(p.limit_bytes, 'B')}", p.limit_bytes, p.best.timeline.total_s) for p in curve if p.best]
    by_memory = "the time of a step by the memory that it needs"
    yield Picture(lambda: svg(step.time_and_memory(points, under[::-1], planned.limit_bytes)), by_memory)
    if curve:
        yield curve_table(curve)


def _graph(best: Candidate) -> list[Part]:
    """The strategy on the graph, if there is room."""
    label = "the strategy over the graph: a box a layer, coloured by configuration"
    return [Picture(lambda: svg(strategy(best)), label)] if len(best.model.graph.inner) <= MANY_LAYERS else []


def _halos(best: Candidate) -> list[Part]:
    """The spatial boxes of the layer with the largest halo: what devices have of its input, and what they need."""
    places = TensorSizes(best.model, best.strategy).places
    found = list[tuple[float, step.SplitVolume, str]]()
    for layer in best.model.graph.inner:
        dims = layer.specs[0].dims if layer.inputs else ()
        maps, epilogue = input_maps(layer, 0) if layer.inputs else ((), False)
        owned, target = places[layer.inputs[0]].owned if maps else None, places[layer.name].at(epilogue)
        cuts = [(-len({*owned.lo[:, i].tolist()}), i) for i, dim in enumerate(dims) if owned and dim in ("d", "h", "w")]
        if owned is None or len(cuts) < 2 or min(cuts)[0] == -1 or not (owned.active & target.active).all():
            continue
        needed, axes = target.needs(maps), sorted(i for _, i in sorted(cuts)[:2])
        halo = needed.volume - owned.overlap(needed)
        if (2 * halo <= needed.volume).all() and halo.max() > 0:  # otherwise a full tensor is exchanged
            words = f"Each device has a box of {layer.inputs[0]} (coloured); {layer.name} also needs its halo (dashed):"
            shape, labels = layer.specs[0].shape, [str(dims[i]) for i in axes]
            owners, needs = (_from_above(boxes, axes) for boxes in (owned, needed))
            space = step.SplitVolume(owners, needs, [shape[i] for i in axes], labels)
            found.append((float(halo.max()), space, words))
    if not found:
        return []
    _, space, words = max(found, key=lambda each: each[0])
    return [Lines([words]), Picture(lambda: svg(step.boxes(space)), "boxes of devices in space")]


def _from_above(boxes: Boxes, axes: Sequence[int]) -> list[step.Box]:
    """The ends of each device's box, down and across."""
    lo, hi = boxes.lo[:, axes].tolist(), boxes.hi[:, axes].tolist()
    return [((y0, y1), (x0, x1)) for (y0, x0), (y1, x1) in zip(lo, hi, strict=True)]
