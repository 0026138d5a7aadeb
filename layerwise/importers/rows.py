"""Rows: (n, s, c) that a PyTorch program merges to (n*s, c), kept apart here."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from layerwise.importers.registry import Operand


@dataclass(frozen=True, slots=True)
class Rows:
    """An activation whose leading dimensions are merged; what takes row by row works on it as it was before.

    (n, s, c) seen as (n*s, c) for a linear layer and back again would lose s, which can be split.
    """

    whole: Operand
    shape: tuple[int, ...]


def before_merging(shape: tuple[int, ...], rows: int, columns: int) -> tuple[int, ...] | None:
    """Dimensions that merge to (rows, columns): (s, n*heads, e) becomes (s, n, heads*e). None if nothing merges."""
    kept = max(k for k in range(len(shape)) if rows % prod(shape[:k]) == 0)
    rest = rows // prod(shape[:kept])
    lead = shape[:kept] if rest == 1 else (*shape[:kept], rest)
    if len(lead) < 2 or shape[kept] % rest:
        return None
    return (*lead, columns)
