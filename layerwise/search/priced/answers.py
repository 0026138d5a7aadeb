"""The answers of a search under a memory limit: what fits, the price of memory, and the least memory of all."""

from __future__ import annotations

from dataclasses import dataclass

from layerwise.search.priced.variants import Strategy
from layerwise.search.solve.narrow import SLACK


@dataclass(frozen=True, slots=True)
class MemoryPrice:
    """The price of memory: the seconds that a step takes longer with a byte less, at one instant on one device."""

    instant: str
    device: int
    s_per_byte: float


@dataclass(frozen=True, slots=True)
class Within:
    """The answer under a limit."""

    strategies: tuple[Strategy, ...]  # the best found, by equation 1
    cost_s: float  # of the first one; inf if none was found
    lower_bound_s: float  # of equation 1, over all strategies that fit; inf if it is proven that none does
    prices: tuple[MemoryPrice, ...]
    configurations: int  # the number left after bounds

    @property
    def proven(self) -> bool:
        """True if no strategy that fits is faster, or none fits."""
        return self.cost_s <= self.lower_bound_s * SLACK


@dataclass(frozen=True, slots=True)
class Least:
    """The least memory of all strategies."""

    best: Strategy
    bytes: float  # its simulated peak
    lower_bound_bytes: float

    @property
    def proven(self) -> bool:
        """True if nothing needs less."""
        return self.bytes <= self.lower_bound_bytes * SLACK
