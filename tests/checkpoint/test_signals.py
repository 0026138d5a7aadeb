"""What signals ask of a training: all ranks learn it, and a process that was forked does not."""

import os
import signal
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from layerwise.checkpoint import SaveSignals
from layerwise.checkpoint.signals import handled
from layerwise.comm.base import Comm
from layerwise.comm.guard import Guard, noted
from layerwise.comm.solo import SoloComm
from tests.comm.thread import run_threads

BOTH = (signal.SIGUSR1, signal.SIGTERM)


def get(number: signal.Signals) -> None:
    signal.raise_signal(number)


def test_signals_are_told_once_and_the_end_is_told_first() -> None:
    before = [signal.getsignal(number) for number in BOTH]
    with SaveSignals(SoloComm()).taken() as signals:
        assert signals.received() is None
        get(signal.SIGUSR1)
        assert [signals.received(), signals.received()] == [signal.SIGUSR1, None]
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):  # the last by another way, as Slurm sends it
            get(number)
        assert [signals.received(), signals.received()] == [signal.SIGTERM, None]
    assert [signal.getsignal(number) for number in BOTH] == before


def test_all_ranks_learn_of_a_signal_to_one() -> None:
    def rank(comm: Comm) -> list[int | None]:
        signals = SaveSignals(comm)
        if comm.rank == 1:
            signals._numbers.append(signal.SIGTERM)
        return [signals.received(), signals.received()]

    assert run_threads(2, rank) == [[signal.SIGTERM, None]] * 2


def child(act: Callable[[], object]) -> int:
    """How a process that is forked, and does this, ends."""
    pid = os.fork()
    if pid == 0:
        act()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_second_sigterm_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layerwise.checkpoint.signals.TWICE_S", 0.0)

    def twice() -> None:
        with SaveSignals(SoloComm()).taken():
            get(signal.SIGTERM)
            get(signal.SIGTERM)

    assert child(twice) == 128 + signal.SIGTERM


def test_a_worker_of_a_data_loader_ends_as_it_did() -> None:
    with SaveSignals(SoloComm()).taken() as signals:
        assert child(lambda: get(signal.SIGTERM)) == -signal.SIGTERM
        assert signals.received() is None


def test_a_handler_of_the_users_own_stays() -> None:
    def own(number: int, _: object) -> None:
        ours.append(number)

    ours: list[int] = []
    before = signal.signal(signal.SIGUSR1, own)
    try:
        with SaveSignals(SoloComm()).taken(stop=False) as signals:
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            get(signal.SIGUSR1)
            assert (ours, signals.received()) == ([signal.SIGUSR1], None)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_within_another_it_takes_nothing_and_leaves_the_protection() -> None:
    told: list[bool] = []

    class Told(SoloComm):
        def spare(self, spared: bool) -> None:
            told.append(spared)

    comm = Told()
    with SaveSignals(comm).taken() as outer:
        with SaveSignals(comm).taken() as inner, handled(noted, signal.SIGUSR1):
            get(signal.SIGUSR1)
            assert inner.received() is None
        assert told == [True]
        assert outer.received() == signal.SIGUSR1
    assert told == [True, False]


def test_in_another_thread_nothing_is_taken_and_sigterm_ends_as_ever() -> None:
    class Told(SoloComm):
        def spare(self, spared: bool) -> None:
            raise AssertionError

    def take() -> None:
        with SaveSignals(Told()).taken():
            seen.extend(signal.getsignal(number) for number in BOTH)

    seen: list[object] = []
    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    assert seen == [signal.SIG_DFL] * 2


def test_a_handler_that_the_user_has_set_since_decides() -> None:
    looks: list[bool] = []
    watch: Any = SimpleNamespace(stopped=False, spared=False, alive=True, look=lambda: looks.append(True))
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        Guard(watch)._terminated()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (watch.stopped, looks) == (True, [True])
