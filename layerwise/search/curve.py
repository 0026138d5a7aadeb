"""Time against memory: the fastest plans of a model under limits from the largest down."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel, Progress
from layerwise.search.find import search
from layerwise.search.result import SearchResult

POINTS = 16  # at most: limits are then this far apart, by a factor


@dataclass(frozen=True, slots=True)
class Point:
    """A limit and what was found under it."""

    limit_bytes: float
    result: SearchResult


def memory_curve(
    model: CostModel,
    space: SearchSpace,
    least_bytes: float,
    most_bytes: float,
    *,
    objective: Literal["timeline", "additive"] = "timeline",
    offer: Iterable[str],
    points: int = POINTS,
    memory_bytes: float = 2**31,
    progress: Progress | None = None,
) -> list[Point]:
    """The fastest plan under `most_bytes`, then under what is less than that one needs, and so on to `least_bytes`.

    Between a point's limit and the memory of its plan no other limit has another answer, so the curve is exact
    at its steps; where there are more steps than `points` some are left out, and a limit is then a given factor below
    the last. The last point may be one where nothing fits.
    """
    factor = (least_bytes / most_bytes) ** (1 / max(points - 1, 1))
    offered, limit, curve = tuple(offer), most_bytes, list[Point]()
    while True:
        result = search(
            model,
            space,
            objective=objective,
            memory_bytes=memory_bytes,
            memory_limit_bytes=limit,
            offer=offered,
            progress=progress,
        )
        curve.append(Point(limit, result))
        need = result.best.price.memory_bytes
        if not result.best.fits or need <= least_bytes:
            return curve
        limit = max(min(limit * factor, need - 1), least_bytes)
