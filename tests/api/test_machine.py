"""A cache of measured profiles that is damaged, cannot be written, or no longer true."""

from pathlib import Path

import pytest

from layerwise.machine import load as load_profile
from tests.comm.pool import run_ranks


@pytest.mark.slow
def test_a_corrupt_file_counts_as_not_there(tmp_path: Path) -> None:
    (unmeasured, measured), _ = run_ranks(2, "tests.api.ranks:in_a_bad_cache", str(tmp_path / "cache"))
    for told in (unmeasured, measured):
        assert "is of no use, as if it were not there" in told
        assert ".json" in told
    assert "nothing was measured here" in unmeasured
    assert "what was measured on these ranks" in measured
    (path,) = (tmp_path / "cache").glob("*.json")
    assert load_profile(path).links is not None


@pytest.mark.slow
def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (_, measured), nothing = run_ranks(2, "tests.api.ranks:in_a_bad_cache", str(tmp_path / "file" / "cache"))
    assert "what was measured on these ranks (not kept)" in measured
    assert "cannot be written" in measured
    assert nothing == ("", "")


@pytest.mark.slow
def test_what_is_no_longer_true_is_measured_again(tmp_path: Path) -> None:
    (first, links, layers), nothing = run_ranks(2, "tests.api.ranks:with_a_stale_cache", str(tmp_path))
    assert "again" not in first
    assert "links in a node differ from the measurement on" in links
    assert "measuring the links again" in links
    assert "layers differ from the measurement on" in layers
    assert "measuring the layers again" in layers
    assert nothing == ["", "", ""]
