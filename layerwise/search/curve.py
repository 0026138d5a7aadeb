"""Time against memory: the fastest plans of a model under decreasing limits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel
from layerwise.search.find import search
from layerwise.search.result import Candidate, SearchResult

POINTS = 16  # at most: limits are then this far apart, by a factor


@dataclass(frozen=True, slots=True)
class Point:
    """A limit, the result of the search under it, and the fastest plan for it and all smaller limits, if one fits."""

    limit_bytes: float
    result: SearchResult
    best: Candidate | None


def memory_curve(
    model: CostModel,
    space: SearchSpace,
    least_bytes: float,
    most_bytes: float,
    *,
    offer: Iterable[str],
    points: int = POINTS,
    **options: Any,
) -> list[Point]:
    """The fastest plan under `most_bytes`, then under less than that plan needs, and so on, down to `least_bytes`.

    By equation 1 every limit between a point's and its plan's memory has the same answer, so that curve is exact at its
    steps; with overlap, a point is the best of the candidates. If there are more steps than `points`, some are left
    out: a limit is then a fixed factor below the last. At the last point nothing may fit. options: other options of
    `search`.
    """
    factor, offered = (least_bytes / most_bytes) ** (1 / max(points - 1, 1)), tuple(offer)
    limit, results = most_bytes, list[tuple[float, SearchResult]]()
    while True:
        result = search(model, space, memory_limit_bytes=limit, offer=offered, **options)
        results.append((limit, result))
        need = result.best.memory_bytes
        if not result.best.fits or need <= least_bytes:
            break
        limit = max(min(limit * factor, need - 1), least_bytes)
    curve, best = list[Point](), None
    for limit, result in reversed(results):
        if result.best.fits and (best is None or result.best.timeline.total_s <= best.timeline.total_s):
            best = result.best
        curve.append(Point(limit, result, best))
    return curve[::-1]
