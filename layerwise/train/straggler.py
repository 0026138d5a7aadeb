"""Stragglers: of ranks that do as much, the one that takes longest for its layers, time after time; all wait for it."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

from layerwise.run.guards.hooks import is_compiled
from layerwise.run.parallel import ParallelModule, of
from layerwise.run.schedule.schedule import places
from layerwise.trace import Span, Trace

EVERY, FIRST, STEPS = 50, 10, 3  # of 50 steps, those from the tenth to the twelfth are timed, and the fastest counts
LOOKS = 3  # in a row that name the same rank
FACTOR = 1.25  # of the other ranks' median
MATTERS = 0.02  # of a step: what is less slows nobody
Times = dict[str, tuple[float, float]]  # by layer: measured seconds, and predicted ones of this rank's part
Look = tuple[str, Times]  # with the rank's host


@dataclass(slots=True)
class Stragglers:
    """Finds a straggler by times of layers in some forward passes, where nobody waits. Every rank has one."""

    module: ParallelModule
    _times: list[Times] = field(default_factory=list)  # of the steps that are timed
    _expected_s: Mapping[str, float] | None = None
    _rank: int = -1  # that was slowest at the last look
    _looks: int = 0  # in a row at which it was

    @contextmanager
    def timed(self, number: int) -> Iterator[None]:
        """Times a step's layers, if it is its turn, nobody traces it, and there is something to compare them with."""
        module = self.module
        turn = FIRST <= number % EVERY < FIRST + STEPS and of(module).comm.size > 1 and of(module).trace is None
        if turn and self._expected_s is None:
            self._expected_s = self._expected()
        if not (turn and self._expected_s):
            yield
            return
        of(module).trace = trace = Trace(device=of(module).device)
        try:
            yield
        finally:
            of(module).trace = None
        self._times.append(self._time(trace.spans()))

    def look(self) -> Look | None:
        """Returns what this rank tells the others; None: nothing new."""
        if len(self._times) < STEPS:
            return None
        times, self._times = self._times, []
        return platform.node(), min(times, key=lambda one: sum(measured_s for measured_s, _ in one.values()))

    def named(self, looks: Sequence[Look | None], step_s: float) -> str | None:
        """Returns a sentence on the rank that was slowest at the last looks, once. looks: of all ranks."""
        told = {rank: look for rank, look in enumerate(looks) if look is not None and look[1]}
        common = set.intersection(*(set(times) for _, times in told.values())) if len(told) > 1 else set()
        if not common:  # no layer is on all of these ranks
            return None
        seconds, ratios = dict[int, float](), dict[int, float]()
        for rank, (_, times) in told.items():
            measured_s, expected_s = (sum(times[layer][i] for layer in common) for i in (0, 1))
            seconds[rank], ratios[rank] = measured_s, measured_s / expected_s
        slowest = max(ratios, key=lambda rank: ratios[rank])
        ratio, seconds_s = ratios.pop(slowest), seconds.pop(slowest)
        others, others_s = median(ratios.values()), median(seconds.values())
        # The smallest part of a layer has the largest ratio, by what every call takes, but nobody waits for it.
        slow = ratio > FACTOR * others and seconds_s > FACTOR * others_s and seconds_s - others_s > MATTERS * step_s
        self._looks = self._looks + 1 if slow and slowest == self._rank else int(slow)
        self._rank = slowest
        if self._looks != LOOKS:
            return None
        return (
            f"rank {slowest} on {told[slowest][0]} takes {ratio / others:.1f} times as long for its layers as the "
            f"other ranks do, at each of the last {LOOKS} looks: every step waits for it"
        )

    def _time(self, spans: Sequence[Span]) -> Times:
        """Seconds of this rank's layers forward, beside those that the plan predicts of them forward and back.

        The latter are too many on all ranks alike. Back, a layer's time may include waiting for sums of gradients.
        """
        expected = self._expected_s or {}
        measured: dict[str, float] = {}
        for span in spans:
            if span.category == "compute" and span.name in expected:
                measured[span.name] = measured.get(span.name, 0.0) + span.end_s - span.start_s
        return {layer: (seconds, expected[layer]) for layer, seconds in measured.items()}

    def _expected(self) -> dict[str, float]:
        """The plan's seconds of each layer, which are the largest part's, by the size of this rank's part.

        Layers whose devices talk to each other while they compute are left out: their times include waiting. There are
        none of a compiled model, which would be compiled anew for each look.
        """
        module, expected = self.module, dict[str, float]()
        if of(module).runtime_options.compile is not None or any(is_compiled(m) for m in module.modules()):
            return expected
        of_layer = places(of(module).layer_graph, of(module).plan)
        for name, times in of(module).plan.predicted_layers.items():
            if name in of_layer and not times.get("statistics_s"):
                volume = of_layer[name].computed.volume
                part = float(volume[of(module).comm.rank] / volume.max())
                if (seconds := times.get("compute_s", 0.0) * part) > 0:
                    expected[name] = seconds
        return expected
