"""Answers under a memory limit: the best that fits, the price of memory there, and the least memory of all."""

from __future__ import annotations

from dataclasses import dataclass

from layerwise.search.priced.variants import Strategy
from layerwise.search.solve.narrow import SLACK


@dataclass(frozen=True, slots=True)
class MemoryPrice:
    """The price of memory: the seconds of a step that a byte less takes, at one instant on one device."""

    instant: str
    device: int
    s_per_byte: float


@dataclass(frozen=True, slots=True)
class Within:
    """The answer under a limit."""

    limit_bytes: float
    strategies: tuple[Strategy, ...]  # the best that were found, by equation 1
    cost_s: float  # of the first: inf where none was found
    lower_bound_s: float  # of equation 1, of all strategies that fit: inf where it is proven that none does
    prices: tuple[MemoryPrice, ...]
    configurations: int  # that were left after bounds

    @property
    def proven(self) -> bool:
        """True if no strategy that fits is faster, or none fits."""
        return self.cost_s <= self.lower_bound_s * SLACK


@dataclass(frozen=True, slots=True)
class Least:
    """The least memory of all strategies."""

    best: Strategy
    bytes: float  # its true peak
    lower_bound_bytes: float

    @property
    def proven(self) -> bool:
        """True if nothing needs less."""
        return self.bytes <= self.lower_bound_bytes * SLACK
