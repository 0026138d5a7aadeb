"""StepCheck: whether steps take what the plan predicts is told once, and only where they do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from layerwise.plan import Plan
from layerwise.run import step_check
from layerwise.run.step_check import FIRST, STEPS, StepCheck
from layerwise.trace import Trace
from tests.run.small_plans import plan

PLAN = plan("lenet5", 4, 2)
PREDICTED = {
    "timeline_s": 0.12, "timeline_low_s": 0.10, "timeline_high_s": 0.15,
    "forward_s": 0.04, "backward_s": 0.06, "exposed_sync_s": 0.02,
}  # fmt: skip


class FakeRun:
    """A run whose steps take what it is told."""

    def __init__(self, plan: Plan, said: list[str]) -> None:
        self.device, self.trace, self.now_s = torch.device("cpu"), None, 0.0
        self.trace: Trace | None
        self.step_check = StepCheck.of(plan, said.append)

    def step(self, seconds: float, *, summed: bool = True, backward: bool = True) -> None:
        check = self.step_check
        if check is not None:
            check.begin(self)
        self.now_s += seconds
        if self.step_check is not None and backward:
            self.step_check.end(self, summed=summed)
        self.now_s += 1.0  # what the loop does beside


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def run(said: list[str], monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    run = FakeRun(replace(PLAN, gpus=2, predicted=PREDICTED), said)
    monkeypatch.setattr(step_check, "now_s", lambda _: run.now_s)
    return run


@pytest.mark.parametrize(("seconds", "told"), [(0.11, False), (0.149, False), (0.3, True), (0.05, True)])
def test_a_step_out_of_its_range_is_told_once(run: FakeRun, said: list[str], seconds: float, told: bool) -> None:
    for number in range(FIRST):
        run.step(5.0 if number in (0, 1, 3, 7) else seconds)  # the first ones do not count
    check = run.step_check
    assert check is not None
    for _ in range(STEPS + 5):
        run.step(seconds)
    assert len(said) == told
    assert check.outcome["step"] == {"predicted_s": pytest.approx(0.12), "measured_s": pytest.approx(seconds)}
    assert run.step_check is run.trace is None
    if told:
        assert "but the prediction was 120 ms (100 ms to 150 ms)" in said[0]


@pytest.mark.parametrize(("later", "told"), [(0.6, True), (0.12, False)])
def test_what_is_far_off_is_told_after_eight_steps(run: FakeRun, said: list[str], later: float, told: bool) -> None:
    """And not if only the first look met slow steps, as where kernels are compiled."""
    for _ in range(5):
        run.step(0.6)
    for _ in range(3):
        assert not said
        run.step(later)
    assert len(said) == told
    assert run.step_check is run.trace is None


def test_passes_without_sums_do_not_count(run: FakeRun, said: list[str]) -> None:
    """Gradients are accumulated: every other pass is within no_sync."""
    for _ in range(FIRST + STEPS):
        run.step(9.0, summed=False)
        run.step(0.12)
    assert run.step_check is None
    assert said == []


def test_a_loop_with_several_passes_a_step_is_not_judged(run: FakeRun, said: list[str]) -> None:
    run.step(1.0, backward=False)
    run.step(1.0)
    assert run.step_check is run.trace is None
    assert said == []


def test_a_plan_that_predicts_no_range_is_not_judged() -> None:
    older = {"timeline_s": 0.1}
    assert StepCheck.of(replace(PLAN, gpus=2, predicted=older), print) is None
    assert StepCheck.of(replace(PLAN, gpus=1, predicted=PREDICTED), print) is None
