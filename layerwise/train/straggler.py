"""Stragglers: of ranks that do as much, the one that takes longest for its layers, time after time; all wait for it."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

from layerwise.run.guards.hooks import is_compiled
from layerwise.run.parallel import ParallelModule
from layerwise.run.schedule.schedule import places
from layerwise.run.trace import Span, Trace

EVERY, FIRST, STEPS = 50, 10, 3  # of 50 steps, those from the tenth to the twelfth are timed, and the fastest counts
LOOKS = 3  # in a row that name the same rank
FACTOR = 1.25  # of the other ranks' median
MATTERS = 0.02  # of a step: what is less slows nobody
Look = tuple[str, float, float]  # a rank's host, its layers' measured seconds, and their ratio to predicted ones


@dataclass(slots=True)
class Stragglers:
    """Finds a straggler by times of layers in some forward passes, where nobody waits. Every rank has one."""

    module: ParallelModule
    _times: list[tuple[float, float]] = field(default_factory=list)  # seconds and ratios of the steps that are timed
    _expected_s: Mapping[str, float] | None = None
    _rank: int = -1  # that was slowest at the last look
    _looks: int = 0  # in a row at which it was

    @contextmanager
    def timed(self, number: int) -> Iterator[None]:
        """Times a step's layers, if it is its turn, nobody traces it, and there is something to compare them with."""
        module = self.module
        turn = FIRST <= number % EVERY < FIRST + STEPS and module.comm.size > 1 and module.trace is None
        if turn and self._expected_s is None:
            self._expected_s = self._expected()
        if not (turn and self._expected_s):
            yield
            return
        module.trace = trace = Trace(device=module.device)
        try:
            yield
        finally:
            module.trace = None
        self._times.append(self._time(trace.spans()))

    def look(self) -> Look | None:
        """Returns what this rank tells the others; None: nothing new."""
        if len(self._times) < STEPS:
            return None
        times, self._times = self._times, []
        return platform.node(), *min(times)

    def named(self, looks: Sequence[Look | None], step_s: float) -> str | None:
        """Returns a sentence on the rank that was slowest at the last looks, once. looks: of all ranks."""
        told = {rank: look for rank, look in enumerate(looks) if look is not None and look[1] > 0}
        if len(told) < 2:
            return None
        slowest = max(told, key=lambda rank: told[rank][2])
        host, seconds, ratio = told.pop(slowest)
        others_s, others = median(look[1] for look in told.values()), median(look[2] for look in told.values())
        # The smallest part of a layer has the largest ratio, by what every call takes, but nobody waits for it.
        slow = ratio > FACTOR * others and seconds > FACTOR * others_s and seconds - others_s > MATTERS * step_s
        self._looks = self._looks + 1 if slow and slowest == self._rank else int(slow)
        self._rank = slowest
        if self._looks != LOOKS:
            return None
        return (
            f"rank {slowest} on {host} takes {ratio / others:.1f} times as long for its layers as the other ranks do, "
            f"at each of the last {LOOKS} looks: every step waits for it"
        )

    def _time(self, spans: Sequence[Span]) -> tuple[float, float]:
        """Seconds of this rank's layers forward, and their ratio to what the plan predicts of them forward and back.

        The latter is too small on all ranks alike. Back, a layer's time may include waiting for sums of gradients.
        """
        expected = self._expected_s or {}
        measured: dict[str, float] = {}
        for span in spans:
            if span.category == "compute" and span.name in expected:
                measured[span.name] = measured.get(span.name, 0.0) + span.end_s - span.start_s
        predicted = sum(expected[layer] for layer in measured)
        seconds = sum(measured.values())
        return seconds, seconds / predicted if predicted else 0.0

    def _expected(self) -> dict[str, float]:
        """The plan's seconds of each layer, which are the largest part's, by the size of this rank's part.

        Layers whose devices talk to each other while they compute are left out: their times include waiting. There are
        none of a compiled model, which would be compiled anew for each look.
        """
        module, expected = self.module, dict[str, float]()
        if module.options.compile is not None or any(is_compiled(m) for m in module.modules()):
            return expected
        of_layer = places(module.graph, module.plan)
        for name, times in module.plan.predicted_layers.items():
            if name in of_layer and not times.get("statistics_s"):
                volume = of_layer[name].computed.volume
                part = float(volume[module.comm.rank] / volume.max())
                if (seconds := times.get("compute_s", 0.0) * part) > 0:
                    expected[name] = seconds
        return expected
