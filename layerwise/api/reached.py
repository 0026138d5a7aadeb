"""Reached: how far a training by `fit` has come, which checkpoints tell; and where signals end it."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from layerwise.checkpoint import STOPPED
from layerwise.errors import LayerwiseError
from layerwise.train.data import StepSampler
from layerwise.train.loop import until_next
from layerwise.train.saving import Saving


@dataclass(slots=True)
class Reached:
    """The progress of a training: full epochs, and what of the next is done."""

    epochs: int = 0
    steps: int = 0
    samples: int = 0
    loss: float = 0.0  # the sum over these samples

    @classmethod
    def of(cls, progress: Mapping[str, Any], sampler: StepSampler, order: Mapping[str, bool]) -> Reached:
        """Returns what a checkpoint says. LayerwiseError where its steps had other samples than they have here.

        order: What else the samples of an epoch's steps depend on.
        """
        steps, samples, loss = progress.get("within_epoch", (0, 0, 0.0))
        reached = cls(int(progress["epochs"]), steps, samples, float(loss))
        for what, here in order.items():
            if steps and progress.get(what, here) != here:
                raise LayerwiseError(
                    f"the checkpoint was written within an epoch with {what}={progress[what]}, here it is {here}: give "
                    "the same"
                )
        taken = sampler.steps(reached.epochs)[: reached.steps]
        if sum(len(numbers) for batches in taken for numbers in batches) != reached.samples:
            raise LayerwiseError(
                "the checkpoint was written within an epoch, whose last batches have other samples on these ranks: "
                "resume on as many as wrote it"
            )
        return reached

    def progress(self) -> dict[str, Any]:
        """Returns what a checkpoint is to say. The loss is text, as JSON has no infinity."""
        return {"epochs": self.epochs, "within_epoch": [self.steps, self.samples, repr(self.loss)]}


class Look:
    """A callback after every batch of an evaluation: it saves, and may end the training, where a signal asks for it."""

    def __init__(self, saving: Saving, done: int) -> None:
        self._saving, self._done = saving, done
        self._batches, self._next, self._began = 0, 1, time.perf_counter()  # since ranks last met

    def __call__(self) -> None:
        self._batches += 1
        if self._batches == self._next:
            pace_s = (time.perf_counter() - self._began) / self._batches
            self._next = until_next(max(self._saving.comm.all_gather_object(pace_s)))
            self._batches, self._began = 0, time.perf_counter()
            end_if_asked(self._saving, self._done)


def end_if_asked(saving: Saving, done: int) -> None:
    """Saves where a signal asks for it; SystemExit where that is SIGTERM."""
    if saving.asked(done):
        sys.exit(STOPPED)
