"""Measured runs beside their projections: accuracy as the paper defines it, and runs that are out of line.

The command's help says what is in a file of them.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from layerwise.errors import LayerwiseError
from layerwise.files import read_json
from layerwise.machine import MAX_GPUS
from layerwise.machine.fields import Field
from layerwise.oracle.names import known
from layerwise.oracle.question import Answer
from layerwise.plan import MAX_BATCH

FENCE = 1.5  # Tukey, Exploratory Data Analysis (1977): outliers are beyond the quartiles by 1.5 times their distance
MUCH = 1.1  # ... and above the median by a tenth: equal times have no spread, and each beyond them is no outlier
SHARE = 0.05  # of a run's iterations: so many outliers are worth a word
FOR = {"inside": ("df", "ds"), "segments": ("pipeline",)}  # fields that only some strategies have
MOST = {"gpus": MAX_GPUS, "batch": MAX_BATCH, "samples": 10**15, "inside": MAX_GPUS, "segments": MAX_BATCH}
SECONDS = 1e-12, 1e12  # of what can have been measured; beyond, ratios leave the range of floats
ENOUGH = 4  # measurements that have quartiles


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A measured run."""

    strategy: str
    gpus: int
    batch: int
    iteration_s: float  # the median, where several iterations were measured
    inside: int | None = None
    segments: int | None = None
    iterations: int = 1  # that were measured
    slow: int = 0  # how many of these are outliers


@dataclass(frozen=True, slots=True)
class Compared:
    """A run and its projection."""

    run: MeasuredRun
    answer: Answer
    projected_s: float  # with overlap
    abnormal: str = ""  # why it is out of line

    @property
    def accuracy(self) -> float:
        """1 - |projected - measured| / measured."""
        return accuracy(self.projected_s, self.run.iteration_s)


def accuracy(projected_s: float, measured_s: float) -> float:
    """The paper's: 1 - |projected - measured| / measured. Negative where the projection is more than twice too long."""
    return 1 - abs(projected_s - measured_s) / measured_s


def read_runs(path: str | os.PathLike[str]) -> list[MeasuredRun]:
    """The runs of a file. LayerwiseError names the run and the field that is missing or wrong."""
    document = Field(f"measured file {os.fspath(path)!r}", "", read_json(path, "measured file"))
    runs = document if isinstance(document.value, list) else document.members(("runs",))["runs"]
    return [_run(run) for run in runs.items()]


def _run(run: Field) -> MeasuredRun:
    given = run.members(("strategy", "gpus", "batch"), ("iteration_s", "epoch_s", "samples", *FOR))
    named = given["strategy"].text()
    try:
        name = known(named)
    except LayerwiseError as error:
        raise given["strategy"].error(str(error)) from None
    for key, names in FOR.items():
        if key in given and name not in names:
            raise given[key].error(f"is for {' and '.join(names)}, not for {name}")
    counts = {key: given[key].count(most) for key, most in MOST.items() if key in given}
    epoch_s = _seconds(given["epoch_s"]) if "epoch_s" in given else None
    if "iteration_s" in given:
        measured = given["iteration_s"]
        times = [_seconds(time) for time in (measured.items() if isinstance(measured.value, list) else [measured])]
    elif epoch_s is not None and "samples" in given:
        times = [epoch_s * counts["batch"] / counts["samples"]]
    else:
        raise run.error("has neither 'iteration_s' nor 'epoch_s' with 'samples', in seconds")
    fence = _fence(times)
    slow = len([time for time in times if time > fence])
    inside, segments = (counts.get(key) for key in FOR)
    return MeasuredRun(
        name, counts["gpus"], counts["batch"], statistics.median(times), inside, segments, len(times), slow
    )


def _seconds(field: Field) -> float:
    least, most = SECONDS
    if not least <= (value := field.plain_number()) <= most:
        raise field.error(f"expected seconds from {least:g} to {most:g}, found {value:g}")
    return value


def _fence(values: Sequence[float]) -> float:
    """Above it, a value is an outlier; infinity for fewer values than have quartiles."""
    if len(values) < ENOUGH:
        return math.inf
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return max(third + FENCE * (third - first), MUCH * statistics.median(values))


def compare(pairs: Sequence[tuple[MeasuredRun, Answer]]) -> list[Compared]:
    """Runs, each beside its projection; abnormal ones are slower against it than the other runs of their strategy are.

    That is what congestion by others does: the projection knows of the training's own traffic only.
    """
    ratios = [(run.strategy, run.iteration_s / answer.overlapped_s) for run, answer in pairs]
    result = []
    for (run, answer), (name, ratio) in zip(pairs, ratios, strict=True):
        usual, notes = [other for strategy, other in ratios if strategy == name], []
        if ratio > _fence(usual):
            median = statistics.median(usual)
            notes.append(f"{ratio:.2f}× its projection, where runs of {name} take {median:.2f}×: congestion?")
        if run.slow > SHARE * run.iterations:
            notes.append(f"{run.slow} of {run.iterations} iterations are outliers")
        result.append(Compared(run, answer, answer.overlapped_s, "; ".join(notes)))
    return result


def mean_accuracy(compared: Sequence[Compared]) -> dict[str, float]:
    """The mean accuracy of each strategy's runs, abnormal ones included."""
    accuracies: dict[str, list[float]] = {}
    for c in compared:
        accuracies.setdefault(c.run.strategy, []).append(c.accuracy)
    return {name: statistics.fmean(values) for name, values in accuracies.items()}
