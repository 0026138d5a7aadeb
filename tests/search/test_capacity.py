"""What devices hold: the bisections are what trying every number finds, and the memory model agrees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.__main__ import dispatch
from layerwise.cli import run_main
from layerwise.search.capacity import STEP, Limits, Tried, largest_side, least_devices

SEARCH = "search unet3d:32 --profile cpu --global-batch 1 --inference --io boxes --dims d,c"


@given(st.integers(1, 40), st.floats(1, 100), st.floats(1, 3000))
def test_the_least_number_of_devices(most: int, fixed: float, shared: float) -> None:
    def need(count: int) -> float:
        return fixed + shared / count

    fitting = [count for count in range(1, most + 1) if need(count) <= 100]
    least = fitting[0] if fitting else None
    beyond = most if least is None else least - 1
    assert least_devices(need, 100, most) == Limits(
        None if least is None else Tried(least, need(least)), Tried(beyond, need(beyond)) if beyond else None
    )


@given(st.integers(8, 400), st.integers(8, 500), st.integers(8, 60))
def test_the_largest_cube(largest: int, start: int, least: int) -> None:
    """From whatever side the bisection starts."""
    tried = list(range(-(-least // STEP) * STEP, 257, STEP))
    fitting = [side for side in tried if side <= largest]
    limits = largest_side(float, largest, start, least, 256)
    assert limits.fits == (Tried(fitting[-1], fitting[-1]) if fitting else None)
    beyond = None if fitting and fitting[-1] == tried[-1] else fitting[-1] + STEP if fitting else tried[0]
    assert limits.beyond == (None if beyond is None else Tried(beyond, beyond))


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert run_main(dispatch, [*SEARCH.split(), *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_as_a_user_asks(capsys: pytest.CaptureFixture[str]) -> None:
    """A search finds a plan for what fits."""
    capacity = answer(capsys, "--gpus", "3", "--memory-limit", "60MB", "--capacity")
    devices, side = capacity["devices"]["fits"]["number"], capacity["side"]["fits"]["number"]
    assert capacity["devices"]["beyond"]["number"] == devices - 1 > 0
    assert capacity["side"]["beyond"]["number"] == side + STEP
    plan = answer(capsys, "--gpus", str(devices), "--memory-limit", "60MB", "--effort", "quick", "--no-cache")
    assert plan["memory_bytes"] <= 60e6
    assert capacity["devices"]["beyond"]["bytes"] > 60e6
    assert run_main(dispatch, [*SEARCH.split(), "--gpus", "3", "--capacity", "--layers"]) == 2
    assert "leave out --layers" in " ".join(capsys.readouterr().err.split())


def test_fewer_devices_may_hold_what_more_do_not() -> None:
    """A plan takes a divisor of what there is: 7 devices are one, or all."""
    assert least_devices({1: 9, 2: 7, 3: 6, 4: 6, 5: 6, 6: 4, 7: 9}.__getitem__, 5, 7).fits == Tried(6, 4)


def test_no_code_is_imported_that_nobody_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lenet5.py").write_text("open('it was run', 'w')")
    monkeypatch.chdir(tmp_path)
    asked = ["search", "lenet5", "--gpus", "2", "--profile", "cpu", "--gpus-per-node", "2", "--capacity", "--json"]
    assert run_main(dispatch, asked) == 0
    assert "side" not in json.loads(capsys.readouterr().out)
    assert not (tmp_path / "it was run").exists()
