"""The paper's published measurements on Cori, and what the complexities predict of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.published.cori import BATCH, Record, cases, fit, records, terms
from layerwise.search.baselines import ProcessGrid


def test_what_was_published() -> None:
    found = records()
    assert len(found) == 93
    assert sum(r.use == "calibration" for r in found) == 6
    assert {r.use for r in found} == {"calibration", "check"}
    for r in found:
        assert r.grid.processes == r.processes or (str(r.grid), r.processes) == ("1x1", 2)
        assert r.seconds > 0
        assert len(r.widths) == 3


def test_terms_by_hand() -> None:
    """A 2x2 grid of 4-16-1: per process 50 samples, half of the 17 neurons."""
    one, work, messages, items = terms((4, 16, 1), ProcessGrid(2, 2), 4)
    assert (one, work) == (1, 50 * 17 / 2)
    assert messages == 2 + 2 + 2 * 2  # outputs of two layers, the second's inputs twice, gradients of two layers twice
    assert items == 25 * 16 + 25 * 1 + 2 * 25 * 16 + 2 * (5 * 16 + 17) / 2 / 2
    assert terms((4, 16, 1), ProcessGrid(1, 1), 2)[1] == BATCH * 17
    assert terms((4, 16, 1), ProcessGrid(1, 1), 2)[2] == 2 * 2  # a collective of two processes


def test_the_fit_sees_calibration_records_only() -> None:
    found = records()
    constants = fit(found)
    assert (constants >= 0).all()
    doubled = [replace(r, seconds=2 * r.seconds) if r.use == "check" else r for r in found]
    assert fit(doubled) == pytest.approx(constants)
    all_doubled = [replace(r, seconds=2 * r.seconds) for r in found]
    assert fit(all_doubled) == pytest.approx(2 * constants)


def test_the_fit_finds_constants_that_are_there() -> None:
    true = np.array([1e-3, 2e-7, 3e-5, 8e-8])
    grids = [(1, 1), (2, 1), (4, 1), (1, 4), (2, 2), (8, 4)]
    made = [
        Record("", widths, r * c, ProcessGrid(r, c), float(terms(widths, ProcessGrid(r, c), r * c) @ true), use)
        for widths in ((4, 32, 1), (4, 512, 1))
        for r, c in grids
        for use in ("calibration",)
    ]  # fmt: skip
    assert fit(made) == pytest.approx(true)


def test_how_well_the_best_grid_is_predicted() -> None:
    found = records()
    compared = cases(found, fit(found))
    assert len(compared) == 25
    assert sum(c.best == c.best_predicted for c in compared) >= 22
    assert np.mean([c.loss(c.best_predicted) for c in compared]) < 0.03
    errors = [abs(np.log(c.predicted[g] / s)) for c in compared for g, s in c.measured.items()]
    assert np.exp(np.mean(errors)) < 1.15
    for c in compared:
        assert c.loss(c.best) == 0
        assert c.measured.keys() == c.predicted.keys()
