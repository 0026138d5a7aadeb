"""Every test in a directory of its own; commands that must succeed, and commands that must be refused."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from layerwise.__main__ import dispatch
from layerwise.cli import run_main
from tests.cli.commands import Run


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Every test in a directory of its own, on a terminal of no particular width, as one rank."""
    monkeypatch.chdir(tmp_path)
    for name in ("COLUMNS", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("networks", "broken_code", "quits"):
        sys.modules.pop(name, None)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command that must succeed; returns its stdout."""

    def go(*argv: str) -> str:
        assert run_main(dispatch, argv) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return go


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str], here: Path) -> Run:
    """Runs a command that must be refused; returns its one line of stderr."""

    def go(*argv: str) -> str:
        before = {path: path.read_bytes() for path in here.iterdir() if path.is_file()}
        assert run_main(dispatch, argv) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("layerwise: error: ")
        assert err.endswith("\n")
        assert err.count("\n") == 1
        assert "Traceback" not in err
        assert {path: path.read_bytes() for path in here.iterdir() if path.is_file()} == before
        return err

    return go
