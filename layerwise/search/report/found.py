"""The reports of `layerwise search`, as text and values: of a search's result, and of a priced strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from layerwise.cost.model import CostModel
from layerwise.cost.price import LayerPrice, basis, warnings
from layerwise.plan import as_json
from layerwise.quantities import samples, units
from layerwise.report.content import Lines, Part, Report, described
from layerwise.search.remedies import Remedy
from layerwise.search.report.sentences import nothing_fits, verdict, whole_shares
from layerwise.search.report.tables import (
    candidates_table,
    kinds_of,
    kinds_table,
    picture,
    strategy_table,
    time_by_block,
)
from layerwise.search.result import Candidate, SearchResult, error_between


def about(model: CostModel) -> str:
    """A phrase for the machine and the batch."""
    kind = ", inference" if model.options.kind == "inference" else ""
    return f" on {model.devices.names}, {samples(model.graph.batch)} a step{kind}"


def found(
    result: SearchResult,
    name: str,
    seconds: Mapping[str, float],
    *,
    every_layer: bool = False,
    memory: bool = False,
    tried: Sequence[Remedy] = (),
) -> Report:
    """The full report of a search.

    memory: whether to show the fullest device's memory by kind. tried: remedies, if nothing fits.
    """
    space, times = result.configurations, ", ".join(f"{what} {units(value, 's')}" for what, value in seconds.items())
    lines = [
        *verdict(result, tried),
        f"{times}; up to {space['largest']} configurations a layer, {space['total']:,} in all, "
        f"{space['kept']:,} after pruning.",
    ]
    rows = [result.best, *result.baselines.values()]
    values = partial(as_dict, result, name, seconds, tried)
    return _report(name, rows, [Lines(lines)], values, every_layer=every_layer, memory=memory)


def priced(
    candidate: Candidate,
    baselines: Mapping[str, Candidate],
    name: str,
    *,
    every_layer: bool = False,
    memory: bool = False,
) -> Report:
    """One strategy and the baselines."""
    values = partial(price_dict, candidate, baselines, name)
    return _report(name, [candidate, *baselines.values()], [], values, every_layer=every_layer, memory=memory)


def _report(
    name: str,
    rows: Sequence[Candidate],
    lines: Sequence[Part],
    values: Callable[[], dict[str, Any]],
    *,
    every_layer: bool,
    memory: bool,
) -> Report:
    """The first strategy layer by layer, all strategies side by side, lines about them, and their memory."""
    best, kinds = rows[0], kinds_of(rows) if memory else {}
    parts = [
        picture(best),
        strategy_table(best, every_layer=every_layer),
        candidates_table(rows, best),
        *lines,
        *([kinds_table(kinds)] if kinds else []),
    ]
    return Report(name, about(best.model), parts, lambda: values() | ({"memory_by_kind": kinds} if kinds else {}))


@described.register
def candidate_parts(candidate: Candidate) -> list[Part]:
    """A strategy's report in a notebook."""
    return [picture(candidate), time_by_block(candidate)[1], strategy_table(candidate)]


@described.register
def result_parts(result: SearchResult) -> list[Part]:
    """A result's report in a notebook: the best strategy, and the baselines."""
    table = candidates_table([result.best, *result.baselines.values()], result.best)
    return [Lines(list(verdict(result))), table, *candidate_parts(result.best)]


