"""Checkpoints between steps: how often, and that a signal asks for one."""

import signal

import pytest
import torch

from layerwise.comm.solo import SoloComm
from layerwise.train.loop import MOST, until_next
from layerwise.train.saving import Saving


@pytest.mark.parametrize(("every", "saved"), [(None, []), (3, [3, 6, 9])])
def test_steps_after_which_a_run_is_saved(every: int | None, saved: list[int]) -> None:
    steps: list[int] = []
    saving = Saving(SoloComm(torch.device("cpu")), steps.append, every)
    for done in range(1, 11):
        saving.after(done)
    assert steps == saved


@pytest.mark.parametrize(("number", "stopped"), [(signal.SIGUSR1, False), (signal.SIGTERM, True)])
def test_a_signal_asks(number: signal.Signals, stopped: bool) -> None:
    """For a checkpoint of now: who asks may end the job next."""
    steps: list[int] = []
    saving = Saving(SoloComm(torch.device("cpu")), steps.append, 5)
    with saving.signals.taken():
        for step in range(1, 8):
            saving.after(step)
            if step == 6:
                signal.raise_signal(number)
            assert saving.asked(step) is (stopped and step >= 6)
    assert steps == [5, 6]


def test_ranks_meet_twice_a_second_and_after_ten_steps_at_most() -> None:
    """Steps that were fast may become slow, and then a signal must be heard all the same."""
    assert [until_next(pace_s) for pace_s in (1e-4, 0.01, 0.1, 2.0)] == [MOST, MOST, 5, 1]
