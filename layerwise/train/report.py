"""The report of a run: its beginning, a line or a progress bar for its steps, and its end; also as JSON values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from layerwise.comm.base import TrafficKind
from layerwise.plan import Plan
from layerwise.quantities import interval, samples, units
from layerwise.report.content import Table, facts
from layerwise.train.compare import Difference
from layerwise.train.loop import Step
from layerwise.train.score import Score

KINDS: tuple[TrafficKind, ...] = ("transfers", "sync", "gathers", "statistics")


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a run."""

    plan: Plan
    steps: list[Step]
    first: int  # steps done by the run that was resumed
    score: Score | None  # on the held-out samples; None if it is not defined
    classes: Sequence[str]  # whose Dice is reported
    sent: Mapping[TrafficKind, float] | None  # bytes a step, of all ranks; None without a full step
    planned: Mapping[TrafficKind, float | None]  # the same from `ParallelModule.predicted_bytes`
    compare: Difference | None
    held_out_loss: float | None = None  # of the model's own loss over held-out batches, or None
    resident_bytes: int | None = None  # the peak host memory of any rank, PyTorch included

    @property
    def step_time_s(self) -> float | None:
        """Returns the median of the steps' times, in seconds."""
        return median(step.seconds for step in self.steps) if self.steps else None

    @property
    def accuracy(self) -> float | None:
        """Returns the fraction of the held-out samples, or of their positions, that is predicted right."""
        return None if self.score is None else self.score.accuracy

    @property
    def dice(self) -> dict[str, float | None] | None:
        """Returns the Dice score of each named class; None for a class that does not occur."""
        if self.score is None or not self.classes:
            return None
        return dict(zip(self.classes, self.score.dice, strict=False))

    @property
    def predicted(self) -> dict[TrafficKind, float | None]:
        """Returns the bytes that the plan predicts, to compare with `sent`."""
        return {k: None if (each := self.planned[k]) is None else _integer(each) for k in KINDS}

    def as_dict(self) -> dict[str, object]:
        """Returns the result as JSON values; nan and infinity become null."""
        compare = None if self.compare is None else {k: _finite(v) for k, v in self.compare.as_dict().items()}
        return {
            "model": self.plan.model,
            "io": self.plan.io,
            "world_size": self.plan.gpus,
            "steps": len(self.steps),
            "losses": [_finite(step.loss) for step in self.steps],
            "accuracy": self.accuracy,
            "dice": self.dice,
            "held_out_loss": None if self.held_out_loss is None else _finite(self.held_out_loss),
            "step_time_s": self.step_time_s,
            "peak_resident_bytes": self.resident_bytes,
            "bytes_sent": None if self.sent is None else {kind: _integer(self.sent[kind]) for kind in KINDS},
            "bytes_predicted": self.predicted,
            "compare": compare,
        }


def beginning(plan: Plan, *, data: str, training: str) -> Table:
    """Returns a table of what will run."""
    predicted = plan.predicted
    ranks, batch = f"{plan.gpus} rank{'s' * (plan.gpus > 1)}", samples(plan.batch)
    rows = [("plan", f"{plan.model} on {ranks}, {batch} a batch, io {plan.io}")]
    if "timeline_s" in predicted:
        step_s = predicted["timeline_s"]
        ends_s = predicted.get("timeline_low_s", step_s), predicted.get("timeline_high_s", step_s)
        seconds, profile = interval(step_s, *ends_s, "s"), plan.provenance.get("profile")
        rows.append(("predicted", f"{seconds} a step, on the machine of the profile {profile}"))
    if isinstance(said := plan.provenance.get("gradients"), str):
        rows.append(("gradients", said))
    return facts([*rows, ("data", data), ("training", training)])


def ending(result: Result, allowed: float, dtype: str) -> Table:
    """Returns the table of the result."""
    return facts(_ending(result, allowed, dtype))


def _ending(result: Result, allowed: float, dtype: str) -> Iterator[tuple[str, str]]:
    steps, seconds = result.steps, result.step_time_s
    if steps and seconds is not None:
        yield "loss", f"{steps[0].loss:.6g} in step {steps[0].number}, {steps[-1].loss:.6g} in {steps[-1].number}"
        rate = sum(step.samples for step in steps) / max(sum(step.seconds for step in steps), 1e-9)
        yield "step time", f"{units(seconds, 's')} (median), {rate_text(rate)}"
    if result.resident_bytes is not None:
        yield "host memory", f"{units(result.resident_bytes, 'B')} at most on any rank, PyTorch included"
    if result.accuracy is not None:
        yield "accuracy", f"{result.accuracy:.2%} of the held-out samples"
    if result.dice is not None:
        each = (f"{name} {'nowhere' if dice is None else f'{dice:.3f}'}" for name, dice in result.dice.items())
        yield "Dice", f"{', '.join(each)} on the held-out samples"
    if result.held_out_loss is not None:
        yield "held-out loss", f"{result.held_out_loss:.6g}"
    if result.sent is not None:
        for kind in KINDS:
            predicted = result.predicted[kind]
            prediction = "" if predicted is None else f" (predicted: {units(predicted, 'B')})"
            yield f"{kind} sent", f"{units(result.sent[kind], 'B')} a step, all ranks{prediction}"
    if result.compare is not None:
        beyond = result.compare.beyond(allowed)
        for name, value in result.compare.as_dict().items():
            where = f", {result.compare.worst[name]}" if value and result.compare.worst.get(name, name) != name else ""
            verdict = f" — more than {allowed:.0e}, which {dtype} allows" if name in beyond else ""
            if verdict and dtype != "float64":  # Adam makes a full step even from a gradient that is only rounding
                verdict += "; --dtype float64 tells rounding from an error"
            yield f"{name} off by", f"{value:.2e} of one device's{where}{verdict}"


@contextmanager
def steps_shown(out: Console, steps: int, first: int) -> Iterator[Callable[[Step], None]]:
    """Yields a function that shows a step: in a progress bar with loss and throughput on a terminal, else as a line."""
    if not out.is_terminal:
        yield lambda step: out.print(line(step, steps), soft_wrap=True)
        return
    now = TextColumn("{task.fields[now]}")
    columns = TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), now
    with Progress(*columns, console=out, transient=True) as bar:
        task = bar.add_task("", total=steps, completed=first, now="")

        def show(step: Step) -> None:
            note = f"loss {step.loss:.4f}, {rate_text(step.samples / max(step.seconds, 1e-9))}"
            bar.update(task, completed=step.number, now=note)

        yield show


def line(step: Step, steps: int) -> str:
    """`step 12/170  epoch 1  loss 2.3021  8.14 ms  983 samples/s`."""
    rate = rate_text(step.samples / max(step.seconds, 1e-9))
    return f"step {step.number}/{steps}  epoch {step.epoch}  loss {step.loss:.6g}  {units(step.seconds, 's')}  {rate}"


def rate_text(samples_per_s: float) -> str:
    """Returns `983 samples/s`; below ten with two digits, as a volume takes seconds."""
    return f"{samples_per_s:,.0f} samples/s" if samples_per_s >= 10 else f"{samples_per_s:.2g} samples/s"


def _integer(number: float) -> float:
    """Returns an int if the number is one."""
    return int(number) if float(number).is_integer() else number


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
