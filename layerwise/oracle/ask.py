"""Asks about every strategy at every number of devices, and about measured runs; suggests a strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel, Progress
from layerwise.cost.price import ANALYTIC_ERROR, unmeasured_error
from layerwise.errors import LayerwiseError
from layerwise.oracle.names import counted
from layerwise.oracle.question import Answer, Oracle
from layerwise.oracle.runs import Compared, MeasuredRun, compare
from layerwise.oracle.strategies import Limit, UnreachableError, applicable
from layerwise.plan import Plan
from layerwise.search.make_plan import make_plan


@dataclass(frozen=True, slots=True)
class Asked:
    """Answers, by strategy and devices."""

    gpus: tuple[int, ...]  # numbers of devices in the question
    single: Answer  # on one device, the basis of speed-ups
    answers: dict[tuple[str, int], Answer]
    limits: dict[str, Limit]  # of each strategy, with the batch of the most devices
    reasons: dict[tuple[str, int], str]  # why there is no answer
    notes: tuple[str, ...]  # what was left out, and how to get it

    def speed_up(self, a: Answer) -> float:
        """Samples per second relative to one device."""
        return self.single.epoch_s(1) / a.epoch_s(1)


def ask(
    oracle: Oracle, named: Sequence[str], gpus: Sequence[int], search_up_to: int, progress: Progress | None = None
) -> Asked:
    """The named strategies (default: those that suit the model) at all numbers of devices.

    If a strategy cannot use a number of devices, `reasons` says why. Raises LayerwiseError if none can use any.
    """
    single = oracle.answer("serial", 1)
    names = (tuple(named) or applicable(oracle.question.graph, oracle.node)) if gpus else ()
    answers: dict[tuple[str, int], Answer] = {}
    reasons: dict[tuple[str, int], str] = {}
    notes: tuple[str, ...] = ()
    work = [(name, count) for count in gpus for name in names]
    for done, (name, count) in enumerate(work, start=1):
        if name == names[0]:
            oracle.learn(names, count)
        if name == "layerwise" and count > search_up_to:
            reasons[name, count] = (
                f"layerwise is searched for up to {search_up_to} GPUs only: add --search-up-to {count}"
            )
            notes = (
                f"layerwise: no plan was searched for more than {counted(search_up_to)}; "
                f"--search-up-to {max(gpus)} does it, and takes minutes.",
            )
        else:
            try:
                answers[name, count] = oracle.answer(name, count)
            except UnreachableError as error:
                reasons[name, count] = str(error)
        if progress:
            progress(done, len(work))
    if gpus and not answers:
        raise LayerwiseError(reasons[names[0], gpus[0]])
    return Asked(tuple(gpus), single, answers, {name: oracle.limit(name, max(gpus)) for name in names}, reasons, notes)


def compare_with(oracle: Oracle, runs: Sequence[MeasuredRun]) -> list[Compared]:
    """Projects every measured run at its own batch, groups and segments. Raises LayerwiseError if a strategy cannot run
    it.
    """
    question = oracle.question

    @cache
    def oracle_of(batch: int, inside: int | None, segments: int | None) -> Oracle:
        wishes = replace(question.wishes, inside=inside or question.wishes.inside)
        segments = segments or question.segments
        return Oracle(replace(question, batch=batch, scaling="strong", wishes=wishes, segments=segments))

    pairs = []
    for number, run in enumerate(runs, start=1):
        try:
            answer = oracle_of(run.batch, run.inside, run.segments).answer(run.strategy, run.gpus)
        except LayerwiseError as error:
            raise LayerwiseError(f"measured run {number}: {error}") from None
        pairs.append((run, answer))
    return compare(pairs)


def plan_of(
    name: str, profile: str, model: CostModel, answer: Answer, *, input_shape: tuple[int, ...] | None = None
) -> Plan:
    """Returns a strategy's answer as a plan that `layerwise.run` executes. `name`, `profile` and `input_shape` are as
    on the command line. Raises LayerwiseError for a pipeline, which cannot be a plan.
    """
    strategy = answer.projection.strategy
    if answer.priced is None or answer.strategy is None:
        raise LayerwiseError(f"{strategy} is not a configuration of every layer, so it cannot be written as a plan")
    dims = sorted({label for config in answer.strategy.values() for label, _ in config.degrees})
    space, best = SearchSpace(model.devices.count, tuple(dims)), replace(answer.priced, name=strategy)
    return make_plan(name, profile, model, space, best, fused=True, input_shape=input_shape)


@dataclass(frozen=True, slots=True)
class Budget:
    """The devices and money that may be spent; None: no limit."""

    gpus: int | None = None
    memory_bytes: float | None = None  # of a device; plans may use less anyway
    seconds: float | None = None  # for an epoch


@dataclass(frozen=True, slots=True)
class Suggestion:
    """The best answer within the budget, and the best of another strategy.

    With a time budget the best is the one with the fewest GPU-seconds an epoch within it, else the fastest.
    """

    best: Answer | None = None
    runner_up: Answer | None = None
    margin: float | None = None  # how much more of that the runner-up takes: 0.1 is 10 %; negative: less
    why: str = ""  # why there is no best one
    gain: float = 1.0  # factor by which the best one exceeds the minimum, within `error`
    error: float = 0.0  # the model's: the fraction of an epoch below which a difference is not significant


def suggest(answers: Sequence[Answer], samples: int, budget: Budget) -> Suggestion:
    """Chooses by samples per second, with overlap. Among answers within the model's error of the best, it prefers data
    parallelism, then fewer devices, then the best.
    """

    def cost(a: Answer) -> float:
        return a.epoch_s(samples) * (a.projection.devices if budget.seconds is not None else 1)

    few = [a for a in answers if _within(a.projection.devices, budget.gpus)]
    if not few:
        return Suggestion(why=f"no strategy in the question uses at most {budget.gpus} GPUs")
    roomy = [a for a in few if a.fits and _within(a.projection.phases.memory_bytes, budget.memory_bytes)]
    if not roomy:
        p = min((a.projection for a in few), key=lambda p: p.phases.memory_bytes)
        need = f"{p.strategy} at {counted(p.devices)}, needs {p.phases.memory_bytes / 2**30:.3g} GiB a device"
        return Suggestion(why=f"none fits into memory: the smallest, {need}")
    quick = [a for a in roomy if _within(a.epoch_s(samples), budget.seconds)]
    if not quick:
        fastest = min(roomy, key=lambda a: a.epoch_s(samples))
        p, hours = fastest.projection, fastest.epoch_s(samples) / 3600
        need = f"{p.strategy} at {counted(p.devices)}, takes {hours:.3g} hours an epoch"
        return Suggestion(why=f"none is fast enough: the fastest, {need}")
    least = min(quick, key=cost)
    near = [a for a in quick if cost(least) >= cost(a) * (1 - max(_most(a), _most(least)))]
    errors = {id(a): error_between(a, least) for a in near}
    tied = [a for a in near if cost(least) >= cost(a) * (1 - errors[id(a)])]
    best = min(tied, key=lambda a: (a.projection.strategy not in ("serial", "data"), a.projection.devices, cost(a)))
    others = (a for a in quick if a.kind != best.kind and a.projection.strategy != best.projection.strategy)
    second = min(others, key=cost, default=None)
    margin = None if second is None else cost(second) / cost(best) - 1
    return Suggestion(best, second, margin, gain=cost(best) / cost(least), error=errors[id(best)])


def error_between(a: Answer, b: Answer) -> float:
    """The model's error of two answers, by the basis of their t_C; for pipelines, as if analytic."""
    return max(ANALYTIC_ERROR if one.priced is None else one.priced.error for one in (a, b))


def _most(a: Answer) -> float:
    """The largest error that the answer can have; it needs no price of its layers."""
    return ANALYTIC_ERROR if a.priced is None else unmeasured_error(a.priced.model)


def _within(value: float, most: float | None) -> bool:
    return most is None or value <= most
