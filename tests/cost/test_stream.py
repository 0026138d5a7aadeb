"""Sums of gradients beside computation: nothing is lost, and each goes on at its rate."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.cost.timeline.stream import Stream, Sum

PAIR = np.array([0, 0])


def stream(*sums: tuple[float, float, float], clock: tuple[float, float] = (0.0, 0.0)) -> Stream:
    """Sums of two devices: seconds, and the rates of computation and of the sum."""
    made = Stream(2)
    for seconds, compute, sync in sums:
        made.add(Sum("x", PAIR, seconds, compute, sync), np.array(clock))
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


rates = st.floats(0.05, 1.0)


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
