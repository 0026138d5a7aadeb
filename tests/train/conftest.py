"""Tests of `layerwise run`: each in a directory of its own."""

from pathlib import Path

import pytest

from tests.train.command import save_plans


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with plans in it."""
    monkeypatch.chdir(tmp_path)
    for name in ("COLUMNS", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    save_plans(tmp_path)
    return tmp_path
