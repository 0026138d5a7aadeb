"""A profile of these ranks is measured once, then taken from the cache."""

from pathlib import Path

from tests.comm.pool import run_ranks


def test_measured_once(tmp_path: Path) -> None:
    (first, second), nothing = run_ranks(2, "tests.api.ranks:measured_here", str(tmp_path / "cache"))
    assert nothing == []
    assert first["dtype"] == "float64"
    assert first["cells"] > 0
    assert second["links"] == first["links"]
    assert second["cells"] >= first["cells"]
