"""Grid: the boxes into which a configuration cuts a tensor, one a device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count, product
from math import prod
from threading import Lock

import numpy as np

from layerwise.arguments import checked_values
from layerwise.geometry.arrays import Ints
from layerwise.geometry.box import Box

WEIGHTED = 1 << 24  # from here on a number of cells stands for cells of unequal size; see `cut`


@dataclass(frozen=True, slots=True)
class _Weighted:
    weights: tuple[int, ...]  # of the cells
    only: int | None  # a cell by itself


_CUTS: dict[int, _Weighted] = {}
_NUMBERS: dict[_Weighted, int] = {}
_LOCK, _NEXT = Lock(), count(1)


def cut(weights: tuple[int, ...], only: int | None = None) -> int:
    """The number by which arrays of degrees name cells in proportion to these weights, or one such cell by itself.

    It is the number of cells where they are equal, as everywhere; else a larger one, of which `degree_of` is that.
    """
    if only is None and len(set(weights)) == 1:
        return len(weights)
    key = _Weighted(weights, only)
    with _LOCK:
        if key not in _NUMBERS:
            number = len(weights) + WEIGHTED * next(_NEXT)
            _CUTS[number], _NUMBERS[key] = key, number
        return _NUMBERS[key]


def one_cell(number: int, only: int) -> int:
    """The number of one of the cells that a number stands for."""
    return cut(_CUTS[number].weights if number >= WEIGHTED else (1,) * number, only)


def degree_of(numbers: Ints) -> Ints:
    """How many cells each of these stands for."""
    return numbers % WEIGHTED


@lru_cache(maxsize=65536)
def boundaries(extent: int, degree: int, unit: int = 1) -> Ints:
    """The degree + 1 boundaries of the cells of one dimension: cell i is [b[i], b[i+1]).

    `chunks` cuts the m = extent / unit units. If that would leave a cell empty (which takes a factor of 3 or more), the
    cells are balanced instead: b[i] = unit * (m * i // degree). No cell is empty while degree <= m, and the largest has
    ceil(m / degree) units. `unit` is the granularity of a dimension that a reshape has merged: cells end only where
    they are boxes before the merge. A `cut` makes cells of unequal size; for a single cell they are its two ends.
    """
    assert extent % unit == 0, f"extent {extent} is not a multiple of unit {unit}"
    length, unequal = extent // unit, _CUTS.get(degree)
    if unequal is not None:
        ends = in_proportion(length, unequal.weights)
        ends = ends if unequal.only is None else ends[unequal.only : unequal.only + 2]
    else:
        ends = chunks(length, degree)
        if (np.diff(ends) == 0).any():
            ends = length * np.arange(degree + 1, dtype=np.int64) // degree
    result: Ints = unit * ends
    result.setflags(write=False)
    return result


def in_proportion(length: int, weights: tuple[int, ...]) -> Ints:
    """The boundaries of cells whose lengths are as these weights, to the nearest whole number but at least 1."""
    if len(set(weights)) == 1:
        return boundaries(length, len(weights))
    degree, upto = len(weights), np.insert(np.cumsum(np.array(weights, np.int64)), 0, 0)
    ends = (2 * length * upto + upto[-1]) // (2 * upto[-1])
    steps = np.arange(degree + 1)
    ends = np.maximum.accumulate(ends - steps) + steps  # each cell has one
    result: Ints = np.minimum(ends, length - degree + steps)
    return result


def chunks(length: int, degree: int) -> Ints:
    """The degree + 1 boundaries of a DTensor's shards along a dimension, on a mesh of the degree's prime factors.

    Each factor in turn, smallest first, cuts like torch.chunk: into parts of ceil(length / factor), with a shorter last
    one. Some may be empty.
    """
    ends = np.array([0, length], np.int64)
    for factor in prime_factors(degree):
        lo, hi = ends[:-1, None], ends[1:, None]
        inner = np.minimum(lo + -(-(hi - lo) // factor) * np.arange(factor, dtype=np.int64), hi)
        ends = np.append(inner.reshape(-1), length)
    return ends


@lru_cache(maxsize=65536)
def nests(length: int, degree: int, split: int) -> bool:
    """True if `degree * split` cells of a dimension of that many units are those of `degree`, each cut again.

    That holds for powers of two, and if the degree divides the length.
    """
    return bool(np.array_equal(boundaries(length, degree * split)[::split], boundaries(length, degree)))


@lru_cache
def prime_factors(number: int) -> tuple[int, ...]:
    """The prime factors in ascending order; () for 1."""
    factors, factor = [], 2
    while number > 1:
        while number % factor == 0:
            factors.append(factor)
            number //= factor
        factor += 1
    return tuple(factors)


@checked_values
@dataclass(frozen=True, slots=True)
class Grid:
    """The boxes into which a tensor is cut. Cells are numbered in row-major order.

    Attributes:
        shape: Shape of the tensor.
        degrees: The number of parts of each dimension.
        units: The granularity of cuts in each dimension (default: 1).

    Examples:
        >>> [box.shape for box in Grid((5, 4), (2, 1))]
        [(3, 4), (2, 4)]
    """

    shape: tuple[int, ...]
    degrees: tuple[int, ...]
    units: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        if not self.units:
            object.__setattr__(self, "units", (1,) * len(self.shape))
        assert len(self.shape) == len(self.degrees) == len(self.units)
        assert all(1 <= d <= s // u for s, d, u in zip(self.shape, self.degrees, self.units, strict=True)), self

    def __len__(self) -> int:
        return prod(self.degrees)

    def __iter__(self) -> Iterator[Box]:
        """The boxes of all cells, in order."""
        edges = [boundaries(*dim).tolist() for dim in zip(self.shape, self.degrees, self.units, strict=True)]
        for cell in product(*(range(d) for d in self.degrees)):
            yield Box(
                tuple(e[i] for e, i in zip(edges, cell, strict=True)),
                tuple(e[i + 1] for e, i in zip(edges, cell, strict=True)),
            )
