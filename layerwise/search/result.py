"""The result of a search: plans with their predicted costs, and the proof."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import exp, hypot

from layerwise.config import Config
from layerwise.cost.memory.step import fullest_bytes
from layerwise.cost.model import Configs, CostModel, CostTables
from layerwise.cost.price import LayerPrice, Price, model_error, price
from layerwise.cost.timeline.ranges import Deviations, deviations
from layerwise.cost.timeline.shares import StepShares, shares
from layerwise.cost.timeline.simulate import SimulatedSpan, Timeline, step_spans
from layerwise.graph.layer import Layer
from layerwise.partition.buckets import BUCKET_BYTES
from layerwise.report.content import Report, described
from layerwise.report.html import fragment
from layerwise.report.text import plain
from layerwise.search.priced.answers import Least, Within
from layerwise.search.solve.alternatives import Alternative, all_alternatives
from layerwise.search.solve.eliminate import Optimum


@dataclass(frozen=True)
class Candidate:
    """A strategy and its predicted costs. Values that most candidates do not need are computed on access."""

    name: str
    strategy: dict[str, Config]
    timeline: Timeline
    model: CostModel = field(repr=False, compare=False)  # that prices it
    memory_limit_bytes: float = field(compare=False)  # of a device
    bucket_bytes: int = BUCKET_BYTES  # size of a full gradient bucket

    @property
    def key(self) -> tuple[object, ...]:
        """A key of its contents, equal for equal plans."""
        return (*self.strategy.items(), self.bucket_bytes)

    @cached_property
    def memory_bytes(self) -> float:
        """The peak bytes of the fullest device in a step, in terms of the first one's memory, as the limit is."""
        return fullest_bytes(self.model, self.strategy)

    @cached_property
    def price(self) -> Price:
        """Equation 1, layer by layer."""
        return price(self.model, self.strategy, memory_bytes=self.memory_bytes)

    @cached_property
    def error(self) -> float:
        """The model's error for its step time (`cost.price.model_error`)."""
        return model_error(self.model, self.strategy)

    @cached_property
    def deviations(self) -> Deviations:
        """How far its step's time may be off."""
        return deviations(self.model, self.strategy, self.bucket_bytes)

    @cached_property
    def spans(self) -> Sequence[SimulatedSpan]:
        """The spans of its simulated step."""
        return step_spans(self.model, self.strategy, self.bucket_bytes)

    @cached_property
    def shares(self) -> StepShares:
        """The step of the slowest device, divided among the layers."""
        return shares(self.spans)

    @cached_property
    def fits(self) -> bool:
        """True if it fits into every device's memory."""
        return self.memory_bytes <= self.memory_limit_bytes

    def table(self) -> dict[str, list[object]]:
        """Returns a row for each layer, as columns for `pandas.DataFrame`: seconds by equation 1, and bytes."""
        rows = [_row(layer, self.price.layers[layer.name]) for layer in self.model.graph.inner]
        return {name: [row[name] for row in rows] for name in rows[0]}

    def __str__(self) -> str:
        return plain(Report(self.name, parts=described(self)))

    def _repr_html_(self) -> str:
        return fragment(described(self))


@dataclass(frozen=True)
class SearchResult:
    """The result of a search: what to run, what it was compared with, and what is proven."""

    best: Candidate  # what to run
    additive: Candidate  # the optimal strategy by step_time_s
    baselines: dict[str, Candidate]
    optimum: Optimum  # the proof of `additive`
    seconds: dict[str, float]  # tables, search
    configs: Configs = field(repr=False)  # of each layer
    configurations: dict[str, int]  # of the full space: largest of a layer, sum over layers, number after pruning
    # All plans that `best` was chosen from, each once. For other strategies only the bound on step time is known, not
    # their memory.
    simulated: tuple[Candidate, ...]
    memory_bytes: int  # the most that a device may use
    offer: tuple[str, ...]  # ways to save memory, from `priced.variants.OFFERS`
    unlimited: Candidate  # `best` without a memory limit
    within: Within | None  # result of the search under the limit, if `unlimited` does not fit
    least: Least | None  # the least memory, if nothing was found to fit
    overlap_bound_s: float | None  # no strategy that `best` was chosen from has a faster step with overlap

    @property
    def fastest(self) -> Candidate:
        """The fastest simulated plan, by `preferred`; if `best` is data parallelism, the plan it was preferred to."""
        return preferred(self.simulated)

    @property
    def by_ddp(self) -> Candidate:
        """`best`'s strategy with DistributedDataParallel's buckets."""
        return next((c for c in self.simulated if c.key == (*self.best.key[:-1], BUCKET_BYTES)), self.best)

    @cached_property
    def tables(self) -> CostTables:
        """Exact costs of the full search space."""
        return self.best.model.tables(self.configs)

    @cached_property
    def alternatives(self) -> dict[str, list[Alternative]]:
        """All configurations of every layer, best first, each with the best step time of a strategy that has it."""
        return all_alternatives(self.tables)

    def table(self) -> dict[str, list[object]]:
        """Returns the best strategy's `Candidate.table`."""
        return self.best.table()

    def __str__(self) -> str:
        return plain(Report(self.best.name, parts=described(self)))

    def _repr_html_(self) -> str:
        return fragment(described(self))


def _row(layer: Layer, price: LayerPrice) -> dict[str, object]:
    """A layer's row in `Candidate.table`."""
    seconds = {f"{term}_s": value for term, value in price.seconds.items()}
    about = {"layer": layer.name, "operator": layer.kinds, "output": layer.out.describe()}
    config = {"configuration": str(price.config), "devices": price.config.total}
    sent = {f"{kind}_bytes": size for kind, size in price.bytes.items()}
    return {**about, **config, **seconds, "total_s": price.total_s, **sent, "memory_bytes": price.memory_bytes}


def drawn(c: Candidate) -> tuple[dict[str, Config], Mapping[str, Mapping[str, float]], int]:
    """The arguments of `draw` for a strategy: the layers that take time, their seconds, and the number of devices."""
    layers = {name: c.strategy[name] for name, p in c.price.layers.items() if p.seconds["compute"] > 0}
    return layers, c.shares.layers, c.shares.devices


def error_between(a: Candidate, b: Candidate) -> float:
    """The fraction of time by which two plans must differ to be distinguished; common errors do not count."""
    return hypot(max(a.error, b.error), 1 - exp(-a.deviations.apart(b.deviations)))


def preferred(candidates: Iterable[Candidate]) -> Candidate:
    """The fastest by timeline among those that fit into memory (or among all if none fits); the first of equal ones."""
    by_time = sorted(candidates, key=lambda c: c.timeline.total_s)
    return next((c for c in by_time if c.fits), by_time[0])
