"""Asks about every strategy at every number of devices, and about measured runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel, Progress
from layerwise.errors import LayerwiseError
from layerwise.oracle.question import Answer, Oracle, applicable
from layerwise.oracle.runs import Compared, Run, compare
from layerwise.oracle.strategies import Limit, UnreachableError
from layerwise.partition.buckets import BUCKET_BYTES
from layerwise.plan import Plan
from layerwise.search.find import candidate
from layerwise.search.make_plan import plan_for


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
    return plan_for(name, profile, model, space, best, fused=True, input_shape=input_shape)
