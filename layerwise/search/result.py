"""What a search finds: plans with their predicted costs, and the proof."""

from __future__ import annotations

from dataclasses import dataclass

from layerwise.config import Config
from layerwise.cost.price import Price
from layerwise.cost.timeline.simulate import Timeline
from layerwise.picture import html
from layerwise.search.limit.limited import Least
from layerwise.search.limit.variants import Strategy
from layerwise.search.limit.within import Within
from layerwise.search.solve.eliminate import Optimum


@dataclass(frozen=True, slots=True)
class Candidate:
    """A strategy and what it is predicted to cost."""

    name: str
    strategy: dict[str, Config]
    price: Price
    timeline: Timeline
    fits: bool  # within every device's memory

    def _repr_html_(self) -> str:
        return html(self)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What to run, what it was compared with, and what is proven."""

    best: Candidate  # what to run
    additive: Candidate  # the strategy that is optimal by step_time_s
    baselines: dict[str, Candidate]
    optimum: Optimum  # the proof of `additive`
    seconds: dict[str, float]  # tables, search
    configurations: dict[str, int]  # of the whole space: largest of a layer, sum over layers, kept after pruning
    # All plans that `best` is one of, each once. Of the others nothing is known but the bound on their step time, so
    # nothing of their memory.
    simulated: tuple[Candidate, ...]
    memory_bytes: int  # that a device may take at most
    offer: tuple[str, ...]  # what might save memory, of `limit.variants.OFFERS`
    unlimited: Candidate  # `best`, if memory did not matter
    within: Within | None  # what the search under the limit found, where `unlimited` does not fit
    least: Least[Strategy] | None  # what needs the least memory, where nothing was found to fit

    @property
    def fastest(self) -> Candidate:
        """Of the simulated plans, by `preference`: where `best` is data parallelism, what it was kept against."""
        return min(self.simulated, key=preference)

    def _repr_html_(self) -> str:
        return html(self)


def timeline_s(c: Candidate) -> float:
    """Seconds of a step with overlap."""
    return c.timeline.total_s


def preference(c: Candidate) -> tuple[bool, float]:
    """The least is to be chosen: the fastest by timeline of those that fit into memory (of all, where none does)."""
    return not c.fits, c.timeline.total_s
