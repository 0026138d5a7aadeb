"""The reports of `layerwise search`: of what was found, and of a strategy that was priced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from layerwise.cost.memory.allocations import Kind
from layerwise.cost.model import CostModel
from layerwise.quantities import units
from layerwise.report.content import Lines, Part, Report, described
from layerwise.search.remedies import Remedy
from layerwise.search.report.limit import nothing_fits
from layerwise.search.report.memory import kinds_of, kinds_table
from layerwise.search.report.sentences import conclusion, verdict
from layerwise.search.report.tables import brief_strategy_table, candidates_table, picture, strategy_table
from layerwise.search.report.values import as_dict, price_dict
from layerwise.search.result import Candidate, SearchResult


def about(model: CostModel) -> str:
    """Where, and with how large a batch."""
    devices = model.devices
    kind = ", inference" if model.options.kind == "inference" else ""
    return f" on {devices.count} × {devices.processor.name}, {model.graph.batch:,} samples a step{kind}"


def found(
    model: CostModel,
    result: SearchResult,
    name: str,
    seconds: Mapping[str, float],
    *,
    every_layer: bool = False,
    memory: bool = False,
    tried: Sequence[Remedy] = (),
) -> Report:
    """All that a search came to.

    memory: whether it is told what the fullest device holds. tried: what would make a plan fit,
    where none does.
    """
    rows = [result.best, *result.baselines.values()]
    space, kinds = result.configurations, kinds_of(model, rows) if memory else {}
    times = ", ".join(f"{what} {units(value, 's')}" for what, value in seconds.items())
    lines = [
        *verdict(model, result, tried),
        f"{times}; up to {space['largest']} configurations a layer, {space['total']:,} in all, "
        f"{space['kept']:,} after pruning.",
    ]
    parts = [*_strategies(model, rows, every_layer=every_layer), Lines(lines), *_kinds(kinds)]
    return Report(
        name,
        about(model),
        parts,
        lambda: as_dict(model, result, name, seconds, tried) | _kinds_values(kinds),
    )


def priced(
    model: CostModel,
    candidate: Candidate,
    baselines: Mapping[str, Candidate],
    name: str,
    *,
    every_layer: bool = False,
    memory: bool = False,
) -> Report:
    """One strategy beside the baselines."""
    rows = [candidate, *baselines.values()]
    kinds = kinds_of(model, rows) if memory else {}
    parts = [*_strategies(model, rows, every_layer=every_layer), *_kinds(kinds)]
    return Report(
        name, about(model), parts, lambda: price_dict(model, candidate, baselines, name) | _kinds_values(kinds)
    )


def _strategies(model: CostModel, rows: Sequence[Candidate], *, every_layer: bool) -> list[Part]:
    best = rows[0]
    return [
        picture(best, model.devices.count),
        strategy_table(model, best, every_layer=every_layer),
        candidates_table(rows, best, model.graph.batch),
    ]


def _kinds(kinds: Mapping[str, Mapping[Kind, float]]) -> list[Part]:
    return [kinds_table(kinds)] if kinds else []


def _kinds_values(kinds: Mapping[str, Mapping[Kind, float]]) -> dict[str, object]:
    return {"memory_by_kind": kinds} if kinds else {}


@described.register
def candidate_parts(candidate: Candidate) -> list[Part]:
    """A strategy in a notebook."""
    devices = max(config.total for config in candidate.strategy.values())
    return [picture(candidate, devices), brief_strategy_table(candidate)]


@described.register
def result_parts(result: SearchResult) -> list[Part]:
    """What was found, in a notebook: the best strategy, and the baselines beside it."""
    missing = [] if result.best.fits else [f"WARNING: {nothing_fits(result)}."]
    table = candidates_table([result.best, *result.baselines.values()], result.best)
    return [*candidate_parts(result.best), table, Lines([*conclusion(result), *missing])]
