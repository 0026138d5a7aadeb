"""The zoo's own machinery, on a network that needs no package besides."""

import pytest
import torch

from benchmarks.zoo import compare
from benchmarks.zoo.networks import names
from benchmarks.zoo.plans import PLANS
from benchmarks.zoo.small import SMALL
from benchmarks.zoo.table import summary, tables
from benchmarks.zoo.trial import Row, as_json, row_of, trial


def test_what_ci_tries_is_there() -> None:
    assert set(SMALL) <= set(names())
    assert len(set(SMALL)) == len(SMALL)


def test_a_row_is_exact_and_a_wrong_number_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    row = trial("audio/TCN (weight norm)")
    assert row.exact, row
    assert row.differences.keys() == PLANS.keys()
    assert row.proven
    assert row_of(as_json(row)) == row
    assert "1 are exact under all plans (100%)" in summary([row])

    def away(found: torch.Tensor, wanted: torch.Tensor) -> float:
        return 1e-6 if found.shape == (3, 8, 1) else 0.0

    monkeypatch.setattr(compare, "difference", away)
    monkeypatch.setattr("benchmarks.zoo.trial.PLANS", {"data": PLANS["data"]})
    row = trial("audio/TCN (weight norm)", timed=False)
    assert not row.exact
    assert row.wrong["data"].startswith("gradient of 2.weight: 1.0e-06")
    assert "| differs |" in tables([row])


def test_what_fails_is_a_row() -> None:
    row = trial("audio/none")
    assert (row.stage, row.exact) == ("build", False)
    assert "not counted" in tables([row, Row("audio/other", "process", "not through after 1 s")])
