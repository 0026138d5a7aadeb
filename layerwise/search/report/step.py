"""A plan's step, its memory and its boxes in space, as charts and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from layerwise.cost.memory.course import Course
from layerwise.cost.memory.sizes import TensorSizes
from layerwise.cost.model import CostModel
from layerwise.cost.timeline.shares import HIDDEN
from layerwise.errors import LayerwiseError
from layerwise.partition.place import Boxes, input_maps
from layerwise.quantities import units
from layerwise.report import charts
from layerwise.report.content import Column, Lines, Part, Table, facts, filled
from layerwise.search.curve import Point
from layerwise.search.report.tables import curve_table
from layerwise.search.report.traces import TraceFile, differences_table
from layerwise.search.result import Candidate

ROWS = 12  # of a timeline, at most


def step(best: Candidate, ranks: Sequence[int], measured: TraceFile | None) -> Iterator[Part]:
    """The step by device, and what was measured beside it. ranks: of the plan's devices, in order."""
    rows = list[tuple[str, Sequence[charts.Bar]]]()
    if measured is None:
        same: dict[tuple[charts.Bar, ...], list[int]] = {}
        for device in range(best.shares.devices):
            same.setdefault(tuple(_bars(best, device)), []).append(device)
        for bars, devices in same.items():
            several = f"devices {devices[0]}–{devices[-1]} ({len(devices)} alike)"
            rows.append((several if len(devices) > 1 else f"device {devices[0]}", bars))
    else:
        for rank in measured.ranks:
            if rank not in ranks:
                raise LayerwiseError(
                    f"the measured trace has rank {rank}, and the plan {len(ranks)} ranks: give its own"
                )
            device = ranks.index(rank)
            rows += [(f"rank {rank}, predicted", _bars(best, device)), (f"rank {rank}, measured", measured.step(rank))]
    shown = rows[:ROWS]
    yield charts.timeline(shown, max(bar.end_s for _, bars in shown for bar in bars))
    if len(rows) > ROWS:
        yield Lines([f"{len(rows) - ROWS:,} more rows are not shown."])
    yield facts([
        ("a step", f"{units(best.timeline.total_s, 's')}, predicted"),
        ("forward pass", units(best.timeline.forward_s, "s")),
        ("backward pass", units(best.timeline.backward_s, "s")),
        ("sums that nothing hides", units(best.timeline.exposed_sync_s, "s")),
        ("communication beside computation", units(best.shares.total(HIDDEN), "s")),
    ])  # fmt: skip
    if measured is not None:
        by_rank = {rank: _bars(best, device) for device, rank in enumerate(ranks)}
        spans = {r: {(b.part, b.name): [(b.start_s, b.end_s)] for b in bars} for r, bars in by_rank.items()}
        yield differences_table(TraceFile(spans), measured, "The largest differences")


def _bars(best: Candidate, device: int) -> list[charts.Bar]:
    here = (span for span in best.spans if span.devices[device])
    times = ((span, round(float(span.start_s[device]), 9), round(float(span.end_s[device]), 9)) for span in here)
    return [charts.Bar(span.name, span.category, span.layer, *ends) for span, *ends in times]


def memory(best: Candidate, baselines: Mapping[str, Candidate], held: Course, curve: Sequence[Point]) -> Iterator[Part]:
    """The memory of the fullest device over the step; and what a step takes under other limits."""
    limit, at = best.memory_limit_bytes, held.fullest
    yield charts.memory(held.instants, held.kinds, at, limit)
    rows = [(kind, sizes[at], max(sizes)) for kind, sizes in held.kinds.items() if any(sizes)]
    columns = filled([Column("held for"), Column("at the fullest instant", "B"), Column("at most", "B")], rows)
    yield Table(columns, f"Device {held.device}: fullest at {held.instants[at]}; its limit is {units(limit, 'B')}")
    plans = {c.key: c for c in [*list(baselines.values())[::-1], best]}
    points = [(c.name, c.memory_bytes, c.timeline.total_s) for c in plans.values()]
    under = [(f"under {units(p.limit_bytes, 'B')}", p.limit_bytes, p.best.timeline.total_s) for p in curve if p.best]
    yield charts.time_and_memory(points, under[::-1], limit)
    if curve:
        yield curve_table(curve)


def halos(model: CostModel, best: Candidate) -> list[Part]:
    """The boxes in space of the layer with the largest halo: what devices have of its input, and what they need."""
    places = TensorSizes(model, best.strategy).places
    found = list[tuple[float, charts.SplitVolume, str]]()
    for layer in model.graph.inner:
        dims = layer.specs[0].dims if layer.inputs else ()
        maps, epilogue = input_maps(layer, 0) if layer.inputs else ((), False)
        owned, target = places[layer.inputs[0]].owned if maps else None, places[layer.name].at(epilogue)
        cuts = [(-len({*owned.lo[:, i].tolist()}), i) for i, dim in enumerate(dims) if owned and dim in ("d", "h", "w")]
        if owned is None or len(cuts) < 2 or min(cuts)[0] == -1 or not (owned.active & target.active).all():
            continue
        needed, axes = target.needs(maps), sorted(i for _, i in sorted(cuts)[:2])
        halo = needed.volume - owned.overlap(needed)
        if (2 * halo <= needed.volume).all() and halo.max() > 0:  # else a tensor changes hands
            words = f"Of {layer.inputs[0]} each device has a box (coloured); {layer.name} needs its halo, too (dashed):"
            shape, labels = layer.specs[0].shape, [str(dims[i]) for i in axes]
            owners, needs = (_from_above(boxes, axes) for boxes in (owned, needed))
            space = charts.SplitVolume(owners, needs, [shape[i] for i in axes], labels)
            found.append((float(halo.max()), space, words))
    if not found:
        return []
    _, space, words = max(found, key=lambda each: each[0])
    return [Lines([words]), charts.boxes(space)]


def _from_above(boxes: Boxes, axes: Sequence[int]) -> list[charts.Box]:
    """Of every device where its box begins and ends, down and across."""
    lo, hi = boxes.lo[:, axes].tolist(), boxes.hi[:, axes].tolist()
    return [((y0, y1), (x0, x1)) for (y0, x0), (y1, x1) in zip(lo, hi, strict=True)]
