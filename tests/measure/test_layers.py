"""Measuring: in order, within the budget, kept whatever happens, and taken up where it stopped."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from layerwise.machine.layer_times import CellTime, Conditions, LayerTimes, Work
from layerwise.measure import job as layers
from layerwise.measure.bench import Mode, UpdateSpec
from layerwise.measure.cells import CellTask
from layerwise.measure.job import Measuring
from layerwise.measure.timing import Stopwatch

MODE = Mode(torch.device("cpu"), torch.float32)
START = LayerTimes(Conditions("device", "2.13.0", "float32"))


def cell(i: int, predicted_s: float = 1.0) -> CellTask:
    return CellTask("conv", (i,), "conv", UpdateSpec("sgd", (1,)), predicted_s, 0.0, Work(), Work())


class Machine:
    """Stands for the device: what was run, and how long it takes by a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, each_s: float = 7.0) -> None:
        self.now, self.ran, self.fails = 0.0, list[int](), dict[int, BaseException]()
        self.each_s = each_s
        monkeypatch.setattr(layers.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(layers, "timed", self.timed)

    def timed(self, cell: CellTask, mode: Mode, stopwatch: Stopwatch) -> CellTime:
        (number,) = cell.extents
        self.now += self.each_s
        if number in self.fails:
            raise self.fails[number]
        self.ran.append(number)
        return CellTime(float(number), 0.0, 0.0, 5)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_in_order_and_within_the_budget(machine: Machine) -> None:
    """7 samples of 1 s fit into what is left of 30 s: after 4 cells of 7 s, 2 s are left."""
    measuring = Measuring(START, MODE, lambda _: None, 30.0)
    seen: list[CellTask] = []
    measuring.measure([cell(i) for i in (5, 3, 1, 2, 4, 9)], seen.append)
    assert machine.ran == [5, 3, 1, 2]
    assert len(seen) == 6
    assert measuring.taken == 4
    assert measuring.spent_s == 28
    measuring.measure([cell(4), cell(9, predicted_s=0.1)])  # what is small still fits
    assert machine.ran == [5, 3, 1, 2, 9]
    assert [c.extents for c in measuring.left([cell(4), cell(5), cell(6, predicted_s=2.0), cell(9)])] == [(6,), (4,)]


def test_what_was_measured_before_is_not_measured_again(machine: Machine) -> None:
    kept: list[LayerTimes] = []
    Measuring(START, MODE, kept.append, 100.0).measure([cell(1), cell(2)])
    again = Measuring(kept[-1], MODE, kept.append, 100.0)
    again.measure([cell(i) for i in (1, 2, 3)])
    assert machine.ran == [1, 2, 3]
    assert again.taken == 1
    assert set(kept[-1].cells["conv"]) == {(1,), (2,), (3,)}


def test_an_interrupt_keeps_what_there_is(machine: Machine) -> None:
    machine.fails[3] = KeyboardInterrupt()
    kept: list[LayerTimes] = []
    with pytest.raises(KeyboardInterrupt):
        Measuring(START, MODE, kept.append, 100.0).measure([cell(i) for i in (1, 2, 3, 4)])
    assert set(kept[-1].cells["conv"]) == {(1,), (2,)}


def test_it_is_written_now_and_then(machine: Machine) -> None:
    kept: list[LayerTimes] = []
    Measuring(START, MODE, kept.append, 100.0).measure([cell(i) for i in (1, 2)])
    assert [one.count for one in kept] == [1, 2, 2]  # each took more than SAVE_S, and once at the end


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "conv: does not fit into memory"),
        (torch.OutOfMemoryError("8 GiB"), "conv: does not fit into memory"),
        (ValueError("Expected more than 1 value\nper channel"), "conv: Expected more than 1 value"),
    ],
)
def test_a_cell_that_cannot_be_run_is_left_out(machine: Machine, error: BaseException, said: str) -> None:
    machine.fails[1] = error
    measuring = Measuring(START, MODE, lambda _: None, 100.0)
    measuring.measure([cell(1), cell(2)])
    assert machine.ran == [2]
    assert measuring.failed == {("conv", (1,)): said}
    assert measuring.left([cell(1), cell(2), cell(3)]) == [cell(3)]


def test_more_than_there_is_of_memory_is_not_tried() -> None:
    with pytest.raises(MemoryError):
        layers.timed(replace(cell(1), bytes=1e18), MODE, Stopwatch(MODE.device))


def test_an_update_is_without_what_any_step_costs(machine: Machine) -> None:
    measuring = Measuring(START, MODE, lambda _: None, 100.0, call_s=1.5)
    measuring.measure([cell(1), cell(4)])
    assert [t.forward_s for t in measuring.times.cells["conv"].values()] == [0.0, 2.5]
