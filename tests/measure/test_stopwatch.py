"""Stopwatch: medians of each part, what is between left out. The clock is made up."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from layerwise.measure.timing import Stopwatch, nothing


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def passes(self, *seconds: float) -> Passing:
        return Passing(self, seconds)


class Passing:
    """Something that takes so long, one call after the other, then over again."""

    def __init__(self, clock: Clock, seconds: tuple[float, ...]) -> None:
        self.clock, self.seconds, self.calls = clock, itertools.cycle(seconds), 0

    def __call__(self) -> None:
        self.clock.now += next(self.seconds)
        self.calls += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: made.now)
    return made


CPU = torch.device("cpu")


def test_medians_of_each_part(clock: Clock) -> None:
    forward, backward, between = clock.passes(1, 2, 9), clock.passes(5), clock.passes(100)
    found = Stopwatch(CPU, budget_s=650.0, least=4, warm=3)([forward, backward], [between, nothing])
    assert found.seconds == pytest.approx((2, 5))  # the odd 9 does not count
    assert found.samples == 5  # in 650 s, where the last of the warm-up took 107 or 114
    assert forward.calls == found.samples + 3


def test_slow_ones_are_repeated_at_least_and_fast_ones_at_most(clock: Clock) -> None:
    slow, fast = clock.passes(50.0), clock.passes(1e-6)
    assert Stopwatch(CPU, budget_s=1.0, least=5)([slow]).samples == 5
    assert Stopwatch(CPU, budget_s=1.0, most=30)([fast]).samples == 30


def test_the_spread_is_of_the_middle_half(clock: Clock) -> None:
    steady, shaky = clock.passes(2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 7.0), clock.passes(1.0, 3.0)
    assert Stopwatch(CPU, budget_s=0.0, least=8, warm=8)([steady]).spread == 0
    assert Stopwatch(CPU, budget_s=0.0, least=8)([shaky]).spread == pytest.approx(1.0)
