"""Measured runs and their projections: accuracy as the paper defines it, and abnormal runs.

The command's help describes the file format.
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
MUCH = 1.1  # and 10 % above the median: with equal times, every deviation would be an outlier
SHARE = 0.05  # of a run's iterations: this many outliers deserve a note
FOR = {"inside": ("df", "ds"), "segments": ("pipeline",)}  # fields that only some strategies have
MOST = {"gpus": MAX_GPUS, "batch": MAX_BATCH, "samples": 10**15, "inside": MAX_GPUS, "segments": MAX_BATCH}
SECONDS = 1e-12, 1e12  # the range of possible measurements; beyond it, ratios exceed floats
ENOUGH = 4  # measurements needed for quartiles


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A measured run."""

    strategy: str
    gpus: int
    batch: int
    iteration_s: float  # the median, if several iterations were measured
    inside: int | None = None
    segments: int | None = None
    iterations: int = 1  # number measured
    slow: int = 0  # number of outliers among them


@dataclass(frozen=True, slots=True)
class Compared:
    """A run and its projection."""

    run: MeasuredRun
    answer: Answer
    projected_s: float  # with overlap
    abnormal: str = ""  # why it is abnormal

    @property
    def accuracy(self) -> float:
        """1 - |projected - measured| / measured."""
        return accuracy(self.projected_s, self.run.iteration_s)


def accuracy(projected_s: float, measured_s: float) -> float:
    """The paper's accuracy: 1 - |projected - measured| / measured. Negative if the projection is over twice as long."""
    return 1 - abs(projected_s - measured_s) / measured_s


def read_runs(path: str | os.PathLike[str]) -> list[MeasuredRun]:
    """The runs in a file. Raises LayerwiseError that names the run and the missing or wrong field."""
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
    """The value above which others are outliers; infinity for too few values."""
    if len(values) < ENOUGH:
        return math.inf
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return max(third + FENCE * (third - first), MUCH * statistics.median(values))


def compare(pairs: Sequence[tuple[MeasuredRun, Answer]]) -> list[Compared]:
    """Runs with their projections; a run is abnormal if it is slower, relative to its projection, than others of its
    strategy.

    Congestion by others has that effect: the projection knows only the training's own traffic.
    """
    ratios = [(run.strategy, run.iteration_s / answer.overlapped_s) for run, answer in pairs]
    result = []
    for (run, answer), (name, ratio) in zip(pairs, ratios, strict=True):
        usual, notes = [other for strategy, other in ratios if strategy == name], []
        if ratio > _fence(usual):
            median = statistics.median(usual)
            notes.append(f"{ratio:.2f}× its projection, while other runs of {name} take {median:.2f}×: congestion?")
        if run.slow > SHARE * run.iterations:
            notes.append(f"{run.slow} of {run.iterations} iterations are outliers")
        result.append(Compared(run, answer, answer.overlapped_s, "; ".join(notes)))
    return result


def mean_accuracy(compared: Sequence[Compared]) -> dict[str, float]:
    """The mean accuracy of each strategy's runs, including abnormal ones."""
    accuracies: dict[str, list[float]] = {}
    for c in compared:
        accuracies.setdefault(c.run.strategy, []).append(c.accuracy)
    return {name: statistics.fmean(values) for name, values in accuracies.items()}
