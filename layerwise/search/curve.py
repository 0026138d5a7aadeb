"""Time against memory: the fastest plans of a model under limits from the largest down."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from layerwise.cache import Answers
from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel, Progress
from layerwise.search.find import search
from layerwise.search.result import Candidate, SearchResult, timeline_s

POINTS = 16  # at most: limits are then this far apart, by a factor


@dataclass(frozen=True, slots=True)
class Point:
    """A limit, what a search under it found, and the fastest plan of that and of all smaller limits, if one fits."""

    limit_bytes: float
    result: SearchResult
    best: Candidate | None


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
    answers: Answers | None = None,
) -> list[Point]:
    """The fastest plan under `most_bytes`, then under what is less than that one needs, and so on to `least_bytes`.

    Between a point's limit and the memory of its plan no other limit has another answer, so the curve is exact
    at its steps; where there are more steps than `points` some are left out, and a limit is then a given factor below
    the last. The last point may be one where nothing fits.
    """
    seconds = timeline_s if objective == "timeline" else step_time_s
    factor, offered = (least_bytes / most_bytes) ** (1 / max(points - 1, 1)), tuple(offer)
    limit, results = most_bytes, list[tuple[float, SearchResult]]()
    while True:
        result = search(
            model,
            space,
            objective=objective,
            memory_bytes=memory_bytes,
            memory_limit_bytes=limit,
            offer=offered,
            progress=progress,
            answers=answers,
        )
        results.append((limit, result))
        need = result.best.price.memory_bytes
        if not result.best.fits or need <= least_bytes:
            break
        limit = max(min(limit * factor, need - 1), least_bytes)
    curve, best = list[Point](), None
    for limit, result in reversed(results):
        if result.best.fits and (best is None or seconds(result.best) <= seconds(best)):
            best = result.best
        curve.append(Point(limit, result, best))
    return curve[::-1]


def step_time_s(c: Candidate) -> float:
    """Equation 1."""
    return c.price.step_time_s
