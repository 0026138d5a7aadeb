"""The search, in three stages, each a function of plain data.

`price` makes tables of what can be chosen, `choose` eliminates (`choose_within` with a price of memory, if memory is
short), and `improve` makes moves on the simulated step. The plan is the fastest, by simulated step, of the stages'
results and all baselines.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from layerwise.config import Config, SearchSpace
from layerwise.cost.model import Configs, CostModel, CostTables, Progress
from layerwise.cost.price import MEASURED_ERROR, complete
from layerwise.cost.timeline.simulate import timeline
from layerwise.errors import LayerwiseError
from layerwise.partition.buckets import BUCKET_BYTES, CAPS
from layerwise.search.baselines import baselines as named_baselines
from layerwise.search.baselines import configurations
from layerwise.search.overlap import GAIN, Effort, overlapped
from layerwise.search.priced.answers import Least, Within
from layerwise.search.priced.limited import LimitedSearch
from layerwise.search.priced.variants import OFFERS, Forms, Strategy
from layerwise.search.result import Candidate, SearchResult, error_between, preferred
from layerwise.search.solve.eliminate import Optimum
from layerwise.search.solve.narrow import exact_optimum, narrow, strategy_of


@dataclass(frozen=True)
class Priced:
    """What can be chosen, and the tables of what bounds leave."""

    model: CostModel
    space: SearchSpace
    configs: Configs  # of every layer
    free: Mapping[str, dict[str, Config]]  # baselines as usual
    named: Mapping[str, dict[str, Config]]  # baselines with the space's fixed layers
    tables: CostTables  # with lower bounds for transfers
    upper_s: float  # by equation 1, of the best strategy so far
    limit: float  # bytes of a device
    offer: tuple[str, ...]  # of OFFERS: what may save memory
    memory_bytes: float  # of search tables
    additive: bool  # whether the plan is chosen by equation 1 alone
    effort: Effort
    progress: Progress | None = None
    seconds: dict[str, float] = field(default_factory=dict)  # by activity, so far

    def candidate(self, strategy: Strategy, name: str = "layerwise", bucket_bytes: int = BUCKET_BYTES) -> Candidate:
        """A priced strategy."""
        return candidate(self.model, name, strategy, self.limit, bucket_bytes)

    def cap(self, strategy: Strategy) -> int:
        """The bucket size for a strategy: the fastest, unless the search is to be quick."""
        return BUCKET_BYTES if self.effort == "quick" else best_cap(self.model, strategy)

    def took(self, what: str, started: float) -> None:
        """Adds the seconds since `started`."""
        self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - started

    def limited(self, offer: Iterable[str]) -> LimitedSearch:
        """The search under a limit, with these ways to save memory."""
        fixed, memory_bytes = dict(self.space.fixed), self.memory_bytes
        return LimitedSearch(
            self.model, self.configs, offer=offer, fixed=fixed, memory_bytes=memory_bytes, progress=self.progress
        )


def search(
    model: CostModel,
    space: SearchSpace,
    *,
    objective: Literal["timeline", "additive"] = "timeline",
    memory_bytes: float = 2**31,
    memory_limit_bytes: float | None = None,
    offer: Iterable[str] = OFFERS,
    effort: Effort = "normal",
    progress: Progress | None = None,
) -> SearchResult:
    """The best strategy in `space` whose memory in a step is at most `memory_limit_bytes` on every device.

    memory_limit_bytes: default: a device's memory. If it excludes the best strategy, layers may save memory in the ways
    of `offer` (`priced.variants.OFFERS`); if no strategy fits, the answer is the best of all. `memory_bytes` bounds
    search tables. Fixed layers of the space keep their configuration, also in baselines. `effort`: how long to improve
    and bound the best plan by timeline; "quick": not at all.
    """
    limit = _limit(model, space, memory_limit_bytes)
    if space.weights is None:
        space = replace(space, weights=model.weights)
    additive = objective == "additive"
    effort = "quick" if additive else effort
    priced = price(model, space, limit, tuple(offer), memory_bytes, progress, additive=additive, effort=effort)
    known = {name: priced.candidate(s, _title(priced, name)) for name, s in priced.named.items()}
    if not known["data"].timeline.total_s:
        raise LayerwiseError(f"model {model.graph.name!r} only renames its input, so there is nothing to plan")
    chosen = choose(priced, known)
    known, before = tuned(priced, known)
    free = _without_limit(priced, known, chosen, before)
    found = free if free.best.fits else _within_limit(priced, known, free)
    best = next((c for c in known.values() if c.key == found.best.key), found.best)
    sizes = [len(these) for these in priced.configs.values()]
    counts = {"largest": max(sizes), "total": sum(sizes), "kept": found.chosen.kept}
    # Equal strategies are listed once, under a baseline's name if there is one, data parallelism first.
    simulated = tuple({c.key: c for c in [*found.every, *reversed(known.values())]}.values())
    compared = {
        name: known[name] if priced.named[name] == strategy else priced.candidate(strategy, name, priced.cap(strategy))
        for name, strategy in priced.free.items()
    }
    return SearchResult(
        best=best,
        additive=found.chosen.best,
        baselines=compared,
        optimum=found.chosen.optimum,
        seconds=priced.seconds,
        configs=priced.configs,
        configurations=counts,
        simulated=simulated,
        memory_bytes=int(limit),
        offer=priced.offer,
        unlimited=free.best,
        within=found.within,
        least=found.least,
        overlap_bound_s=found.bound_s,
    )


@dataclass(frozen=True, slots=True)
class _Found:
    """The plan that the stages found, without a limit or under it."""

    best: Candidate
    chosen: Chosen
    every: list[Candidate]  # that it was chosen from, beside baselines
    bound_s: float | None  # of all steps with overlap
    within: Within | None = None
    least: Least | None = None


def _without_limit(
    priced: Priced, known: Mapping[str, Candidate], chosen: Chosen, before: Sequence[Candidate]
) -> _Found:
    """The best of all strategies. known: baselines. before: these with other buckets."""
    better, bound_s = improve(priced, [chosen.best, *known.values()], fits=False)
    best = chosen.best if priced.additive else decide([chosen.best, *better], known, heed_memory=False)
    return _Found(best, chosen, [chosen.best, *before, *better], bound_s)


def _within_limit(priced: Priced, known: Mapping[str, Candidate], free: _Found) -> _Found:
    """The best of the strategies that fit, or, if none was found, of all. free: the result without the limit."""
    within, least = choose_within(priced, [c.strategy for c in free.every])
    fitting, chosen = [priced.candidate(strategy) for strategy in within.strategies], free.chosen
    if fitting:
        optimum = replace(chosen.optimum, cost_s=within.cost_s, lower_bound_s=within.lower_bound_s)
        chosen = Chosen(fitting[0], optimum, within.configurations)
    every = [*fitting, *free.every]
    better, bound_s = improve(priced, [c for c in [*every, *known.values()] if c.fits], fits=True)
    every += better
    best = chosen.best if priced.additive else decide(every, known)
    return _Found(best, chosen, every, bound_s, within, least)


def price(
    model: CostModel,
    space: SearchSpace,
    limit: float,
    offer: tuple[str, ...],
    memory_bytes: float,
    progress: Progress | None,
    *,
    additive: bool,
    effort: Effort,
) -> Priced:
    """The first stage: the configurations of every layer, and tables of what bounds leave."""
    started, fixed = time.perf_counter(), dict(space.fixed)
    free = named_baselines(model, space)
    named = {name: strategy | fixed for name, strategy in free.items()}
    model.learn(list(named.values()))
    configs = configurations(model, space, named)
    tables, upper_s = narrow(model, configs, list(named.values()), progress)
    priced = Priced(
        model=model,
        space=space,
        configs=configs,
        free=free,
        named=named,
        tables=tables,
        upper_s=upper_s,
        limit=limit,
        offer=offer,
        memory_bytes=memory_bytes,
        additive=additive,
        effort="quick" if all(len(these) == 1 for these in configs.values()) else effort,
        progress=progress,
    )
    priced.took("tables", started)
    return priced


@dataclass(frozen=True, slots=True)
class Chosen:
    """The result of elimination: the best by equation 1, and its proof."""

    best: Candidate
    optimum: Optimum
    kept: int  # configurations left after bounds, of all layers


def choose(priced: Priced, known: Mapping[str, Candidate]) -> Chosen:
    """The second stage: the optimum of equation 1, without a memory limit. known: baselines, which
    may be the optimum.
    """
    started = time.perf_counter()
    small, optimum = exact_optimum(priced.model, priced.tables, priced.upper_s, priced.memory_bytes)
    priced.took("search", started)
    best = priced.candidate(strategy_of(small.configs, optimum.choice))
    if not optimum.proven:  # a baseline may be better than elimination's result
        best = min([best, *known.values()], key=lambda c: c.price.step_time_s)
        optimum = replace(optimum, cost_s=min(optimum.cost_s, best.price.step_time_s))
    return Chosen(best, optimum, sum(map(len, priced.tables.configs.values())))


def choose_within(priced: Priced, known: Sequence[Strategy]) -> tuple[Within, Least | None]:
    """The second stage if memory is short: the strategies that fit, or, if none was found, the least memory.

    known: strategies to begin with, beside the baselines.
    """
    started, limit, offer = time.perf_counter(), priced.limit, priced.offer
    known = [*known, *priced.named.values()]
    searching, least = priced.limited(offer), None
    within = searching.under(limit, known)
    if not within.strategies:
        least = searching.least(known, limit)
        for one in offer if len(offer) > 1 else ():  # a smaller space is searched more closely
            if least.lower_bound_bytes <= limit < least.bytes:
                fewer = priced.limited([one]).least(known, limit)
                least = replace(least, best=fewer.best, bytes=fewer.bytes) if fewer.bytes < least.bytes else least
        if least.bytes <= limit:
            within, least = searching.under(limit, [*known, least.best]), None
    priced.took("limit", started)
    return within, least


def tuned(priced: Priced, known: Mapping[str, Candidate]) -> tuple[dict[str, Candidate], list[Candidate]]:
    """Baselines with the bucket size that is fastest for each, and those that had another size before."""
    sizes = {name: priced.cap(c.strategy) for name, c in known.items()}
    other = [name for name, c in known.items() if sizes[name] != c.bucket_bytes]
    better = {name: priced.candidate(known[name].strategy, known[name].name, sizes[name]) for name in other}
    before = [replace(known[name], name=f"{known[name].name} in DistributedDataParallel's buckets") for name in other]
    return {**known, **better}, before


def improve(priced: Priced, known: Sequence[Candidate], *, fits: bool) -> tuple[list[Candidate], float | None]:
    """The third stage: the strategies that moves on the simulated step reach, with the best buckets, and a bound of
    all.

    known: the moves' starting points. fits: consider only strategies that fit into memory.
    """
    if priced.effort == "quick" or not known:
        return [], None
    started, model, known = time.perf_counter(), priced.model, sorted(known, key=lambda c: c.timeline.total_s)
    cap = best_cap(model, known[0].strategy)
    strategies, bound_s = overlapped(
        model,
        priced.configs,
        [c.strategy for c in known],
        lambda strategy: timeline(model, strategy, bucket_bytes=cap).total_s,
        Forms.of(model.graph, model.devices.count, priced.offer, dict(priced.space.fixed)) if fits else None,
        effort=priced.effort,
        limit=priced.limit if fits else float("inf"),
        memory_bytes=priced.memory_bytes,
    )
    found = [
        priced.candidate(strategy, bucket_bytes=size)
        for strategy in strategies
        for size in dict.fromkeys((BUCKET_BYTES, best_cap(model, strategy)))
    ]
    priced.took("overlap", started)
    return found, None if model.devices.kinds else bound_s or None  # the bound is for equal devices


def _title(priced: Priced, name: str) -> str:
    return name if priced.free[name] == priced.named[name] else f"{name}, but for fixed layers"


def _limit(model: CostModel, space: SearchSpace, memory_limit_bytes: float | None) -> float:
    """The bytes of a device that a step may use. Raises LayerwiseError if the arguments do not fit together."""
    limit = float(model.devices.processor.memory_bytes if memory_limit_bytes is None else memory_limit_bytes)
    if not limit > 0:
        raise LayerwiseError(f"the memory limit is {memory_limit_bytes}, but must be a number of bytes above 0")
    if space.devices != model.devices.count:
        raise LayerwiseError(
            f"the space is for {space.devices} devices, but the device graph has {model.devices.count}"
        )
    if unknown := sorted(dict(space.fixed).keys() - {layer.name for layer in model.graph.inner}):
        raise LayerwiseError(f"fixed layer {unknown[0]!r} is not in the model")
    return limit


def decide(optima: Sequence[Candidate], baselines: Mapping[str, Candidate], *, heed_memory: bool = True) -> Candidate:
    """The best by `preferred`; data parallelism if the gain over it is within the model's error."""
    everyone = [baselines["data"], *optima, *(c for name, c in baselines.items() if name != "data")]
    best = preferred(everyone) if heed_memory else min(everyone, key=lambda c: c.timeline.total_s)
    data = baselines["data"]
    if best is data or (heed_memory and data.fits != best.fits):
        return best
    best_s, data_s = best.timeline.total_s, data.timeline.total_s
    if best_s >= data_s * (1 - MEASURED_ERROR):  # no error is smaller
        return data
    return data if best_s >= data_s * (1 - error_between(data, best)) else best


def best_cap(model: CostModel, strategy: Strategy) -> int:
    """The bytes of a full gradient bucket: DistributedDataParallel's 25 MiB, unless smaller ones are faster.

    Strategies with sharded states keep 25 MiB: their memory is that of such buckets.
    """
    best, least_s = BUCKET_BYTES, timeline(model, strategy).total_s
    shares = any(config.states != "replicated" for config in strategy.values())
    for cap in () if shares or model.options.kind == "inference" else CAPS[1:]:
        if (step_s := timeline(model, strategy, bucket_bytes=cap).total_s) < least_s * (1 - GAIN):
            best, least_s = cap, step_s
    return best


def candidate(
    model: CostModel,
    name: str,
    strategy: Mapping[str, Config],
    memory_limit_bytes: float | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Candidate:
    """Prices a strategy both ways. memory_limit_bytes: default: a device's memory."""
    strategy = complete(model, strategy)
    limit = model.devices.processor.memory_bytes if memory_limit_bytes is None else memory_limit_bytes
    step = timeline(model, strategy, bucket_bytes=bucket_bytes)
    return Candidate(name, strategy, step, model, limit, bucket_bytes)
