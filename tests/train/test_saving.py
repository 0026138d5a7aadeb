"""Checkpoints between steps: how often, and that a signal asks for one."""

import signal
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layerwise.comm.solo import SoloComm
from layerwise.train.loop import MOST, until_next
from layerwise.train.saving import LOOK_S, Saving, interval_s


def lost(interval: float, cost: float, mtbf: float) -> float:
    """Seconds of wall clock a second of training, failures being exponential, without a restart's own time (Daly)."""
    return mtbf / interval * np.expm1((interval + cost) / mtbf)


@given(st.floats(0.1, 60), st.floats(200, 1e5))
def test_no_other_interval_loses_much_less(cost: float, mtbf: float) -> None:
    chosen = lost(interval_s(cost, mtbf), cost, mtbf)
    least = min(lost(interval, cost, mtbf) for interval in np.geomspace(cost / 10, 10 * mtbf, 2000))
    assert chosen <= least * 1.01


def test_more_than_the_time_between_failures() -> None:
    assert interval_s(100, 40) == 40


@pytest.mark.parametrize(("every", "saved"), [(None, []), (3, [3, 6, 9]), ("auto", [2, 3, 4, 5, 6, 7, 8, 9, 10])])
def test_steps_after_which_a_run_is_saved(every: int | None, saved: list[int]) -> None:
    """auto: from the first step whose time is known; here each fails before the next."""
    steps: list[int] = []
    saving = Saving(SoloComm(torch.device("cpu")), steps.append, every, mtbf_s=1e-9)
    for done in range(1, 11):
        saving.after(done)
        saving.step_s = 1.0
    assert steps == saved


def test_a_reliable_machine_saves_seldom() -> None:
    steps: list[int] = []
    saving = Saving(SoloComm(torch.device("cpu")), steps.append, "auto", mtbf_s=1e9, step_s=1e-3)
    for done in range(1, 100_000):
        saving.after(done)
    assert all(after - before > 1000 for before, after in pairwise(steps))


def test_what_is_written_is_completed_as_soon_as_all_ranks_have_written() -> None:
    """They ask each other after 1, 2, 4, ... steps; a new checkpoint waits for the one before."""
    done: list[str] = []
    ready = {10: 5, 20: 99}  # after so many further steps
    now = 0

    class Fake:
        def __init__(self, step: int) -> None:
            done.append(f"begin {step}")
            self.step = step

        def written(self) -> bool:
            return now >= self.step + ready.get(self.step, 0)

        def finish(self) -> None:
            done.append(f"{now}: {self.step}")

    saving = Saving(SoloComm(torch.device("cpu")), cast(Any, Fake), 10, 1.0)
    for now in range(1, 32):
        saving.after(now)
    assert done == ["begin 10", "18: 10", "begin 20", "30: 20", "begin 30", "31: 30"]
    done.clear()
    saving = Saving(SoloComm(torch.device("cpu")), cast(Any, Fake), 10, 1.0, step_s=LOOK_S / 2)
    for now in range(1, 20):
        saving.after(now)
    assert done == ["begin 10", "16: 10"]  # they ask after 11, 12, 14, 16


@pytest.mark.parametrize(("number", "stopped"), [(signal.SIGUSR1, False), (signal.SIGTERM, True)])
def test_a_signal_asks(number: signal.Signals, stopped: bool) -> None:
    """For a checkpoint of now, which is finished at once: who asks may end the job next."""
    done: list[str] = []

    class Fake:
        def __init__(self, step: int) -> None:
            self.step = step

        def written(self) -> bool:
            return False

        def finish(self) -> None:
            done.append(f"finish {self.step}")

    saving = Saving(SoloComm(torch.device("cpu")), cast(Any, Fake), 5, 1.0)
    with saving.signals.taken():
        for step in range(1, 8):
            saving.after(step)
            if step == 6:
                signal.raise_signal(number)
            assert saving.asked(step) is (stopped and step >= 6)
            assert done == ([] if step < 6 else ["finish 5", "finish 6"])


def test_ranks_meet_twice_a_second_and_after_ten_steps_at_most() -> None:
    """Steps that were fast may become slow, and then a signal must be heard all the same."""
    assert [until_next(pace_s) for pace_s in (1e-4, 0.01, 0.1, 2.0)] == [MOST, MOST, 5, 1]
