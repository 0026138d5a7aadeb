"""Plans for what a failure leaves: which, and that a restart finds them in the cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from layerwise.cache import answers
from layerwise.plan import load_plan
from layerwise.search.__main__ import main as search
from layerwise.search.beforehand import left, searching
from layerwise.search.rebuild import replan


@pytest.mark.parametrize(
    ("gpus", "each", "numbers"),
    [(8, 2, [6, 4]), (4, 1, [3, 2]), (4, 4, [3, 2]), (6, 2, [4, 2]), (2, 1, [1]), (3, 2, [2, 1])],
)
def test_devices_that_are_left(gpus: int, each: int, numbers: list[int]) -> None:
    """Of a node that fails with all of its devices, and of half of them."""
    assert left(gpus, each) == numbers


def test_a_restart_finds_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYERWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LAYERWISE_NO_CACHE", raising=False)
    plan = str(tmp_path / "plan.json")
    flags = ["--gpus", "2", "--profile", "cpu", "--global-batch", "8", "--gpus-per-node", "1", "--no-cache"]
    assert search(["mlp:64x12x10", *flags, "--out", plan]) == 0
    kept = answers()
    assert kept is not None
    with searching(plan, 4, 1, None, None) as process:
        process.wait(100)
    with monkeypatch.context() as patch:
        patch.setattr("layerwise.search.find._solved", lambda *_: pytest.fail("searched again"))
        assert replan(load_plan(plan), 3, 1, answers=kept).gpus == 3
    with searching(plan, 4, 1, None, None) as process:
        pass
    assert process.returncode is not None
