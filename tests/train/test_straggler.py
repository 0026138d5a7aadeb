"""The rank that is slower than the others is named after some looks; one with a larger or smaller part is not."""

import re
from pathlib import Path

import pytest

from layerwise.__main__ import dispatch
from layerwise.cli import run_main
from layerwise.train.straggler import LOOKS, Look, Stragglers
from tests.comm.launch import launch

SLOW = """
import os, sys, time
import torch.nn.functional as F
from layerwise.cli import run_main
from layerwise.train.command import main

if os.environ["RANK"] == "1":
    linear = F.linear

    def slow(*args, **named):
        time.sleep(0.003)
        return linear(*args, **named)

    F.linear = slow
sys.exit(run_main(main, sys.argv[1:]))
"""


def look(rank: int, seconds: float, ratio: float) -> Look | None:
    """Of a rank with one layer, which takes so many seconds."""
    return (f"node{rank}", {"layer": (seconds, seconds / ratio)} if seconds else {})


def said(times: list[tuple[float, float]], step_s: float = 4.0) -> list[str | None]:
    """What is said at each look, where these are the ranks' seconds and ratios at all of them."""
    stragglers = Stragglers(module=None)  # type: ignore[arg-type]
    looks = [look(rank, *each) for rank, each in enumerate(times)]
    return [stragglers.named(looks, step_s) for _ in range(LOOKS + 2)]


def test_it_is_named_once() -> None:
    lines = said([(1.0, 1.0), (1.5, 1.5), (1.1, 1.1)])
    assert [line is not None for line in lines] == [number == LOOKS for number in range(1, len(lines) + 1)]
    assert "rank 1 on node1 takes 1.4 times" in str(lines[LOOKS - 1])


@pytest.mark.parametrize(
    "times",
    [
        [(1.0, 1.0), (1.2, 1.2)],  # nearly as fast
        [(3.0, 1.0), (1.0, 1.0)],  # has more to do
        [(3.0, 1.0), (1.5, 1.5)],  # a small part, of which the cost of calls is much
        [(1.0, 1.0), (0.0, 0.0)],  # has no layer
    ],
)
def test_nobody_is_named(times: list[tuple[float, float]]) -> None:
    assert said(times) == [None] * (LOOKS + 2)


def test_what_nobody_feels_is_not_named() -> None:
    assert said([(1.0, 1.0), (2.0, 2.0)], step_s=100.0) == [None] * (LOOKS + 2)


def test_layers_that_one_rank_alone_has_do_not_count() -> None:
    stragglers = Stragglers(module=None)  # type: ignore[arg-type]
    looks: list[Look | None] = [("a", {"both": (1.0, 9.0), "one": (5.0, 1.0)}), ("b", {"both": (1.0, 9.0)})]
    apart: list[Look | None] = [("a", {"one": (5.0, 1.0)}), ("b", {"other": (1.0, 1.0)})]
    assert [stragglers.named(each, 4.0) for each in (looks, looks, looks, looks, apart)] == [None] * 5


def test_looks_must_agree() -> None:
    stragglers = Stragglers(module=None)  # type: ignore[arg-type]
    slow = [look(0, 1.0, 1.0), look(1, 2.0, 2.0)]
    lines = [stragglers.named(looks, 4.0) for looks in (slow, slow, slow[::-1], slow, slow, [None, None], slow)]
    assert [line is not None for line in lines] == [False] * 6 + [True]


@pytest.mark.parametrize("strategy", ["data", "model"])
def test_run_names_it(strategy: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--gpus", "2", "--profile", "cpu", "--global-batch", "16", "--price", strategy, "--out", "plan.json"]
    assert run_main(dispatch, ["search", "mlp:64x32x10", *flags]) == 0
    (here / "slow.py").write_text(SLOW)
    done = launch(["slow.py", "plan.json", "--data", "digits", "--steps", "125"])
    assert done.codes == [0, 0], done.stderr
    assert re.findall("layerwise: rank (.) on .* times as long", done.stderr[0]) == ["1"]
    assert not done.stderr[1]
