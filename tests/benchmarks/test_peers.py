"""A row that was ended is one that took too long, not one that failed, and no time is told beside a row that is not."""

import sys
from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.common.launch import printed


def test_what_takes_too_long_is_not_what_is_killed() -> None:
    assert printed([sys.executable, "-c", "while True: pass"], 1) is None
    with pytest.raises(SystemExit, match="ended with -9"):
        printed(["bash", "-c", "kill -9 $$"], 5)


def test_others_are_not_told_beside_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scheduler.py").touch()
    monkeypatch.setattr(peers, "in_a_process", lambda *_, **__: None)
    monkeypatch.setattr(sys, "argv", ["peers", str(tmp_path), "--models", "alexnet", "--gpus", "8"])
    with pytest.raises(SystemExit, match="alexnet at 8: ours takes longer than --limit 300"):
        peers.main()


def test_toulbar2_finds_the_same_optimum() -> None:
    pytest.importorskip("pytoulbar2")
    found = [peers.ours("alexnet", 8), *(peers.toulbar2("alexnet", 8, which) for which in ("left", "all"))]
    assert [row["optimum_s"] for row in found] == pytest.approx([found[0]["optimum_s"]] * 3)
