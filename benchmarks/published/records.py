"""Published measurements of a strategy's iteration, and how well projections hit them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import exp, log
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Record:
    """Seconds an iteration of a published run."""

    id: str
    use: str  # `calibration` may set constants, `check` never does
    runs: str  # `logs`, with data loading, or `bars`, without
    model: str
    strategy: str
    devices: int
    groups: int
    inside: int
    batch: int
    total_s: float
    compute_s: float | None = None
    communication_s: float | None = None
    projected_s: float | None = None  # by the run's own authors


def read_records(path: Path) -> list[Record]:
    """The records of a file of this folder, which also says where each is from."""
    rows = json.loads(path.read_text(encoding="utf-8"))["records"]
    return [Record(**{key: value for key, value in row.items() if key not in ("source", "flags")}) for row in rows]


def log_errors(projected: Sequence[float], measured: Sequence[float]) -> list[float]:
    """|log(projected ratio / measured ratio)| of every two runs."""
    pairs = list(zip(projected, measured, strict=True))
    return [abs(log(p / q) - log(m / n)) for (p, m), (q, n) in combinations(pairs, 2)]


def factor(errors: Sequence[float]) -> float:
    """The typical factor by which a ratio is off: exp of the mean log error."""
    return exp(sum(errors) / len(errors)) if errors else 1.0


def order(
    ranks: Mapping[str, float], measured: Mapping[str, float], resolution: float = 0.0
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Pairs in the measured order, faster first, that `ranks` have so, and that they have the other way round.

    Pairs whose measurements are nearer than `resolution` (a share of the slower) have no order.
    """
    right: list[tuple[str, str]] = []
    wrong: list[tuple[str, str]] = []
    for a, b in combinations(sorted(measured, key=lambda name: measured[name]), 2):
        if measured[b] - measured[a] > resolution * measured[b]:
            (right if ranks[a] < ranks[b] else wrong).append((a, b))
    return right, wrong
