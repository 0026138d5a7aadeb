"""The reference of all other searches is itself compared with a loop over strategies."""

from importlib import import_module

import numpy as np
import pytest
from hypothesis import given

from layerwise.cost.model import CostTables
from layerwise.errors import LayerwiseError
from tests.search.exhaustive import exhaustive
from tests.search.tables import every_strategy, random_tables, tables


@given(random_tables(nodes=5, most=3))
def test_it_finds_the_cheapest_of_all_strategies(t: CostTables) -> None:
    costs = every_strategy(t)
    found = exhaustive(t)
    assert found.cost_s == pytest.approx(min(costs.values()))
    assert costs[tuple(found.choice.values())] == pytest.approx(found.cost_s)
    assert found.proven


def test_the_best_strategy_may_be_in_any_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("tests.search.exhaustive"), "CHUNK", 5)
    t = tables({"a": 4, "b": 6}, [("a", "b", 0)], seed=0)
    for best in np.ndindex(4, 6):
        t.transfer["a", "b", 0][:] = 100.0
        t.transfer["a", "b", 0][best] = 0.0
        assert tuple(exhaustive(t).choice.values()) == best


def test_too_many_strategies_are_refused() -> None:
    with pytest.raises(LayerwiseError, match=r"1.7e\+07 strategies are too many"):
        exhaustive(tables({f"l{i}": 8 for i in range(8)}, [], seed=0))
