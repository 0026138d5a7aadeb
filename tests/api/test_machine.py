"""A cache of measured profiles that is damaged, cannot be written, or no longer true; and what is measured first."""

from pathlib import Path

import pytest

from layerwise.api.machine import strategies
from layerwise.config import SearchSpace, check
from layerwise.cost.model import CostModel
from layerwise.graph.fuse import fuse
from layerwise.importers.load import load_model
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
    assert "of the time of the plan's layers is measured, the rest is a fit or a roofline" in measured  # 0.1 s are few
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
    assert "a roofline" not in first  # 20 s are enough
    assert "links in a node differ from the measurement on" in links
    assert "measuring the links again" in links
    assert "layers differ from the measurement on" in layers
    assert "measuring the layers again" in layers
    assert nothing == ["", "", ""]


def test_parts_by_weights_are_measured_whether_or_not_a_fit_proposes_them() -> None:
    graph = fuse(load_model("unet3d:16", 1))
    devices = load_profile("cpu,kinds=cpu:1+cpu@0.5:2").device_graph(3, 1)
    model = CostModel(graph, devices)
    cut = strategies(model, SearchSpace(3, weights=model.weights))[-1]
    spread = [cut[layer.name] for layer in graph.inner if cut[layer.name].uneven]
    assert len(spread) > len(graph.inner) / 2
    assert len({(config.degrees, config.weights) for config in spread}) == 1
    for layer in graph.inner:
        check(cut[layer.name], layer.space.dims, 3, layer.name)
