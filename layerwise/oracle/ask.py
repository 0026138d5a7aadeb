"""Asks about every strategy at every number of devices, and about measured runs; and which strategy to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel, Progress
from layerwise.cost.price import ANALYTIC_ERROR, unmeasured_error
from layerwise.errors import LayerwiseError
from layerwise.oracle.question import Answer, Oracle, applicable
from layerwise.oracle.runs import Compared, Run, compare
from layerwise.oracle.strategies import Limit, UnreachableError
from layerwise.partition.buckets import BUCKET_BYTES
from layerwise.plan import Plan
from layerwise.search.find import candidate
from layerwise.search.make_plan import make_plan


@dataclass(frozen=True, slots=True)
class Asked:
    """Answers, by strategy and devices."""

    gpus: tuple[int, ...]  # numbers of devices that were asked about
    single: Answer  # one device, over which speed-ups are
    answers: dict[tuple[str, int], Answer]
    limits: dict[str, Limit]  # of each strategy, with the batch of the most devices asked about
    reasons: dict[tuple[str, int], str]  # why there is no answer
    notes: tuple[str, ...]  # what was left out and how to get it

    def speed_up(self, a: Answer) -> float:
        """Samples per second over those of one device."""
        return self.single.epoch_s(1) / a.epoch_s(1)


def ask(
    oracle: Oracle,
    named: Sequence[str],
    gpus: Sequence[int],
    search_up_to: int,
    progress: Progress | None = None,
) -> Asked:
    """The named strategies (default: those that suit the model) at all numbers of devices.

    Where a strategy cannot use a number of them, `reasons` says why. Raises LayerwiseError where none can use any.
    """
    single = oracle.answer("serial", 1)
    if not gpus:
        return Asked((), single, {}, {}, {}, ())
    names = tuple(named) or applicable(oracle.question.graph, oracle.node)
    answers: dict[tuple[str, int], Answer] = {}
    reasons: dict[tuple[str, int], str] = {}
    work = [(name, count) for count in gpus for name in names]
    for done, (name, count) in enumerate(work, start=1):
        if name == names[0]:
            oracle.learn(names, count)
        if name == "layerwise" and count > search_up_to:
            reasons[name, count] = f"layerwise is searched for up to {search_up_to} GPUs: add --search-up-to {count}"
        else:
            try:
                answers[name, count] = oracle.answer(name, count)
            except UnreachableError as error:
                reasons[name, count] = str(error)
        if progress:
            progress(done, len(work))
    if not answers:
        raise LayerwiseError(reasons[names[0], gpus[0]])
    notes = []
    unsearched = [count for name, count in reasons if name == "layerwise" and count > search_up_to]
    if unsearched:
        notes.append(
            f"layerwise: no plan was searched for more than {search_up_to} GPU{'s' * (search_up_to > 1)}; "
            f"--search-up-to {max(unsearched)} does it, and takes minutes."
        )
    limits = {name: oracle.limit(name, max(gpus)) for name in names}
    return Asked(tuple(gpus), single, answers, limits, reasons, tuple(notes))


def compare_with(oracle: Oracle, runs: Sequence[Run]) -> list[Compared]:
    """Projects every measured run at its own batch, groups and segments. LayerwiseError where a strategy cannot."""
    oracles: dict[tuple[int, int | None, int | None], Oracle] = {}
    pairs = []

    def oracle_of(run: Run) -> Oracle:
        key = (run.batch, run.inside, run.segments)
        if key not in oracles:
            q = oracle.question
            wishes = replace(q.wishes, inside=run.inside or q.wishes.inside)
            segments = run.segments or q.segments
            oracles[key] = Oracle(replace(q, batch=run.batch, scaling="strong", wishes=wishes, segments=segments))
        return oracles[key]

    for number, run in enumerate(runs, start=1):
        try:
            pairs.append((run, oracle_of(run).answer(run.strategy, run.gpus)))
        except LayerwiseError as error:
            raise LayerwiseError(f"measured run {number}: {error}") from None
    return compare(pairs)


def plan_of(
    name: str, profile: str, model: CostModel, answer: Answer, *, input_shape: tuple[int, ...] | None = None
) -> Plan:
    """A strategy's answer as a plan that `layerwise.run` executes. `name`, `profile` and `input_shape` as on the
    command line. LayerwiseError for a pipeline, which is no plan.
    """
    strategy = answer.projection.strategy
    if answer.strategy is None:
        raise LayerwiseError(f"{strategy} is not a configuration for every layer, so it cannot be written as a plan")
    dims = sorted({label for config in answer.strategy.values() for label, _ in config.degrees})
    space = SearchSpace(model.devices.count, tuple(dims))
    bucket_bytes = answer.searched.best.bucket_bytes if answer.searched else BUCKET_BYTES
    best = candidate(model, strategy, answer.strategy, bucket_bytes=bucket_bytes)
    return make_plan(name, profile, model, space, best, fused=True, input_shape=input_shape)


@dataclass(frozen=True, slots=True)
class Budget:
    """The devices and money that may be used; None: no limit."""

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
