"""StepCheck: compares the time of training steps with the plan's prediction, once, after some twenty steps.

A prediction that is off by several times is reported after eight steps.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Protocol

import torch

from layerwise.plan import Plan
from layerwise.quantities import interval, units
from layerwise.run.execute.reducer import WAITING
from layerwise.trace import Span, Trace, now_s

FIRST, STEPS = 10, 10  # steps not timed, as they select kernels and connect; and steps timed
EARLY = 2, 5, 3  # steps not timed at first; after how many steps a first look is taken; steps timed if that is far off
FAR = 3.0  # times beyond the range
MESSAGES = ("transfers", "statistics")
LIMITS = ("timeline_low_s", "timeline_high_s")
SMALL = 0.01  # of a step: less is not reported


class Timed(Protocol):
    """What is timed: a model's run."""

    device: torch.device
    trace: Trace | None
    step_check: StepCheck | None


class StepCheck:
    """Times some steps of this rank, forward and backward, and reports them if they leave the predicted range.

    Ranks do not communicate about it. It collects spans while it times; before, a step costs two comparisons.
    """

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        self.plan, self.say = plan, say
        self.outcome: dict[str, dict[str, float]] = {}  # predicted and measured seconds, once it is over
        step_s = sum(plan.predicted[key] for key in ("forward_s", "backward_s", "exposed_sync_s"))
        # Without the optimizer's step, which the loop takes.
        self._predicted_s = (step_s, *(step_s * plan.predicted[key] / plan.predicted["timeline_s"] for key in LIMITS))
        self._first, self._steps = FIRST, STEPS
        self._seconds: list[float] = []
        self._began_s: float | None = None  # start of the forward pass whose backward pass is to come
        self._passes = 0
        self._trace: Trace | None = None  # the trace that it has set

    @classmethod
    def of(cls, plan: Plan, say: Callable[[str], None]) -> StepCheck | None:
        """Returns a check; None for a plan that runs on one device or predicts no range."""
        return cls(plan, say) if plan.gpus > 1 and "timeline_low_s" in plan.predicted else None

    def begin(self, run: Timed) -> None:
        """Begins a training forward pass. One without a backward pass, or with a shared one, ends the check."""
        if self._began_s is not None:
            self._end(run)
            return
        if self._passes >= self._first and run.trace is None:
            run.trace = self._trace = Trace(device=run.device)
        timed = self._passes >= self._first or EARLY[0] <= self._passes < EARLY[1]
        self._began_s = now_s(run.device) if timed else 0.0

    def end(self, run: Timed, *, summed: bool) -> None:
        """Ends a backward pass. summed: whether it summed gradients, which it does not within no_sync."""
        began_s, self._began_s = self._began_s, None
        if began_s is None or not summed:
            return
        self._passes += 1
        if began_s:
            self._seconds.append(now_s(run.device) - began_s)
        if self._passes == EARLY[1]:
            (_, low_s, high_s), took_s = self._predicted_s, median(self._seconds)
            if not low_s / FAR <= took_s <= high_s * FAR:
                self._first, self._steps = EARLY[1:]
            self._seconds = []
        elif len(self._seconds) == self._steps:
            self._tell([] if self._trace is None else self._trace.spans())
            self._end(run)

    def _end(self, run: Timed) -> None:
        if self._trace is not None:
            run.trace = self._trace = None
        run.step_check = None

    def _tell(self, spans: list[Span]) -> None:
        predicted, layers = self.plan.predicted, self.plan.predicted_layers.values()
        (step_s, low_s, high_s), took_s = self._predicted_s, median(self._seconds)
        parts = {
            "layers": (
                sum(layer.get("compute_s", 0.0) for layer in layers),
                sum(span.end_s - span.start_s for span in spans if span.category == "compute") / self._steps,
            ),
            "messages": (
                predicted["exposed_sync_s"]
                + sum(layer.get(f"{category}_s", 0.0) for layer in layers for category in MESSAGES),
                sum(s.end_s - s.start_s for s in spans if s.category in MESSAGES or s.name == WAITING) / self._steps,
            ),
        }
        self.outcome = {
            name: {"predicted_s": before_s, "measured_s": now_s}
            for name, (before_s, now_s) in ({"step": (step_s, took_s)} | (parts if spans else {})).items()
        }
        if low_s <= took_s <= high_s:
            return
        told = [
            f"{name} take {now_s / before_s:.1f} times the prediction"
            for name, (before_s, now_s) in parts.items()
            if spans and before_s > SMALL * step_s
        ]
        self.say(
            f"forward and backward take {units(took_s, 's')} a step, but the prediction was "
            f"{interval(step_s, low_s, high_s, 's')}"
            f"{': ' + ', '.join(told) + ' (waiting for other ranks is in messages)' if told else ''}. "
            "The plan may not be the best one here: measure again under the load of training, or race the best plans "
            "(ParallelOptions(race=3), layerwise.run --race 3)"
        )
