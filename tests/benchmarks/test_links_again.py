"""Links that are timed again: the medians of all turns count."""

from itertools import count

import pytest

from benchmarks.ranks import links_again
from benchmarks.ranks.links_again import LinksAgain
from layerwise.machine.curves import Curve, Links, Overlap
from layerwise.measure.timing import Time
from layerwise.measure.topology import Topology
from tests.comm.thread import ThreadComm, run_threads

KNOTS = ((1024.0, 1.0), (4096.0, 4.0))
FIRST = Links((Curve("all_reduce", (2,), 1, KNOTS), Curve("all_to_all", (2,), 1, KNOTS)), (Overlap((2,), 1, 0.5, 0.1),))


def again(comm: ThreadComm, first: Links | None) -> Links | None:
    found = LinksAgain(comm, first)
    for _ in range(2):
        found.turn()
    return found.links()


def test_medians_count(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, shares = iter((3.0, 2.5, 5.0, 2.0)), count(1)
    monkeypatch.setattr(links_again, "operation_time", lambda *_, rounds: Time(next(seconds), 0.0))
    monkeypatch.setattr(links_again, "measure_overlap", lambda *_, rounds: Overlap((2,), 1, 0.7, 0.2 * next(shares)))
    monkeypatch.setattr(links_again, "find_topology", lambda _: Topology(1, 2))
    (found,) = run_threads(1, lambda comm: again(comm, FIRST))
    assert found is not None
    assert found.curves[0].knots == ((1024.0, 3.0), (4096.0, 3.0))  # of 1, 3, 5; of 4, 2.5, 2, raised to the one before
    assert found.curves[1] == FIRST.curves[1]  # gloo does not use it
    assert (found.overlaps[0].compute, found.overlaps[0].sync) == (0.7, 0.2)  # of 0.1, 0.2, 0.4


def test_where_there_are_none() -> None:
    assert run_threads(1, lambda comm: again(comm, None)) == [None]
