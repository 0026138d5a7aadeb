"""What ranks do together, however long it takes one of them."""

import time

import pytest

from layerwise.comm import together
from layerwise.comm.base import Comm
from layerwise.comm.together import patiently
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
