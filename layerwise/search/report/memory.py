"""Memory in reports: what it is held for, and what a step takes under smaller and smaller limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from rich.table import Table

from layerwise.cost.memory.allocations import Kind
from layerwise.cost.memory.by_kind import peak_by_kind
from layerwise.cost.model import CostModel
from layerwise.quantities import units
from layerwise.search.curve import Point
from layerwise.search.result import Candidate, SearchResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS: tuple[Kind, ...] = get_args(Kind)


def kinds_of(model: CostModel, candidates: Iterable[Candidate]) -> Mapping[str, Mapping[Kind, float]]:
    """What the fullest device holds when it is fullest, by strategy."""
    return {c.name: peak_by_kind(model, c.strategy) for c in {c.name: c for c in candidates}.values()}


def kinds_table(model: CostModel, candidates: Iterable[Candidate]) -> Table:
    """A row a kind of memory, a column a strategy."""
    kinds = kinds_of(model, candidates)
    table = Table(header_style="bold", box=None, pad_edge=False)
    table.add_column("memory of the fullest device")
    for name in kinds:
        table.add_column(name, justify="right", no_wrap=True)
    for kind in KINDS:
        table.add_row(kind, *(units(held[kind], "B") for held in kinds.values()))
    table.add_row("all", *(units(sum(held.values()), "B") for held in kinds.values()))
    return table


def curve_table(curve: Sequence[Point]) -> Table:
    """A row a limit."""
    table = Table(header_style="bold", box=None, pad_edge=False)
    for heading in ("limit", "memory", "step time", "with overlap", "against no limit", "recompute", "shard", "proof"):
        table.add_column(heading, justify="right" if heading != "proof" else "left", no_wrap=True)
    chosen = any(point.result.halos for point in curve)
    if chosen:
        table.add_column("halos")
    for point in curve:
        result, best = point.result, point.best
        limit = units(point.limit_bytes, "B")
        if best is None:
            least = units(result.best.price.memory_bytes if result.least is None else result.least.bytes, "B")
            table.add_row(limit, f"nothing fits: the least is {least}", *[""] * 6)
            continue
        table.add_row(
            limit,
            units(best.price.memory_bytes, "B"),
            units(best.price.step_time_s, "s"),
            units(best.timeline.total_s, "s"),
            f"{best.timeline.total_s / result.unlimited.timeline.total_s:.2f}×",
            str(_count(best, "recompute")),
            str(_count(best, "states")),
            proof(result),
            *(["sent" if point.halos_sent else "read"] if chosen else []),
        )
    return table


def _count(best: Candidate | None, what: str) -> int:
    """Layers that are recomputed, or have shared-out states."""
    configs = [] if best is None else best.strategy.values()
    return sum(c.recompute if what == "recompute" else c.states != "replicated" for c in configs)


def proof(result: SearchResult) -> str:
    """Of the additive optimum."""
    optimum = result.optimum
    return "proven" if optimum.proven else f"gap {optimum.cost_s / optimum.lower_bound_s - 1:.2%}"


def curve_dict(curve: Sequence[Point]) -> list[dict[str, Any]]:
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
