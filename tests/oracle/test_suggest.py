"""The suggestion: within the budget, the fastest or the cheapest; ties to data parallelism; the runner-up's margin."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from layerwise.oracle.ask import Budget, suggest
from layerwise.oracle.question import Answer
from layerwise.oracle.report.found import suggestion_lines
from layerwise.oracle.strategies import Limit
from layerwise.oracle.tables import Phases, Priced, Projection

SAMPLES = 1000


def answer(name: str, devices: int, seconds: float, gib: float = 1.0, *, fits: bool = True) -> Answer:
    """An epoch of so many seconds: one iteration of all samples."""
    phases = Phases(compute_s=seconds, memory_bytes=gib * 2**30)
    return Answer(Projection(name, devices, (devices, 1), 1, SAMPLES, phases, Limit(99, "")), seconds, fits)


DATA, FILTER = answer("data", 8, 10.0, 4.0), answer("filter", 8, 12.0, 2.0)
SMALL, LARGE = answer("data", 2, 30.0, 8.0), answer("ds", 16, 6.0, 1.0)
EVERY = [DATA, FILTER, SMALL, LARGE]


def test_the_fastest_and_the_runner_up_of_another_strategy() -> None:
    found = suggest(EVERY, SAMPLES, Budget())
    assert (found.best, found.runner_up) == (LARGE, DATA)
    assert found.margin == pytest.approx(10 / 6 - 1)


@pytest.mark.parametrize(
    ("budget", "best"),
    [
        (Budget(gpus=8), DATA),
        (Budget(gpus=4), SMALL),
        (Budget(gpus=8, memory_bytes=3 * 2**30), FILTER),
        (Budget(seconds=40), SMALL),  # 60 GPU-seconds, where DATA takes 80
        (Budget(seconds=11), DATA),  # 80, where LARGE takes 96
        (Budget(seconds=11, memory_bytes=2**30), LARGE),
    ],
)
def test_budgets(budget: Budget, best: Answer) -> None:
    assert suggest(EVERY, SAMPLES, budget).best is best


@pytest.mark.parametrize(
    ("budget", "why"),
    [
        (Budget(gpus=1), "at most 1 GPUs"),
        (Budget(memory_bytes=2**29), "the least, ds at 16 GPUs, needs 1 GiB"),
        (Budget(seconds=3), "the fastest, ds at 16 GPUs"),
    ],
)
def test_no_suggestion_says_why(budget: Budget, why: str) -> None:
    found = suggest(EVERY, SAMPLES, budget)
    assert found.best is None
    assert why in found.why


def test_what_does_not_fit_is_not_suggested() -> None:
    assert suggest([answer("ds", 16, 1.0, fits=False), DATA], SAMPLES, Budget()).best is DATA


def test_one_device_has_no_runner_up() -> None:
    """Every strategy is the same run there."""
    alone = [answer(name, 1, 50.0) for name in ("serial", "data", "spatial", "pipeline")]
    assert {a.kind for a in alone} == {"serial"}
    found = suggest(alone, SAMPLES, Budget())
    assert (found.best, found.runner_up, found.margin) == (alone[0], None, None)


def test_a_strategy_is_no_runner_up_of_its_own() -> None:
    """Nor is its run on one device, which is the serial one."""
    assert suggest([answer("data", 1, 50.0), DATA], SAMPLES, Budget()).runner_up is None


def test_what_the_models_error_does_not_tell_apart_goes_to_data_parallelism() -> None:
    """3 % of the time where nothing was measured; and it is told, with the runner-up's lead."""
    found = suggest([answer("layerwise", 8, 9.75), DATA], SAMPLES, Budget())
    assert found.best is DATA
    assert (found.gain, found.error) == (pytest.approx(10 / 9.75), 0.03)
    assert found.margin == pytest.approx(-0.025)
    text = " ".join(suggestion_lines(found, SAMPLES, Budget()))
    assert "1.03×, within the model's error (3%): data parallelism kept." in text
    assert "2.5% less time." in text
    better = answer("layerwise", 8, 9.65)
    assert suggest([better, DATA], SAMPLES, Budget()).best is better


def test_where_the_fit_is_poor_a_larger_gain_tells_nothing() -> None:
    times = SimpleNamespace(held_out_error=0.3)
    model = SimpleNamespace(measurements=SimpleNamespace(times=times))
    few, most = (cast(Priced, SimpleNamespace(model=model, error=error)) for error in (0.2, 0.05))
    quick = replace(answer("layerwise", 8, 8.5), priced=few)
    assert suggest([quick, DATA], SAMPLES, Budget()).best is DATA
    found = suggest([quick, replace(DATA, priced=most)], SAMPLES, Budget())
    assert found.best is not None
    assert (found.best.projection.strategy, found.error) == ("data", 0.2)
    better = replace(answer("layerwise", 8, 7.9), priced=few)
    assert suggest([better, DATA], SAMPLES, Budget()).best is better


def test_samples_per_second_rank_and_not_iterations() -> None:
    """A shorter iteration of fewer samples is no faster one."""
    short = replace(FILTER, projection=replace(FILTER.projection, batch=SAMPLES // 4), overlapped_s=5.0)
    assert suggest([short, DATA], SAMPLES, Budget()).best is DATA
