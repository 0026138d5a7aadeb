"""Sums of gradients beside computation: nothing is lost, and each goes on at its rate."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.cost.timeline.stream import Stream, Traffic

PAIR = np.array([0, 0])


def stream(*sums: tuple[float, float, float], clock: tuple[float, float] = (0.0, 0.0)) -> Stream:
    """Sums of two devices: seconds, and the rates of computation and of the sum."""
    made = Stream(2)
    for seconds, compute, sync in sums:
        made.add(Traffic("x", PAIR, seconds, compute, sync), np.array(clock))
    return made


def test_without_cost_to_each_other_the_longer_one_counts() -> None:
    made = stream((3.0, 1.0, 1.0))
    clock = made.beside(np.zeros(2), np.array([2.0, 5.0]))
    assert clock.tolist() == [2.0, 5.0]
    assert made.sums[0].left.tolist() == [1.0, 0.0]
    assert made.finish(clock).tolist() == [3.0, 5.0]


def test_taking_turns_is_no_overlap() -> None:
    made = stream((3.0, 0.5, 0.5))
    assert made.finish(made.beside(np.zeros(2), np.full(2, 3.0))).tolist() == [6.0, 6.0]


def test_by_hand() -> None:
    """Computation at 80 %, the sum at 50 %: it ends after 4 s, when 3.2 of 5 s are computed."""
    made = stream((2.0, 0.8, 0.5))
    clock = made.beside(np.zeros(2), np.full(2, 5.0))
    assert clock == pytest.approx(np.full(2, 4 + 1.8))
    assert made.sums[0].ended == pytest.approx(np.full(2, 4.0))


def test_a_sum_begins_when_its_last_member_has_come_and_ends_for_all() -> None:
    made = stream((1.0, 1.0, 1.0), clock=(0.0, 2.0))
    clock = made.beside(np.array([0.0, 2.0]), np.array([1.0, 0.5]))
    assert clock.tolist() == [1.0, 2.5]
    assert made.sums[0].left.tolist() == [1.0, 0.5]
    assert made.finish(clock).tolist() == [3.0, 3.0]


def test_waiting_lets_sums_go_on_by_themselves() -> None:
    made = stream((2.0, 0.5, 0.5), (1.0, 0.5, 0.5))
    made.until(np.zeros(2), np.array([2.5, 1.0]))
    assert [s.left.tolist() for s in made.sums] == [[0.0, 1.0], [0.5, 1.0]]
    assert made.finish(np.array([2.5, 1.0])).tolist() == [3.0, 3.0]


def test_transfers_go_before_sums_and_in_their_order() -> None:
    made = stream((4.0, 1.0, 1.0))
    first, second = (Traffic("t", PAIR, seconds, 1.0, 1.0) for seconds in (2.0, 3.0))
    made.send_ahead(first, np.zeros(2))
    made.send_ahead(second, np.zeros(2))
    clock = made.beside(np.zeros(2), np.array([1.0, 4.0]))
    assert made.awaited(first, clock).tolist() == [2.0, 4.0]
    assert first.ended.tolist() == [2.0, 2.0]
    assert made.awaited(second, np.array([2.0, 4.0])).tolist() == [5.0, 5.0]
    assert made.finish(np.full(2, 5.0)).tolist() == [9.0, 9.0]


def test_a_transfer_ends_when_its_last_member_is_through() -> None:
    """And who waits for it lets gradients go on, once its own part is done."""
    made = Stream(3)
    made.add(Traffic("sum", np.array([0, 0, -1]), 1.0, 1.0, 1.0), np.zeros(3))
    one = Traffic("t", np.array([0, 0, -1]), 2.0, 0.5, 0.5)
    made.send_ahead(one, np.zeros(3))
    clock = made.beside(np.zeros(3), np.array([0.0, 2.0, 7.0]))  # the second device computes beside it, at half speed
    assert clock.tolist() == [0.0, 4.0, 7.0]
    assert made.awaited(one, clock).tolist() == [4.0, 4.0, 7.0]
    assert made.sums[0].left.tolist() == [0.0, 1.0, 0.0]


rates = st.floats(0.05, 1.0)


@given(st.lists(st.tuples(st.floats(0.0, 5.0), rates, rates, st.booleans()), max_size=5), st.floats(0.0, 9.0))
def test_what_is_awaited_is_no_faster_than_alone(flights: list[tuple[float, float, float, bool]], work: float) -> None:
    """And no slower than all that travels, and the computation, one after the other at their slowest."""
    made, clock, before = stream(), np.zeros(2), 0.0
    sent = [(Traffic("t", PAIR, seconds, compute, own), awaited) for seconds, compute, own, awaited in flights]
    for one, _ in sent:
        made.send_ahead(one, clock)
    slowest = min([1.0, *(min(one.compute, one.own) for one, _ in sent)])
    most = (work + sum(one.seconds for one, _ in sent)) / slowest
    clock = made.beside(clock, np.full(2, work))
    for one, awaited in sent:
        before += one.seconds
        if awaited:
            clock = made.awaited(one, clock)
            assert max(before, work) - 1e-9 <= clock[0] <= most + 1e-9
            assert not one.left.any()
    assert max(before, work) - 1e-9 <= made.through(clock, np.full(2, True))[0] <= most + 1e-9


@given(st.lists(st.tuples(st.floats(0.0, 5.0), rates, rates), max_size=4), st.lists(st.floats(0.0, 3.0), max_size=6))
def test_no_second_is_lost_or_gained(sums: list[tuple[float, float, float]], works: list[float]) -> None:
    """From the longer of both to both one after the other at their slowest."""
    made, clock = stream(*sums), np.zeros(2)
    for work in works:
        before = clock
        clock = made.beside(clock, np.full(2, work))
        assert (clock >= before + work - 1e-9).all()
    end = made.finish(clock)
    synced, computed = sum(s for s, _, _ in sums), sum(works)
    slowest = min([1.0, *(min(c, s) for _, c, s in sums)])
    assert end[0] >= max(synced, computed) - 1e-9
    assert end[0] <= (synced + computed) / slowest + 1e-9
    if all(c == s == 1 for _, c, s in sums):
        assert end[0] == pytest.approx(max(synced, computed))
