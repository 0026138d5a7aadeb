"""Memory in reports: what it is held for, and what a step takes under smaller and smaller limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

from layerwise.cost.memory.allocations import Kind
from layerwise.cost.memory.step import peak_by_kind
from layerwise.cost.model import CostModel
from layerwise.report.content import Column, Table, Value, filled, stacked
from layerwise.search.curve import Point
from layerwise.search.result import Candidate, SearchResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS: tuple[Kind, ...] = get_args(Kind)


def kinds_of(model: CostModel, candidates: Iterable[Candidate]) -> Mapping[str, Mapping[Kind, float]]:
    """What the fullest device holds when it is fullest, by strategy."""
    return {c.name: peak_by_kind(model, c.strategy) for c in {c.name: c for c in candidates}.values()}


def kinds_table(kinds: Mapping[str, Mapping[Kind, float]]) -> Table:
    """A row a kind of memory, a column a strategy."""
    rows = Column("memory of the fullest device", cells=[*KINDS, "all"])
    columns = (Column(name, "B", [*(held[kind] for kind in KINDS), sum(held.values())]) for name, held in kinds.items())
    return Table([rows, *columns])


CURVE = (
    Column("limit", "B"),
    Column("memory", "B"),
    Column("step time", "s"),
    Column("with overlap", "s"),
    Column("against no limit", "×"),
    Column("recompute", "#"),
    Column("shard", "#"),
    Column("proof"),
)


def curve_table(curve: Sequence[Point]) -> Table:
    """A row a limit."""
    halos = any(point.result.halos for point in curve)
    rows = [(*_curve_row(point), *([_halos(point)] if halos else [])) for point in curve]
    columns = filled([*CURVE, *([Column("halos")] if halos else [])], rows)
    narrow = [replace(c, heading=c.heading.replace("recompute", "recom-\npute")) for c in stacked(columns)]
    return Table(columns, narrower=[narrow])


def _curve_row(point: Point) -> tuple[Value, ...]:
    result, best = point.result, point.best
    if best is None:
        least = result.best.price.memory_bytes if result.least is None else result.least.bytes
        return point.limit_bytes, least, "at least", *[None] * 4, "none fits"
    return (
        point.limit_bytes,
        best.price.memory_bytes,
        best.price.step_time_s,
        best.timeline.total_s,
        best.timeline.total_s / result.unlimited.timeline.total_s,
        _count(best, "recompute"),
        _count(best, "states"),
        proof(result),
    )


def _halos(point: Point) -> Value:
    return None if point.best is None else "sent" if point.halos_sent else "read"


def _count(best: Candidate | None, what: str) -> int:
    """Layers that are recomputed, or have shared-out states."""
    configs = [] if best is None else best.strategy.values()
    return sum(c.recompute if what == "recompute" else c.states != "replicated" for c in configs)


def proof(result: SearchResult) -> str:
    """Of the additive optimum."""
    optimum = result.optimum
    return "proven" if optimum.proven else f"gap {optimum.cost_s / optimum.lower_bound_s - 1:.2%}"


def curve_values(curve: Sequence[Point]) -> list[dict[str, Any]]:
    """For a program: a member a limit, in seconds and bytes."""
    return [
        {
            "memory_limit_bytes": point.limit_bytes,
            "fits": point.best is not None,
            "memory_bytes": None if point.best is None else point.best.price.memory_bytes,
            "step_time_s": point.result.additive.price.step_time_s,
            "lower_bound_s": point.result.optimum.lower_bound_s,
            "optimal": point.result.optimum.proven,
            "timeline_s": None if point.best is None else point.best.timeline.total_s,
            "least_memory_bytes": None if point.result.least is None else point.result.least.bytes,
            "recompute": _count(point.best, "recompute"),
            "shard": _count(point.best, "states"),
            "halos_sent": list(point.halos_sent),
        }
        for point in curve
    ]


def draw_curve(curve: Sequence[Point], title: str) -> Figure:
    """Step time, with overlap and without, over the memory that a device may take."""
    from matplotlib.figure import Figure

    fitting = [(point, point.best) for point in curve if point.best is not None]
    figure = Figure(figsize=(5, 3.4), layout="constrained")
    axis = figure.subplots()
    limits = [point.limit_bytes / 1e9 for point, _ in fitting]
    for label, seconds in (
        ("with overlap", [best.timeline.total_s for _, best in fitting]),
        ("least step time", [point.result.additive.price.step_time_s for point, _ in fitting]),
        ("its lower bound", [point.result.optimum.lower_bound_s for point, _ in fitting]),
    ):
        axis.step(limits, [s * 1e3 for s in seconds], where="post", label=label, ls=":" if "bound" in label else "-")
    if len(fitting) < len(curve):
        axis.axvline(curve[-1].limit_bytes / 1e9, color="#b00020", lw=0.8, label="nothing fits")
    axis.set_xlabel("memory limit of a device (GB)", fontsize=8)
    axis.set_ylabel("milliseconds a step", fontsize=8)
    axis.set_ylim(bottom=0)
    axis.set_title(title, fontsize=9)
    axis.legend(fontsize=8, frameon=False)
    return figure
