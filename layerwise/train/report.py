"""The report of a run: its beginning, a line or a bar for its steps, its end; and the same for programs."""

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
    first: int  # steps done before, by the run that was resumed
    score: Score | None  # on the held-out samples; None where that is not defined
    classes: Sequence[str]  # of which the Dice is told
    sent: Mapping[TrafficKind, float] | None  # bytes a step, of all ranks together; None where there was no whole step
    planned: Mapping[TrafficKind, float | None]  # the same as `ParallelModule.predicted_bytes` has it
    compare: Difference | None
    held_out_loss: float | None = None  # the model's own, the mean of held-out batches; None where it has none
    resident_bytes: int | None = None  # of the host's memory, the most that any rank has had, PyTorch included

    @property
    def step_time_s(self) -> float | None:
        """The median of the steps' times, in seconds."""
        return median(step.seconds for step in self.steps) if self.steps else None

    @property
    def accuracy(self) -> float | None:
        """The part of the held-out samples, or of their positions, that is predicted right."""
        return None if self.score is None else self.score.accuracy

    @property
    def dice(self) -> dict[str, float | None] | None:
        """The Dice score by class, of those that have names; None of a class that is nowhere."""
        if self.score is None or not self.classes:
            return None
        return dict(zip(self.classes, self.score.dice, strict=False))

    @property
    def predicted(self) -> dict[TrafficKind, float | None]:
        """The bytes that the plan predicts, to compare with `sent`."""
        return {k: None if (each := self.planned[k]) is None else _integer(each) for k in KINDS}

    def as_dict(self) -> dict[str, object]:
        """Returns the result for programs. What is not a number is null, as JSON has it."""
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
    """The lines on what will be run."""
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
    """The table of the result."""
    return facts(_ending(result, allowed, dtype))


def _ending(result: Result, allowed: float, dtype: str) -> Iterator[tuple[str, str]]:
    steps, seconds = result.steps, result.step_time_s
    if steps and seconds is not None:
        yield "loss", f"{steps[0].loss:.6g} in step {steps[0].number}, {steps[-1].loss:.6g} in {steps[-1].number}"
        rate = sum(step.samples for step in steps) / max(sum(step.seconds for step in steps), 1e-9)
        yield "step time", f"{units(seconds, 's')} (median), {rate_text(rate)}"
    if result.resident_bytes is not None:
        yield "host memory", f"{units(result.resident_bytes, 'B')} at most of any rank, PyTorch itself included"
    if result.accuracy is not None:
        yield "accuracy", f"{result.accuracy:.2%} of the held-out samples"
    if result.dice is not None:
        each = (f"{name} {'nowhere' if dice is None else f'{dice:.3f}'}" for name, dice in result.dice.items())
        yield "Dice", f"{', '.join(each)} of what is held out"
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
            if verdict and dtype != "float64":  # Adam makes a step of a gradient that is rounding alone
                verdict += "; --dtype float64 tells rounding from a fault"
            yield f"{name} off by", f"{value:.2e} of one device's{where}{verdict}"


@contextmanager
def steps_shown(out: Console, steps: int, first: int) -> Iterator[Callable[[Step], None]]:
    """A bar with loss and throughput on a terminal, else a line a step."""
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
    """`983 samples/s`; less than ten with two digits, for a volume takes seconds."""
    return f"{samples_per_s:,.0f} samples/s" if samples_per_s >= 10 else f"{samples_per_s:.2g} samples/s"


def _integer(number: float) -> float:
    """An int where it is one."""
    return int(number) if float(number).is_integer() else number


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
