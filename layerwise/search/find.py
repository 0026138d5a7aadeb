"""The search, in three stages, each a function of plain data: tables of what can be chosen (`price`), elimination
(`choose`; for a price of memory where that is short, `choose_within`), and moves on the simulated step (`improve`).

The plan is the fastest by simulated step of what the stages found and of all baselines.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import filterfalse
from typing import Literal

from layerwise.config import Config, SearchSpace
from layerwise.cost.memory.step import fullest_bytes
from layerwise.cost.model import Configs, CostModel, Progress
from layerwise.cost.price import MEASURED_ERROR, complete
from layerwise.cost.timeline.simulate import timeline
from layerwise.errors import LayerwiseError
from layerwise.partition.buckets import BUCKET_BYTES, CAPS
from layerwise.partition.sharding import held_configurations
from layerwise.search.baselines import baselines as named_baselines
from layerwise.search.baselines import cuts_classes, of_all_classes
from layerwise.search.overlap.polish import GAIN, Effort, overlapped
from layerwise.search.priced.answers import Least, Within
from layerwise.search.priced.limited import LimitedSearch
from layerwise.search.priced.variants import OFFERS, Forms, Strategy, Variants
from layerwise.search.result import Candidate, SearchResult, error_between, preferred, timeline_s
from layerwise.search.solve.eliminate import Optimum
from layerwise.search.solve.narrow import Narrowed, exact_optimum, narrow, strategy_of


@dataclass(frozen=True)
class Priced:
    """What can be chosen, and the tables of what bounds leave of it."""

    model: CostModel
    space: SearchSpace
    configs: Configs  # of every layer
    free: Mapping[str, dict[str, Config]]  # baselines, as people have them
    named: Mapping[str, dict[str, Config]]  # and with the space's fixed layers
    narrowed: Narrowed
    limit: float  # bytes of a device
    offer: tuple[str, ...]  # of OFFERS: what may save memory
    memory_bytes: float  # of search tables
    progress: Progress | None = None
    seconds: dict[str, float] = field(default_factory=dict)  # by what was done, as far as it was

    def candidate(self, strategy: Strategy, name: str = "layerwise", bucket_bytes: int = BUCKET_BYTES) -> Candidate:
        """A strategy, priced."""
        return candidate(self.model, name, strategy, self.limit, bucket_bytes)

    def took(self, what: str, started: float) -> None:
        """Adds the seconds since `started`."""
        self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - started

    def limited(self, offer: Iterable[str]) -> LimitedSearch:
        """The search under a limit, with these that may save memory."""
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
    """The best strategy over `space` of which a step's memory is at most `memory_limit_bytes` on every device.

    memory_limit_bytes: by default what a device has. Where it leaves the best strategy out, what is offered (of
    `priced.variants.OFFERS`) may save memory, layer by layer; where no strategy fits, the answer is the best of all.
    `memory_bytes` bounds search tables. Fixed layers of the space keep their configuration, also in baselines.
    `effort` is how long the best by timeline is improved, and bounded; "quick": not at all.
    """
    limit = _limit(model, space, memory_limit_bytes)
    if space.weights is None:
        space = replace(space, weights=model.weights)
    priced = price(model, space, limit, tuple(offer), memory_bytes, progress)
    known = {name: priced.candidate(s, _title(priced, name)) for name, s in priced.named.items()}
    if not known["data"].timeline.total_s:
        raise LayerwiseError(f"model {model.graph.name!r} only renames its input, which takes no time: nothing to plan")
    chosen = choose(priced, known)
    if objective == "additive" or all(len(these) == 1 for these in priced.configs.values()):
        effort = "quick"
    known, untuned = tuned(priced, known) if effort != "quick" else (known, [])
    found, bound_s = improve(priced, effort, [chosen.best, *known.values()], fits=False)
    unlimited = best = (
        chosen.best if objective == "additive" else decide([chosen.best, *found], known, heed_memory=False)
    )
    within, least, every = None, None, [chosen.best, *untuned, *found]
    if not best.fits:
        within, least = choose_within(priced, [c.strategy for c in every])
        fitting = [priced.candidate(strategy) for strategy in within.strategies]
        if fitting:
            optimum = replace(chosen.optimum, cost_s=within.cost_s, lower_bound_s=within.lower_bound_s)
            chosen = Chosen(fitting[0], optimum, within.configurations)
        every = [*fitting, *every]
        begin = [c for c in [*every, *known.values()] if c.fits]
        found, bound_s = improve(priced, effort, begin, fits=True) if begin else ([], None)
        every += found
        best = chosen.best if objective == "additive" else decide(every, known)
    best = next((c for c in known.values() if c.key == best.key), best)
    sizes = [len(these) for these in priced.configs.values()]
    counts = {"largest": max(sizes), "total": sum(sizes), "kept": chosen.kept}
    # Equal strategies are listed once, under a baseline's name where one is equal: data parallelism's before others.
    simulated = tuple({c.key: c for c in [*every, *reversed(known.values())]}.values())
    compared = {
        name: known[name]
        if priced.named[name] == strategy
        else priced.candidate(strategy, name, BUCKET_BYTES if effort == "quick" else best_cap(model, strategy))
        for name, strategy in priced.free.items()
    }
    return SearchResult(
        best=best,
        additive=chosen.best,
        baselines=compared,
        optimum=chosen.optimum,
        seconds=priced.seconds,
        configs=priced.configs,
        configurations=counts,
        simulated=simulated,
        memory_bytes=int(limit),
        offer=priced.offer,
        unlimited=unlimited,
        within=within,
        least=least,
        overlap_bound_s=bound_s,
    )


def price(
    model: CostModel,
    space: SearchSpace,
    limit: float,
    offer: tuple[str, ...],
    memory_bytes: float = 2**31,
    progress: Progress | None = None,
) -> Priced:
    """The first stage: what every layer can be, and tables of what bounds leave of it."""
    started, fixed = time.perf_counter(), dict(space.fixed)
    free = named_baselines(model, space)
    named = {name: strategy | fixed for name, strategy in free.items()}
    model.learn(list(named.values()))
    configs = configurations(model, space, named)
    narrowed = narrow(model, configs, list(named.values()), progress)
    priced = Priced(model, space, configs, free, named, narrowed, limit, offer, memory_bytes, progress)
    priced.seconds["tables"] = time.perf_counter() - started - narrowed.bounding_s
    priced.seconds["search"] = narrowed.bounding_s
    return priced


@dataclass(frozen=True, slots=True)
class Chosen:
    """What elimination chose: the best by equation 1, and its proof."""

    best: Candidate
    optimum: Optimum
    kept: int  # configurations that were left after bounds, of all layers


def choose(priced: Priced, known: Mapping[str, Candidate]) -> Chosen:
    """The second stage: the optimum of equation 1, whatever memory it needs. known: baselines, which it may be."""
    started, narrowed = time.perf_counter(), priced.narrowed
    small, optimum = exact_optimum(priced.model, narrowed.tables, narrowed.upper_s, priced.memory_bytes)
    priced.took("search", started)
    best = priced.candidate(strategy_of(small.configs, optimum.choice))
    if not optimum.proven:  # a baseline may be better than what elimination came to
        best = min([best, *known.values()], key=lambda c: c.price.step_time_s)
        optimum = replace(optimum, cost_s=min(optimum.cost_s, best.price.step_time_s))
    return Chosen(best, optimum, sum(map(len, narrowed.tables.configs.values())))


def choose_within(priced: Priced, known: Sequence[Strategy]) -> tuple[Within, Least | None]:
    """The second stage where memory is short: the strategies that fit; where none was found, the least memory.

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
    """Baselines in the buckets that each is fastest with, as what is found has; and those that had others before."""
    sizes = {name: best_cap(priced.model, c.strategy) for name, c in known.items()}
    other = [name for name, c in known.items() if sizes[name] != c.bucket_bytes]
    better = {name: priced.candidate(known[name].strategy, known[name].name, sizes[name]) for name in other}
    before = [replace(known[name], name=f"{known[name].name} in DistributedDataParallel's buckets") for name in other]
    return {**known, **better}, before


