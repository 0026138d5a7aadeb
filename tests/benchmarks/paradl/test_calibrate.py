"""Calibration: from calibration records alone, and the constants in the package are what they give."""

from dataclasses import replace

import pytest

from benchmarks.oracle import RECORDS, facts, fitted_growth_s, forecast
from benchmarks.paradl.framework import framework
from benchmarks.published.calibrate import calibrate
from benchmarks.published.records import Record, factor, log_errors, order, read_records
from layerwise.errors import LayerwiseError
from layerwise.importers.load import load_model
from layerwise.machine import load
from layerwise.oracle.ask import Budget, compare_with, suggest
from layerwise.oracle.question import Oracle, Question
from layerwise.oracle.runs import FOR, MeasuredRun

GIVEN = {runs: framework("chainermnx", runs) for runs in ("bars", "logs")}


def records(use: str) -> list[Record]:
    return [r for r in read_records(RECORDS) if r.use == use]


def test_a_check_record_never_calibrates() -> None:
    with pytest.raises(LayerwiseError, match="is for checking, not for calibration"):
        calibrate([*records("calibration"), records("check")[0]], facts, GIVEN)


def test_the_constants_are_what_the_calibration_records_give() -> None:
    """Whatever the file says of them: each is derived anew, from deliberately wrong ones."""
    derived = ("gradient_node_bytes_per_s", "gradient_bytes_per_s", "collective_node_bytes_per_s", "copy_bytes_per_s")
    wrong = {
        runs: replace(f, feed_s_per_sample=1.0 if runs == "logs" else 0.0, **dict.fromkeys(derived, 1e9))
        for runs, f in GIVEN.items()
    }
    found = calibrate(records("calibration"), facts, wrong)
    for name in derived:
        assert getattr(GIVEN["bars"], name) == getattr(GIVEN["logs"], name) == pytest.approx(found[name], rel=1e-3)
    assert GIVEN["logs"].feed_s_per_sample == pytest.approx(found["feed_s_per_sample"], rel=1e-3)


def test_of_several_records_a_constant_is_their_geometric_mean() -> None:
    """In any order: not what the last one gives."""
    one = [r for r in records("calibration") if r.strategy in ("filter", "spatial")]
    other = [replace(r, id=f"{r.id} slower", total_s=1.5 * r.total_s) for r in one]
    other = [r if r.compute_s is None else replace(r, compute_s=1.2 * r.compute_s) for r in other]
    first, second, both, turned = (
        calibrate(some, facts, GIVEN) for some in (one, other, [*one, *other], [*other, *one])
    )
    for name in ("copy_bytes_per_s", "collective_node_bytes_per_s"):
        assert both[name] == turned[name] == pytest.approx((first[name] * second[name]) ** 0.5)
    assert first["copy_bytes_per_s"] > both["copy_bytes_per_s"] > second["copy_bytes_per_s"]
    assert both["feed_s_per_sample"] == pytest.approx(turned["feed_s_per_sample"])
    assert first["feed_s_per_sample"] < both["feed_s_per_sample"] < second["feed_s_per_sample"]


def test_calibration_runs_come_out() -> None:
    """A run that set a constant by itself is met; one of two is met nearly."""
    for r in records("calibration"):
        exact = r.strategy in ("filter", "spatial") or r.devices == 1
        assert forecast(r, "chainermnx") == pytest.approx(r.total_s, rel=2e-3 if exact else 0.1)


def test_growth_is_what_check_records_give_and_is_apart_from_what_is_calibrated() -> None:
    bars = [r for r in records("check") if r.runs == "bars"]
    fitted = framework("chainermnx", "bars", fitted=True)
    assert fitted.growth_s == pytest.approx(fitted_growth_s(bars), rel=1e-3)
    assert "FITTED" in fitted.sources["growth_s"]
    assert all(f.growth_s == 0 for f in (*GIVEN.values(), framework("chainermnx", "logs", fitted=True)))


def test_every_constant_has_a_source() -> None:
    assert all(len(source) > 10 for f in GIVEN.values() for source in f.sources.values())
    with pytest.raises(LayerwiseError, match="knows no runs 'guesses': it has bars, logs"):
        framework("chainermnx", "guesses")


def test_scores() -> None:
    assert log_errors([2.0, 1.0], [1.0, 1.0]) == pytest.approx([0.6931], rel=1e-4)
    assert factor(log_errors([2.0, 1.0], [1.0, 1.0])) == pytest.approx(2.0)
    measured = {"a": 1.0, "b": 1.01, "c": 2.0}
    assert order({"a": 3, "b": 1, "c": 2}, measured, 0.02) == ([("b", "c")], [("a", "c")])


@pytest.mark.slow
def test_no_published_run_is_called_over_memory() -> None:
    """They all ran. (The closed forms count more than the memory of a device for most of them.)"""
    every = [r for use in ("calibration", "check") for r in records(use)]
    for model, kind in {(r.model, r.runs) for r in every}:
        question = Question(load_model(model, 1), load("v100"), 64)
        some = {  # of runs that differ in the number of groups alone, and so not in memory, one
            (r.strategy, r.inside, r.batch // r.groups): MeasuredRun(
                r.strategy, r.devices, r.batch, r.total_s, r.inside if r.strategy in FOR["inside"] else None
            )
            for r in sorted(every, key=lambda r: -r.devices)
            if (r.model, r.runs) == (model, kind)
        }
        answers = [c.answer for c in compare_with(Oracle(question), list(some.values()))]
        assert all(a.fits for a in answers)
        assert suggest(answers, 1000, Budget()).best is not None


@pytest.mark.slow
def test_better_than_the_published_projections() -> None:
    """Every strategy's mean accuracy over its bars is above what ParaDL's own projections reach there."""
    bars = [r for r in records("check") if r.runs == "bars"]
    for name in {r.strategy for r in bars}:
        some = [r for r in bars if r.strategy == name]
        ours = sum(1 - abs(forecast(r, "chainermnx") - r.total_s) / r.total_s for r in some)
        theirs = sum(1 - abs((r.projected_s or 0) - r.total_s) / r.total_s for r in some)
        assert ours > theirs
