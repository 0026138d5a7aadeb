"""The result of a search: plans with their predicted costs, and the proof."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import exp, hypot

from layerwise.config import Config
from layerwise.cost.memory.step import fullest_bytes, peak_bytes
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
    """A strategy and what it is predicted to cost. What most candidates are never asked for is made where it is."""

    name: str
    strategy: dict[str, Config]
    timeline: Timeline
    model: CostModel = field(repr=False, compare=False)  # by which it is priced
    memory_limit_bytes: float = field(compare=False)  # of a device
    bucket_bytes: int = BUCKET_BYTES  # at which a bucket of gradients is full

    @property
    def key(self) -> tuple[object, ...]:
        """A key of its contents: equal for equal plans."""
        return (*self.strategy.items(), self.bucket_bytes)

    @cached_property
    def memory_bytes(self) -> float:
        """Bytes of the fullest device at the fullest instant of a step."""
        return float(peak_bytes(self.model, self.strategy).max())

    @cached_property
    def price(self) -> Price:
        """Equation 1, layer by layer."""
        return price(self.model, self.strategy, memory_bytes=self.memory_bytes)

    @cached_property
    def error(self) -> float:
        """The model's, of its step's time (`cost.price.model_error`)."""
        return model_error(self.model, self.strategy)

    @cached_property
    def deviations(self) -> Deviations:
        """How far its step may be off."""
        return deviations(self.model, self.strategy, self.bucket_bytes)

    @cached_property
    def spans(self) -> Sequence[SimulatedSpan]:
        """The actions of its simulated step."""
        return step_spans(self.model, self.strategy, self.bucket_bytes)

    @cached_property
    def shares(self) -> StepShares:
        """The step of the slowest device, divided among the layers."""
        return shares(self.spans)

    @cached_property
    def fits(self) -> bool:
        """Within every device's memory."""
        return fullest_bytes(self.model, self.strategy) <= self.memory_limit_bytes

    def table(self) -> dict[str, list[object]]:
        """Returns a row a layer as columns, as `pandas.DataFrame` takes them: seconds by equation 1, and bytes."""
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
    additive: Candidate  # the strategy that is optimal by step_time_s
    baselines: dict[str, Candidate]
    optimum: Optimum  # the proof of `additive`
    seconds: dict[str, float]  # tables, search
    configs: Configs = field(repr=False)  # that each layer could have
    configurations: dict[str, int]  # of the whole space: largest of a layer, sum over layers, kept after pruning
    # All plans that `best` is one of, each once. Of the others nothing is known but the bound on their step time, so
    # nothing of their memory.
    simulated: tuple[Candidate, ...]
    memory_bytes: int  # that a device may take at most
    offer: tuple[str, ...]  # what might save memory, of `priced.variants.OFFERS`
    unlimited: Candidate  # `best`, if memory did not matter
    within: Within | None  # what the search under the limit found, where `unlimited` does not fit
    least: Least | None  # what needs the least memory, where nothing was found to fit
    overlap_bound_s: float | None  # no strategy that `best` was chosen from has a faster step with overlap

    @property
    def fastest(self) -> Candidate:
        """The fastest simulated plan, by `preferred`: where `best` is data parallelism, what it was kept against."""
        return preferred(self.simulated)

    @property
    def by_ddp(self) -> Candidate:
        """The strategy of `best` with DistributedDataParallel's buckets."""
        return next((c for c in self.simulated if c.key == (*self.best.key[:-1], BUCKET_BYTES)), self.best)

    @cached_property
    def tables(self) -> CostTables:
        """Exact costs of all that was searched, nothing left out."""
        return self.best.model.tables(self.configs)

    @cached_property
    def alternatives(self) -> dict[str, list[Alternative]]:
        """All configurations of every layer, best first, each with the best step time of a strategy with it."""
        return all_alternatives(self.tables)

    def table(self) -> dict[str, list[object]]:
        """Returns the best strategy's `Candidate.table`."""
        return self.best.table()

    def __str__(self) -> str:
        return plain(Report(self.best.name, parts=described(self)))

    def _repr_html_(self) -> str:
        return fragment(described(self))


def _row(layer: Layer, price: LayerPrice) -> dict[str, object]:
    """A layer's row of `Candidate.table`."""
    seconds = {f"{term}_s": value for term, value in price.seconds.items()}
    about = {"layer": layer.name, "operator": layer.kinds, "output": layer.out.describe()}
    config = {"configuration": str(price.config), "devices": price.config.total}
    sent = {f"{kind}_bytes": size for kind, size in price.bytes.items()}
    return {**about, **config, **seconds, "total_s": price.total_s, **sent, "memory_bytes": price.memory_bytes}


def drawn(c: Candidate) -> tuple[dict[str, Config], Mapping[str, Mapping[str, float]], int]:
    """What `draw` is given of a strategy: the layers that take time, their seconds, and how many devices there are."""
    layers = {name: c.strategy[name] for name, p in c.price.layers.items() if p.seconds["compute"] > 0}
    return layers, c.shares.layers, c.shares.devices


def error_between(a: Candidate, b: Candidate) -> float:
    """The share of time by which one must be faster to be told from the other: what both err by alike is no part."""
    return hypot(max(a.error, b.error), 1 - exp(-a.deviations.apart(b.deviations)))


def timeline_s(c: Candidate) -> float:
    """Seconds of a step with overlap, and of what is read before it."""
    return c.timeline.total_s


def preferred(candidates: Iterable[Candidate]) -> Candidate:
    """The fastest by timeline of those that fit into memory (of all, where none does), the first of equal ones."""
    by_time = sorted(candidates, key=timeline_s)
    return next((c for c in by_time if c.fits), by_time[0])
