"""Grid: the boxes into which a configuration cuts a tensor, one a device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from math import prod

import numpy as np

from layerwise.geometry.arrays import Ints
from layerwise.geometry.box import Box


@lru_cache(maxsize=65536)
def boundaries(extent: int, degree: int, unit: int = 1) -> Ints:
    """The degree + 1 boundaries of the cells of one dimension: cell i is [b[i], b[i+1]).

    b[i] = unit * (m * i // degree) with m = extent / unit: never an empty cell while degree <= m, extents differ by
    at most one unit, and degrees d and d*e nest (the boundaries of d are among those of d*e). `unit` is the
    granularity of a dimension that was merged by a reshape: cells end only where they are boxes before the merge.
    """
    assert extent % unit == 0, f"extent {extent} is not a multiple of unit {unit}"
    result = unit * (extent // unit * np.arange(degree + 1, dtype=np.int64) // degree)
    result.setflags(write=False)
    return result


@dataclass(frozen=True, slots=True)
class Grid:
    """A tensor of `shape` cut `degrees[i]` times in dimension i. Cells are numbered in row-major order."""

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

    def bounds(self) -> tuple[Ints, Ints]:
        """lo and hi of every cell, each of shape (cells, rank)."""
        index = np.indices(self.degrees).reshape(len(self.degrees), len(self))
        edges = [boundaries(*dim) for dim in zip(self.shape, self.degrees, self.units, strict=True)]
        lo = np.array([e[i] for e, i in zip(edges, index, strict=True)], dtype=np.int64)
        hi = np.array([e[i + 1] for e, i in zip(edges, index, strict=True)], dtype=np.int64)
        return lo.reshape(len(self.degrees), len(self)).T, hi.reshape(len(self.degrees), len(self)).T
