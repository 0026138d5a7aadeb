"""Rows: (n, s, c) viewed as (n*s, c) for a linear layer, and back again.

Models and exporters write linear layers on sequences that way. Taken literally, s is lost (and n, if it is not the
outermost), though it could be split; so row-wise operators work on the tensor as it was before merging.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from layerwise.importers.registry import Operand
from layerwise.tensor import TensorSpec


@dataclass(frozen=True, slots=True)
class Rows:
    """An activation with merged leading dimensions; `shape` is the merged shape, which the model sees."""

    whole: Operand
    shape: tuple[int, ...]

    @property
    def spec(self) -> TensorSpec:
        """The tensor as the model sees it."""
        named = "n" if "n" in self.whole.spec.dims else None
        return TensorSpec(self.shape, (named, None), self.whole.spec.dtype)


def before_merging(shape: tuple[int, ...], rows: int, columns: int) -> tuple[int, ...] | None:
    """The dimensions that merge to (rows, columns): (s, n*heads, e) becomes (s, n, heads*e). None if nothing merges."""
    kept = max(k for k in range(len(shape)) if rows % prod(shape[:k]) == 0)
    rest = rows // prod(shape[:kept])
    lead = shape[:kept] if rest == 1 else (*shape[:kept], rest)
    if len(lead) < 2 or shape[kept] % rest:
        return None
    return (*lead, columns)
