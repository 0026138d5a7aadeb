"""Which strategy to take within a budget, the runner-up, and by how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from layerwise.cost.basis import ANALYTIC_ERROR, unmeasured_error
from layerwise.oracle.question import Answer


@dataclass(frozen=True, slots=True)
class Budget:
    """What may be used; None: no limit."""

    gpus: int | None = None
    memory_bytes: float | None = None  # of a device, beside what plans may take of it
    seconds: float | None = None  # of an epoch


@dataclass(frozen=True, slots=True)
class Suggestion:
    """The best answer within the budget and the best of another strategy.

    With a time budget the best is the one of fewest GPU-seconds an epoch that keeps it, else the fastest.
    """

    best: Answer | None = None
    runner_up: Answer | None = None
    margin: float | None = None  # how much more of that the runner-up takes: 0.1 is 10 %; below 0 it takes less
    why: str = ""  # there is no best one
    gain: float = 1.0  # how many times as much the best one takes as the least, which is within `error` of it
    error: float = 0.0  # the model's: the share of an epoch below which a difference says nothing


def suggest(answers: Sequence[Answer], samples: int, budget: Budget) -> Suggestion:
    """Chooses by samples per second, with overlap. Of what the model's error does not tell from the best, data
    parallelism is taken, then fewer devices, then the best.
    """

    def cost(a: Answer) -> float:
        return a.epoch_s(samples) * (a.projection.devices if budget.seconds is not None else 1)

    few = [a for a in answers if budget.gpus is None or a.projection.devices <= budget.gpus]
    if not few:
        return Suggestion(why=f"no strategy was asked about with at most {budget.gpus} GPUs")
    roomy = [a for a in few if a.fits and _within(a.projection.phases.memory_bytes, budget.memory_bytes)]
    if not roomy:
        least = min(few, key=lambda a: a.projection.phases.memory_bytes)
        return Suggestion(
            why=f"none fits into memory: the least, {_at(least)}, "
            f"needs {least.projection.phases.memory_bytes / 2**30:.3g} GiB a device",
        )
    quick = [a for a in roomy if _within(a.epoch_s(samples), budget.seconds)]
    if not quick:
        fastest = min(roomy, key=lambda a: a.epoch_s(samples))
        return Suggestion(
            why=f"none is fast enough: the fastest, {_at(fastest)}, "
            f"takes {fastest.epoch_s(samples) / 3600:.3g} hours an epoch",
        )
    least = min(quick, key=cost)
    near = [a for a in quick if cost(least) >= cost(a) * (1 - max(_most(a), _most(least)))]
    errors = {id(a): error_between(a, least) for a in near}
    tied = [a for a in near if cost(least) >= cost(a) * (1 - errors[id(a)])]
    best = min(tied, key=lambda a: (a.projection.strategy not in ("serial", "data"), a.projection.devices, cost(a)))
    gain, error = cost(best) / cost(least), errors[id(best)]
    name = best.projection.strategy
    others = [a for a in quick if a.kind != best.kind and a.projection.strategy != name]
    if not others:
        return Suggestion(best, gain=gain, error=error)
    second = min(others, key=cost)
    return Suggestion(best, second, cost(second) / cost(best) - 1, gain=gain, error=error)


def error_between(a: Answer, b: Answer) -> float:
    """The model's error of two answers: by what their t_C rests on; of pipelines, as if analytic."""
    return max(ANALYTIC_ERROR if one.priced is None else one.priced.error for one in (a, b))


def _most(a: Answer) -> float:
    """The largest error that the answer can have: known without a price of its layers."""
    return ANALYTIC_ERROR if a.priced is None else unmeasured_error(a.priced.model)


def _at(a: Answer) -> str:
    devices = a.projection.devices
    return f"{a.projection.strategy} at {devices} GPU{'s' * (devices > 1)}"


def _within(value: float, most: float | None) -> bool:
    return most is None or value <= most
