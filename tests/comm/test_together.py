"""What ranks do together, however long it takes one of them."""

import time

import pytest

from layerwise.comm import together
from layerwise.comm.base import Comm
from layerwise.comm.together import alone, patiently
from layerwise.errors import LayerwiseError
from tests.comm.thread import run_threads


@pytest.mark.parametrize("fails", [False, True])
def test_no_rank_is_taken_for_stuck(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks hear of each other while rank 1 takes long."""
    monkeypatch.setattr(together, "BEAT_S", 0.02)
    met: list[int] = []

    def run(comm: Comm) -> tuple[int, list[int]]:
        heard = comm.all_gather_text

        def counted(text: str) -> list[str]:
            met.append(comm.rank)
            return heard(text)

        def act() -> tuple[int, int]:
            if comm.rank == 1:
                time.sleep(1)
                if fails:
                    raise LayerwiseError("no such file")
            return 10 * comm.rank, comm.rank

        comm.__dict__["all_gather_text"] = counted
        return patiently(comm, act)

    if fails:
        with pytest.raises(LayerwiseError, match="rank 1: no such file"):
            run_threads(2, run)
    else:
        assert run_threads(2, run) == [(0, [0, 1]), (10, [0, 1])]
    assert met.count(0) > 5


def test_rank_0_works_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "BEAT_S", 0.02)
    ranks: list[int] = []

    def run(comm: Comm) -> str | None:
        def work() -> str:
            ranks.append(comm.rank)
            return "result"

        return alone(comm, work)

    assert run_threads(3, run) == ["result", None, None]
    assert ranks == [0]


def test_what_fails_on_rank_0_is_heard_of_everywhere() -> None:
    def work() -> None:
        raise LayerwiseError("out of luck")

    def run(comm: Comm) -> str:
        with pytest.raises(LayerwiseError) as error:
            alone(comm, work)
        return str(error.value)

    assert run_threads(2, run) == ["rank 0: out of luck"] * 2
