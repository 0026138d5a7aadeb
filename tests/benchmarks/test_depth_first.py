"""Depth-first searches, bounded and exhaustive."""

import time
from math import prod

import pytest
from hypothesis import given

from benchmarks.common.depth_first import depth_first
from layerwise.config import Config
from layerwise.cost.model import CostTables
from tests.examples import examples
from tests.search.tables import complete_tables, every_cost, random_tables


@examples(100)
@given(random_tables(nodes=6))
def test_depth_first_search_finds_the_optimum(t: CostTables) -> None:
    every, bounded = (depth_first(t, limit_s=60, bounded=b) for b in (False, True))
    assert every.finished
    assert bounded.finished
    assert every.cost_s == bounded.cost_s == pytest.approx(every_cost(t).min())
    assert 1 <= bounded.strategies <= every.strategies == prod(map(len, t.configs.values()))


def test_depth_first_search_gives_up_in_time() -> None:
    t = complete_tables(12, 8)
    started = time.perf_counter()
    found = depth_first(t, limit_s=0.1, bounded=True)
    assert 0.1 <= found.seconds <= time.perf_counter() - started < 2
    assert not found.finished
    assert 0 < found.cost_s < sum(cost.max() for cost in (*t.node.values(), *t.transfer.values()))
    assert Config.of({"n": 8}) in t.configs["l0"]