def as_dict(
    result: SearchResult, name: str, seconds: Mapping[str, float], tried: Sequence[Remedy] = ()
) -> dict[str, Any]:
    """Everything as JSON values: seconds and bytes; bytes are a step's, summed over devices; memory is one device's."""
    best, optimum, model = result.best, result.optimum, result.best.model
    return price_dict(best, result.baselines, name) | {
        "gpus_per_node": model.devices.devices_per_node,
        "profile": model.devices.name,
        "io": model.options.io,
        "chosen": best.name,
        "samples_per_s": model.graph.batch / best.timeline.total_s,
        "memory_capacity_bytes": model.devices.processor.memory_bytes,
        "memory_limit_bytes": result.memory_bytes,
        "least_memory_bytes": None if result.least is None else result.least.bytes,
        "least_memory_bound_bytes": None if result.least is None else result.least.lower_bound_bytes,
        "without_limit": None if result.within is None else costs_json(result.unlimited),
        "memory_prices": [] if result.within is None else result.within.prices,
        "whole": whole_shares(best),
        "additive_optimum": {"step_time_s": result.additive.price.step_time_s, **strategy_json(result.additive)},
        "optimal": optimum.proven,
        "lower_bound_s": optimum.lower_bound_s,
        "bucket_bytes": best.bucket_bytes,
        "timeline_by_ddp_buckets_s": result.by_ddp.timeline.total_s,
        "timeline_lower_bound_s": result.overlap_bound_s,
        "timeline_range_s": [best.deviations.low_s, best.deviations.high_s],
        "final_nodes": optimum.final_nodes,
        "elimination_order": list(optimum.order),
        "seconds": dict(seconds),
        "configurations": result.configurations,
        "compute_time": basis(model, best.price).as_dict(),
        "model_error": error_between(result.baselines["data"], result.fastest),
        "fastest": {"name": result.fastest.name, **costs_json(result.fastest), **strategy_json(result.fastest)},
        "simulated": {
            "plans": len(result.simulated),
            "fit": sum(c.fits for c in result.simulated),
            "least_memory_bytes": min(c.price.memory_bytes for c in result.simulated),
        },
        "warnings": [*warnings(model), *([] if best.fits else [nothing_fits(result, tried)])],
        "remedies": tried,
    }


def price_dict(candidate: Candidate, baselines: Mapping[str, Candidate], name: str) -> dict[str, Any]:
    """One priced strategy as JSON values."""
    return {
        "model": name,
        "gpus": candidate.model.devices.count,
        "batch": candidate.model.graph.batch,
        **costs_json(candidate),
        "baselines": {n: costs_json(c) for n, c in baselines.items()},
        **strategy_json(candidate),
        "layers": {n: layer_json(p) for n, p in candidate.price.layers.items()},
    }


def costs_json(candidate: Candidate) -> dict[str, float | bool]:
    """The costs of a strategy. bytes_moved is a step's, summed over devices; memory is one device's."""
    return {
        "step_time_s": candidate.price.step_time_s,
        "timeline_s": candidate.timeline.total_s,
        "bytes_moved": candidate.price.bytes_moved,
        "memory_bytes": candidate.price.memory_bytes,
        "fits": candidate.fits,
    }


def strategy_json(candidate: Candidate) -> dict[str, Any]:
    """`strategy` {layer: {dim: degree}} including degrees of 1, and `placements` that are not contiguous."""
    strategy, placements = dict[str, Any](), {}
    for layer in candidate.model.graph.layers:
        if layer.end:
            continue
        config = candidate.strategy[layer.name]
        labels = [d.label for d in layer.space.dims if d.label and (d.label != "k" or config["k"] > 1)]
        degrees = {label: config[label] for label in labels}
        strategy[layer.name] = degrees | {k: v for k, v in as_json(config).items() if k != "placement"}
        if config.placement == "strided":
            placements[layer.name] = "strided"
    return {"strategy": strategy, "placements": placements}


def layer_json(price: LayerPrice) -> dict[str, float | str]:
    """The terms of one layer, and how it saves memory."""
    seconds = {f"{term}_s": value for term, value in price.seconds.items()}
    sent = {f"{kind}_bytes": value for kind, value in price.bytes.items()}
    rest = {"memory_bytes": price.memory_bytes, "measured_s": price.measured_s, "fitted_s": price.fitted_s}
    return {**seconds, **sent, **rest, "recompute": price.config.recompute, "states": price.config.states}
