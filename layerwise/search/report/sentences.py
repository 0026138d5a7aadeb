"""What is said below the tables of a search: what is proven, what was chosen and why, what to beware of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from layerwise.cost.basis import basis, describe, warnings
from layerwise.cost.model import CostModel
from layerwise.quantities import units
from layerwise.search.remedies import Remedy
from layerwise.search.report.limit import limit_lines, nothing_fits, reserve_lines
from layerwise.search.result import Candidate, SearchResult, timeline_s


def conclusion(result: SearchResult) -> Iterator[str]:
    """What is proven, what was chosen and why."""
    optimum, best = result.optimum, result.best
    cost = units(result.additive.price.step_time_s, "s")
    limited = "" if result.within is None or not best.fits else f" that fits into {units(result.memory_bytes, 'B')}"
    if optimum.proven:
        yield (
            f"optimal: proven. No strategy of the space{limited} has a step time below {cost}; "
            f"K = {optimum.final_nodes}."
        )
    else:
        gap = result.additive.price.step_time_s / optimum.lower_bound_s - 1
        yield (
            f"NOT proven optimal: found {cost}, lower bound {units(optimum.lower_bound_s, 's')}, gap {gap:.1%} "
            f"(K = {optimum.final_nodes}; more --search-memory may close it)."
        )
    data = result.baselines["data"]
    slower = best.timeline.total_s / data.timeline.total_s
    if not best.fits:
        pass  # below
    elif slower > 1:  # --objective additive, or data parallelism needs too much memory
        why = "" if data.fits else ", but does not fit into memory"
        yield f"With overlap, data parallelism is predicted {slower:.2f}× faster{why}."
    elif best.key == data.key:
        yield f"Data parallelism is {why_data(result)}."
    elif best.strategy != result.additive.strategy:
        why = ", but does not fit into memory" if best.fits and not result.additive.fits else ""
        yield (
            f"Chosen with overlap: {units(best.timeline.total_s, 's')} a step; the additive optimum would take "
            f"{units(result.additive.timeline.total_s, 's')}{why}."
        )
    yield from overlap_lines(result)
    yield from limit_lines(result)
    yield from halo_lines(result)


def overlap_lines(result: SearchResult) -> Iterator[str]:
    """How far the chosen step with overlap is at most from the best."""
    if (bound_s := result.overlap_bound_s) and result.best.fits:
        step_s = timeline_s(result.best)
        gap = step_s / bound_s - 1
        found, least = units(step_s, "s"), units(bound_s, "s")
        if (ddp := result.by_ddp) is not result.best:
            size = f"{result.best.bucket_bytes / 2**20:.0f} MiB"
            slower = units(timeline_s(ddp), "s")
            yield f"Gradients travel in buckets of {size}; in those of DistributedDataParallel a step takes {slower}."
        yield f"With overlap: {found}; no strategy of the space is below {least} ({gap:.1%})."


def verdict(model: CostModel, result: SearchResult, tried: Sequence[Remedy] = ()) -> Iterator[str]:
    """All lines below the tables. tried: what would make a plan fit, where none does."""
    data, best = result.baselines["data"], result.best
    yield from conclusion(result)
    yield from reserve_lines(model, result)
    yield from whole_lines(model, best)
    yield describe(model, basis(model, best.price))
    yield from warnings(model)
    statistics = sum(p.seconds["statistics"] for p in data.price.layers.values()) / data.price.step_time_s
    if statistics > 0.05:
        yield (
            f"{statistics:.0%} of data parallelism's step time are batch norm statistics of the whole batch, which all "
            "strategies here pay; DistributedDataParallel does not: --local-batch-norm prices it so."
        )
    if not best.fits:
        yield f"WARNING: {nothing_fits(result, tried)}."


def why_data(result: SearchResult) -> str:
    """Why data parallelism was taken: what it was compared with, and how much less time that takes."""
    data, fastest = result.baselines["data"], result.fastest
    if result.configurations["largest"] == 1:
        return "the only plan there is"
    if fastest.fits and not data.fits:  # --objective additive, which knows nothing of memory
        return "the best by step time"
    less = 1 - fastest.timeline.total_s / data.timeline.total_s
    if less <= 0:
        large = data.fits and any(c.timeline.total_s < data.timeline.total_s for c in result.simulated)
        among = "that was simulated and fits into memory" if large else "that was simulated"
        return f"{'the best here' if data.fits else 'shown'}: nothing {among} is predicted faster"
    error = max(data.error, fastest.error)
    if less > error:  # --objective additive
        return (
            f"the best by step time; with overlap a plan that was simulated is predicted to take {less:.1%} less time"
        )
    gain = f"the fastest plan found is predicted {1 / (1 - less):.4g}× as fast ({less:.1%} less time)"
    return f"kept: {gain}, within the model's error ({100 * error:.2g}%)"


def halo_lines(result: SearchResult) -> Iterator[str]:
    """Whether halos of inputs are read or sent, and what either costs."""
    if (halos := result.halos) is not None:
        chosen = "sent" if halos.sent else "read by each device that needs them"
        yield (
            f"Halos of {', '.join(halos.inputs)} are {chosen}: with reading, a step takes {units(halos.read_s, 's')} "
            f"where they are read ({units(halos.read_bytes, 'B')} by the busiest device), {units(halos.sent_s, 's')} "
            f"where they are sent ({units(halos.sent_bytes, 'B')})."
        )


def whole_shares(model: CostModel, candidate: Candidate) -> dict[str, float]:
    """Their names, and the share of the step time that each takes, with what travels to it."""
    price = candidate.price
    return {
        layer.name: price.layers[layer.name].total_s / price.step_time_s if price.step_time_s else 0.0
        for layer in model.graph.inner
        if layer.whole
    }


def whole_lines(model: CostModel, candidate: Candidate) -> Iterator[str]:
    """One sentence, where there are some."""
    shares = whole_shares(model, candidate)
    if shares and model.devices.count > 1:
        named = (f"{name} ({model.graph[name].stages[0].label}), {share:.0%}" for name, share in shares.items())
        yield f"Whole (not split), with their share of the step: {'; '.join(named)}."
