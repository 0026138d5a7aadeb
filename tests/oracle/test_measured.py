"""Measured runs: read with one clear line for what is missing, compared, and flagged where they are out of line."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from layerwise.errors import LayerwiseError
from layerwise.oracle.question import Answer
from layerwise.oracle.runs import Run, accuracy, compare, mean_accuracy, read_runs

GOOD = {"strategy": "data", "gpus": 16, "batch": 512, "iteration_s": 0.2}


def written(folder: Path, value: object) -> Path:
    path = folder / "runs.json"
    path.write_text(json.dumps(value))
    return path


def test_an_epoch_is_its_iterations(tmp_path: Path) -> None:
    run = {"strategy": "ds", "gpus": 8, "batch": 64, "epoch_s": 100.0, "samples": 6400, "inside": 4}
    (found,) = read_runs(written(tmp_path, {"runs": [run]}))
    assert found == Run("ds", 8, 64, 1.0, inside=4)


def test_several_iterations_are_their_median_and_outliers_are_counted(tmp_path: Path) -> None:
    (found,) = read_runs(written(tmp_path, [GOOD | {"iteration_s": [0.2, 0.21, 0.19, 0.2, 0.8]}]))
    assert found.iteration_s == 0.2
    assert (found.iterations, found.slow) == (5, 1)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({}, "at least one run"),
        ({"runs": []}, "at least one run"),
        (["data"], "run 1: must be a JSON object"),
        ([GOOD, {}], "run 2: 'strategy' is missing"),
        ([GOOD | {"strategy": "dta"}], "did you mean 'data'"),
        ([{k: v for k, v in GOOD.items() if k != "gpus"}], "run 1: 'gpus' is missing"),
        ([GOOD | {"batch": 0}], "'batch' must be a whole number of at least 1, not 0"),
        ([GOOD | {"batch": True}], "'batch' must be a whole number"),
        ([{k: v for k, v in GOOD.items() if k != "iteration_s"}], "neither 'iteration_s' nor 'epoch_s'"),
        ([GOOD | {"iteration_s": "fast"}], "'iteration_s' must be seconds above 0, not 'fast'"),
        ([GOOD | {"iteration_s": []}], "empty list"),
        ([GOOD | {"iteration_s": [0.1, -1]}], "seconds above 0, not -1"),
        ([{"strategy": "data", "gpus": 2, "batch": 4, "epoch_s": 1.0}], "'samples' is missing"),
        ([GOOD | {"strategy": "df", "inside": 1.5}], "'inside' must be a whole number"),
        ([GOOD | {"inside": 2}], "'inside' is for df and ds, not for data"),
        ([GOOD | {"segments": 2}], "'segments' is for pipeline, not for data"),
        ([GOOD | {"insdie": 2}], "unknown field 'insdie' (did you mean 'inside'?)"),
        ([GOOD | {"epoch_s": "x"}], "'epoch_s' must be seconds above 0, not 'x'"),
        ([GOOD | {"iteration_s": 1e-320}], "'iteration_s' must be seconds from"),
        (
            [{"strategy": "data", "gpus": 2, "batch": 4, "epoch_s": 1e308, "samples": 1}],
            "'epoch_s' must be seconds from",
        ),
        ([GOOD | {"batch": 10**30}], "'batch' must be at most 1,073,741,824, not 1000"),
        ([GOOD | {"gpus": 10**30}], "'gpus' must be at most 65,536"),
        ([GOOD | {"strategy": ["data"]}], "unknown strategy"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, value: object, reason: str) -> None:
    with pytest.raises(LayerwiseError, match="measured file") as told:
        read_runs(written(tmp_path, value))
    assert reason in str(told.value)


def test_accuracy_is_the_papers() -> None:
    assert accuracy(0.9, 1.0) == pytest.approx(0.9)
    assert accuracy(1.1, 1.0) == pytest.approx(0.9)
    assert accuracy(3.0, 1.0) == pytest.approx(-1.0)


def test_long_names_of_hybrids(tmp_path: Path) -> None:
    (found,) = read_runs(written(tmp_path, [GOOD | {"strategy": "data+filter"}]))
    assert found.strategy == "df"


def test_times_without_spread_have_no_outliers(tmp_path: Path) -> None:
    (found,) = read_runs(written(tmp_path, [GOOD | {"iteration_s": [1, 1, 1, 1, 1.0001]}]))
    assert found.slow == 0
    runs = [Run("data", 2, 64, seconds) for seconds in (1.0, 1.0, 1.0, 1.0, 1.0001)]
    assert not any(c.abnormal for c in compare([(run, answered(1.0)) for run in runs]))


@pytest.mark.parametrize(("slow", "flagged"), [(5, False), (6, True)])
def test_a_run_is_flagged_for_more_than_a_few_slow_iterations(slow: int, flagged: bool) -> None:
    run = Run("data", 2, 64, 1.0, iterations=100, slow=slow)
    assert bool(compare([(run, answered(1.0))])[0].abnormal) is flagged


def answered(seconds: float) -> Answer:
    return cast(Answer, SimpleNamespace(overlapped_s=seconds))


def test_a_congested_run_is_flagged_and_a_biased_projection_is_not() -> None:
    """All runs take 1.3 times their projection; the one that takes 4 times is abnormal."""
    runs = [Run("data", gpus, 32 * gpus, 1.3 + gpus / 1000) for gpus in (1, 2, 4, 8, 16)]
    pairs = [(run, answered(1.0)) for run in runs]
    assert [c.abnormal for c in compare(pairs)] == [""] * 5
    found = compare([*pairs, (Run("data", 32, 1024, 4.0), answered(1.0))])
    assert [bool(c.abnormal) for c in found] == [False] * 5 + [True]
    assert "4.00× its projection" in found[-1].abnormal
    assert mean_accuracy(found)["data"] == pytest.approx(sum(c.accuracy for c in found) / 6)
