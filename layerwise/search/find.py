"""The search: prune, build the tables, eliminate, and improve the step with overlap, and choose by it among what
was found and all baselines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import filterfalse
from typing import Literal

from layerwise.config import Config, SearchSpace
from layerwise.cost.memory.step import peak_bytes
from layerwise.cost.model import Configs, CostModel, Progress
from layerwise.cost.price import MEASURED_ERROR, complete
from layerwise.cost.timeline.simulate import timeline
from layerwise.errors import LayerwiseError
from layerwise.partition.buckets import BUCKET_BYTES, CAPS
from layerwise.partition.sharding import held_configurations
from layerwise.search.baselines import baselines as named_baselines
from layerwise.search.baselines import cuts_classes, of_all_classes
from layerwise.search.limit.limited import Least
from layerwise.search.limit.variants import OFFERS, Forms, Strategy, Variants
from layerwise.search.limit.within import LimitedSearch, Within
from layerwise.search.overlap.polish import GAIN, Effort, overlapped
from layerwise.search.result import Candidate, SearchResult, preferred, timeline_s
from layerwise.search.solve.eliminate import Optimum
from layerwise.search.solve.narrow import exact_optimum, narrow, strategy_of


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
    """The best strategy over `space` of which a step's memory is at most `memory_limit_bytes` on every device.

    memory_limit_bytes: by default what a device has. Where it leaves the best strategy out, what is offered (of
    `limit.variants.OFFERS`) may save memory, layer by layer; where no strategy fits, the answer is the best of all.
    `memory_bytes` bounds search tables. Fixed layers of the space keep their configuration, also in baselines.
    `effort` is how long the best by timeline is improved, and bounded; "quick": not at all.
    """
    limit, fixed = _limit(model, space, memory_limit_bytes), dict(space.fixed)
    started = time.perf_counter()
    free = named_baselines(model, space)
    named = {name: strategy | fixed for name, strategy in free.items()}
    model.learn(list(named.values()))
    configs, hand = configurations(model, space, named), list(named.values())
    solved = _solved(model, configs, hand, memory_bytes, progress, started)
    pool = _Pool(
        model,
        limit,
        tuple(offer),
        effort,
        memory_bytes,
        baselines={
            name: candidate(model, name if free[name] == strategy else f"{name}, but for fixed layers", strategy, limit)
            for name, strategy in named.items()
        },
        found=[candidate(model, "layerwise", solved.strategy, limit)],
        seconds=dict(solved.seconds),
    )
    if not pool.baselines["data"].timeline.total_s:
        raise LayerwiseError(f"model {model.graph.name!r} only renames its input, which takes no time: nothing to plan")
    additive, optimum = pool.found[0], solved.optimum
    if not optimum.proven:  # a baseline may be better than what the search came to
        additive = min(pool.everyone, key=lambda c: c.price.step_time_s)
        optimum = replace(optimum, cost_s=min(optimum.cost_s, additive.price.step_time_s))
    by_time = objective == "timeline"
    chosen = any(len(these) > 1 for these in configs.values())  # else all layers are fixed
    improves, bound_s = by_time and chosen and effort != "quick", None
    if improves:  # also where none of them fits: what the limit costs is told of the best without it
        bound_s = pool.improve(Variants.grouped(configs), pool.everyone, fits=False)
    unlimited = best = choose(pool.found, pool.baselines, heed_memory=False) if by_time else additive
    kept, within, least = solved.kept, None, None
    if not best.fits:
        searching = partial(LimitedSearch, model, configs, fixed=fixed, memory_bytes=memory_bytes, progress=progress)
        within, least = pool.search_under_limit(searching, hand)
        kept = within.configurations
        if within.strategies:
            additive = pool.found[0]  # by step time
            optimum = replace(optimum, cost_s=within.cost_s, lower_bound_s=within.lower_bound_s)
        if improves:
            fitting = [c for c in pool.everyone if c.fits]
            forms = Forms.of(model.graph, model.devices.count, pool.offer)
            bound_s = pool.improve(Variants.of(configs, forms), fitting, fits=True) if fitting else None
        best = choose(pool.found, pool.baselines) if by_time else additive
    best = next((c for c in pool.baselines.values() if c.key == best.key), best)
    sizes = [len(these) for these in configs.values()]
    counts = {"largest": max(sizes), "total": sum(sizes), "kept": kept}
    # Equal strategies are listed once, under a baseline's name where one is equal: data parallelism's before others.
    simulated = tuple({c.key: c for c in [*pool.found, *reversed(pool.baselines.values())]}.values())
    # What people would do without fixed layers.
    compared = {
        name: pool.baselines[name] if named[name] == strategy else candidate(model, name, strategy, limit)
        for name, strategy in free.items()
    }
    return SearchResult(
        best, additive, compared, optimum, pool.seconds, counts, simulated, int(limit), pool.offer, unlimited,
        within, least, bound_s,
    )  # fmt: skip


def _limit(model: CostModel, space: SearchSpace, memory_limit_bytes: float | None) -> float:
    """Bytes of a device that a step may take. LayerwiseError where what is asked for does not fit together."""
    limit = float(model.devices.processor.memory_bytes if memory_limit_bytes is None else memory_limit_bytes)
    if not limit > 0:
        raise LayerwiseError(f"a memory limit is a number of bytes above 0, not {memory_limit_bytes}")
    if space.devices != model.devices.count:
        raise LayerwiseError(f"the space is for {space.devices} devices, the device graph has {model.devices.count}")
    if unknown := sorted(dict(space.fixed).keys() - {layer.name for layer in model.graph.inner}):
        raise LayerwiseError(f"fixed layer {unknown[0]!r} is not in the model")
    return limit


@dataclass(frozen=True, slots=True)
class Solved:
    """The optimum without a memory limit: a strategy, and its proof."""

    strategy: dict[str, Config]
    optimum: Optimum
    kept: int  # configurations that were left after pruning, of all layers
    seconds: Mapping[str, float]


@dataclass
class _Pool:
    """The strategies among which a search chooses, simulated: those that it has found, and the baselines."""

    model: CostModel
    limit: float  # bytes of a device
    offer: tuple[str, ...]
    effort: Effort
    memory_bytes: float  # of search tables
    baselines: dict[str, Candidate]
    found: list[Candidate]
    seconds: dict[str, float]  # by what was done

    @property
    def everyone(self) -> list[Candidate]:
        return [*self.found, *self.baselines.values()]

    def improve(self, space: Variants, known: Sequence[Candidate], *, fits: bool) -> float | None:
        """Adds what moves come to, with the best buckets. Returns the lower bound of all steps, if any."""
        model, started, known = self.model, time.perf_counter(), sorted(known, key=timeline_s)
        cap = best_cap(model, known[0].strategy)

        def step_s(strategy: Strategy) -> float:
            return timeline(model, strategy, bucket_bytes=cap).total_s

        def within_limit(strategy: Strategy) -> bool:
            return not fits or float(peak_bytes(model, strategy).max()) <= self.limit

        strategies = [c.strategy for c in known]
        better = overlapped(
            model, space, strategies, step_s, effort=self.effort, fits=within_limit, memory_bytes=self.memory_bytes
        )
        for strategy in (*better.strategies, self.baselines["data"].strategy):
            for size in dict.fromkeys((BUCKET_BYTES, best_cap(model, strategy))):
                self.found.append(candidate(model, "layerwise", strategy, self.limit, size))
        self.seconds["overlap"] = self.seconds.get("overlap", 0.0) + time.perf_counter() - started
        return better.lower_bound_s or None

    def search_under_limit(
        self, searching: Callable[..., LimitedSearch], hand: Sequence[Strategy]
    ) -> tuple[Within, Least[Strategy] | None]:
        """Puts what fits first. hand: strategies to begin with, beside those that were found."""
        started, begin = time.perf_counter(), [c.strategy for c in self.found] + list(hand)
        within, least = _limited(searching, self.offer, self.limit, begin)
        fitting = [candidate(self.model, "layerwise", strategy, self.limit) for strategy in within.strategies]
        self.found = [*fitting, *self.found]
        self.seconds["limit"] = time.perf_counter() - started
        return within, least


def _solved(
    model: CostModel,
    configs: Configs,
    hand: Sequence[Mapping[str, Config]],
    memory_bytes: float,
    progress: Progress | None,
    started: float,
) -> Solved:
    """The optimum without a memory limit. started: when, for the seconds that tables took."""
    narrowed = narrow(model, configs, hand, progress)
    tables, built = narrowed.tables, time.perf_counter()
    small, found = exact_optimum(model, tables, narrowed.upper_s, memory_bytes)
    searching = time.perf_counter() - built + narrowed.bounding_s
    seconds = {"tables": built - started - narrowed.bounding_s, "search": searching}
    return Solved(strategy_of(small.configs, found.choice), found, sum(map(len, tables.configs.values())), seconds)


def _limited(
    searching: Callable[..., LimitedSearch],
    offer: Sequence[str],
    limit: float,
    known: Sequence[Mapping[str, Config]],
) -> tuple[Within, Least[Strategy] | None]:
    """The strategies that fit; where none was found, the least memory, and what fits if that does."""
    search = searching(offer=offer)
    within = search.under(limit, known)
    if within.strategies:
        return within, None
    least = search.least(known)
    for one in offer if len(offer) > 1 else ():  # a smaller space is searched more closely
        if least.lower_bound_bytes <= limit < least.bytes:
            smaller = searching(offer=[one])
            fewer = smaller.least(known)
            least = replace(least, best=fewer.best, bytes=fewer.bytes) if fewer.bytes < least.bytes else least
            known = [*known, *smaller.under(limit, [fewer.best]).strategies]
    if least.bytes <= limit:
        return search.under(limit, [*known, least.best]), None
    return within, least


def choose(optima: Sequence[Candidate], baselines: Mapping[str, Candidate], *, heed_memory: bool = True) -> Candidate:
    """The best by `preferred`; data parallelism where that gains no more than the model's error."""
    everyone = [baselines["data"], *optima, *(c for name, c in baselines.items() if name != "data")]
    best = preferred(everyone) if heed_memory else min(everyone, key=timeline_s)
    data = baselines["data"]
    if best is data or (heed_memory and data.fits != best.fits):
        return best
    best_s, data_s = timeline_s(best), timeline_s(data)
    if best_s >= data_s * (1 - MEASURED_ERROR):  # no error is less
        return data
    return data if best_s >= data_s * (1 - max(data.error, best.error)) else best


