"""Rounds that the host disturbs do not count."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
import torch

from layerwise.comm.base import Comm
from layerwise.measure import timing
from layerwise.measure.timing import MOST, ROUNDS, TRIES, timed

WARM = 2  # calls that do not count


@dataclass
class Alone:
    """A single rank."""

    device = torch.device("cpu")

    def barrier(self) -> None:
        """There is nobody to wait for."""

    def all_gather_object(self, value: object) -> list[object]:
        return [value]


class Machine:
    """Rounds take a second each, and longer by what the host takes."""

    def __init__(self, takes: Callable[[int], float]) -> None:
        self.now = self.taken = 0.0
        self.calls, self.takes = 0, takes

    def operation(self) -> None:
        took = self.takes(self.calls)
        self.calls += 1
        self.taken += took
        self.now += 1.0 + took


Made = Callable[[Callable[[int], float]], Machine]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Made:
    def made(takes: Callable[[int], float]) -> Machine:
        found = Machine(takes)
        monkeypatch.setattr(timing, "stolen_s", lambda: found.taken)
        monkeypatch.setattr(timing, "now_s", lambda _: found.now)
        monkeypatch.setattr("os.cpu_count", lambda: 2)
        return found

    return made


def seconds(machine: Machine) -> float:
    return timed(cast(Comm, Alone()), machine.operation).seconds


def test_undisturbed_rounds_are_not_repeated(machine: Made) -> None:
    quiet = machine(lambda _: 0.03)
    assert seconds(quiet) == pytest.approx(1.03)
    assert quiet.calls == WARM + ROUNDS


def test_disturbed_rounds_are_repeated(machine: Made) -> None:
    burst = machine(lambda call: 0.5 * (call < WARM + ROUNDS + 2))
    assert seconds(burst) == pytest.approx(1.0)
    assert burst.calls == WARM + ROUNDS + 2 + ROUNDS


def test_the_least_disturbed_count_where_all_are(machine: Made) -> None:
    busy = machine(lambda call: 0.1 if call % 3 == 0 else 0.5)
    assert seconds(busy) == pytest.approx(1.1)
    assert busy.calls == WARM + TRIES * ROUNDS


def test_fast_rounds_count_only_by_what_was_stolen(machine: Made) -> None:
    """The choice is blind to the result: a disturbed round is left out even where it is the faster one."""
    odd = machine(lambda call: 0.0)
    operation = odd.operation

    def fast_when_disturbed() -> None:
        operation()
        if odd.calls % 2:
            odd.taken, odd.now = odd.taken + 0.2, odd.now - 0.5

    assert timed(cast(Comm, Alone()), fast_when_disturbed).seconds == pytest.approx(1.0)


def test_of_equally_disturbed_rounds_the_earlier_ones_count(machine: Made) -> None:
    busy = machine(lambda _: 0.5)
    operation = busy.operation

    def ever_faster() -> None:
        operation()
        busy.now -= 0.01 * busy.calls

    last = WARM + ROUNDS
    middle = 1.5 - 0.01 * (WARM + 1 + last) / 2
    assert timed(cast(Comm, Alone()), ever_faster).seconds == pytest.approx(middle)
    assert busy.calls == WARM + TRIES * ROUNDS


def test_short_operations_are_repeated_in_a_round(machine: Made) -> None:
    short = machine(lambda _: -1.0 + 1e-6)  # of a microsecond
    assert timed(cast(Comm, Alone()), short.operation).seconds == pytest.approx(1e-6)
    assert short.calls == WARM + ROUNDS * MOST


def test_a_kernel_that_does_not_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(timing, "STAT", tmp_path / "none")
    assert timing.stolen_s() == 0.0


def test_of_all_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "stat"
    path.write_text("cpu  1 2 3 4 5 6 7 250 0 0\ncpu0 1 2 3 4 5 6 7 130 0 0\n")
    monkeypatch.setattr(timing, "STAT", path)
    assert timing.stolen_s() == pytest.approx(250 / os.sysconf("SC_CLK_TCK"))