def improve(
    priced: Priced, effort: Effort, known: Sequence[Candidate], *, fits: bool
) -> tuple[list[Candidate], float | None]:
    """The third stage: what moves on the simulated step come to, with the best buckets, and a bound of all steps.

    known: what moves begin with. fits: only what fits into memory is looked for.
    """
    if effort == "quick":
        return [], None
    started, model, known = time.perf_counter(), priced.model, sorted(known, key=timeline_s)
    cap = best_cap(model, known[0].strategy)
    forms = Forms.of(model.graph, model.devices.count, priced.offer, dict(priced.space.fixed))
    saved = replace(forms, offered=tuple(form for form in forms.offered if not form[0]))
    better = overlapped(
        model,
        Variants.of(priced.configs, saved) if fits else Variants.grouped(priced.configs),
        [c.strategy for c in known],
        lambda strategy: timeline(model, strategy, bucket_bytes=cap).total_s,
        forms if fits and "recompute" in priced.offer else None,
        effort=effort,
        fits=lambda strategy: not fits or fullest_bytes(model, strategy) <= priced.limit,
        memory_bytes=priced.memory_bytes,
    )
    found = [
        priced.candidate(strategy, bucket_bytes=size)
        for strategy in better.strategies
        for size in dict.fromkeys((BUCKET_BYTES, best_cap(model, strategy)))
    ]
    priced.took("overlap", started)
    return found, None if model.devices.kinds else better.lower_bound_s or None  # a bound of equal devices' steps


def _title(priced: Priced, name: str) -> str:
    return name if priced.free[name] == priced.named[name] else f"{name}, but for fixed layers"


def _limit(model: CostModel, space: SearchSpace, memory_limit_bytes: float | None) -> float:
    """Bytes of a device that a step may take. Raises LayerwiseError if what is asked for does not fit together."""
    limit = float(model.devices.processor.memory_bytes if memory_limit_bytes is None else memory_limit_bytes)
    if not limit > 0:
        raise LayerwiseError(f"a memory limit is a number of bytes above 0, not {memory_limit_bytes}")
    if space.devices != model.devices.count:
        raise LayerwiseError(f"the space is for {space.devices} devices, the device graph has {model.devices.count}")
    if unknown := sorted(dict(space.fixed).keys() - {layer.name for layer in model.graph.inner}):
        raise LayerwiseError(f"fixed layer {unknown[0]!r} is not in the model")
    return limit


def decide(optima: Sequence[Candidate], baselines: Mapping[str, Candidate], *, heed_memory: bool = True) -> Candidate:
    """The best by `preferred`; data parallelism where that gains no more than the model's error."""
    everyone = [baselines["data"], *optima, *(c for name, c in baselines.items() if name != "data")]
    best = preferred(everyone) if heed_memory else min(everyone, key=timeline_s)
    data = baselines["data"]
    if best is data or (heed_memory and data.fits != best.fits):
        return best
    best_s, data_s = timeline_s(best), timeline_s(data)
    if best_s >= data_s * (1 - MEASURED_ERROR):  # no error is less
        return data
    return data if best_s >= data_s * (1 - error_between(data, best)) else best


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