def best_cap(model: CostModel, strategy: Strategy) -> int:
    """At how many bytes a bucket of gradients is best full: DistributedDataParallel's 25 MiB, unless less gains by it.

    What shares states out keeps these: their memory is that of such buckets.
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
    """Prices a strategy both ways. memory_limit_bytes: by default what a device has."""
    strategy = complete(model, strategy)
    limit = model.devices.processor.memory_bytes if memory_limit_bytes is None else memory_limit_bytes
    step = timeline(model, strategy, bucket_bytes=bucket_bytes)
    return Candidate(name, strategy, step, model, limit, bucket_bytes)


def configurations(
    model: CostModel, space: SearchSpace, named: Mapping[str, Mapping[str, Config]]
) -> dict[str, tuple[Config, ...]]:
    """The configurations of every layer: the space, and what a baseline uses; one for inputs, sink, fixed layers."""
    result, fixed = dict[str, tuple[Config, ...]](), dict(space.fixed)
    of_kind: dict[int, tuple[Config, ...]] = {}
    whole = of_all_classes(model)
    if model.graph.batch < space.replicas:
        batch = model.graph.batch
        raise LayerwiseError(f"a batch of {batch} does not give each of {space.replicas} replicas a sample")
    for layer in model.graph.layers:
        if layer.end:
            result[layer.name] = (model.end_config(layer),)
        elif layer.name in fixed:
            space.check(fixed[layer.name], layer.space.dims, layer.name)
            result[layer.name] = (fixed[layer.name],)
        else:
            kind = model.kind(layer)
            if kind not in of_kind:
                of_kind[kind] = held_configurations(layer, space)
            known = of_kind[kind]
            if layer.name in whole:
                known = tuple(config for config in known if not cuts_classes(layer, config))
            extra = dict.fromkeys(s[layer.name] for s in named.values())
            result[layer.name] = known + tuple(filterfalse(frozenset(known).__contains__, extra))
    return result
