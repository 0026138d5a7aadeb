"""Kinds of memory."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import get_args

import pytest

from layerwise.config import SearchSpace
from layerwise.cost.memory.allocations import Kind
from layerwise.cost.memory.by_kind import peak_by_kind
from layerwise.cost.memory.step import peak_bytes
from layerwise.cost.model import CostModel, CostOptions
from layerwise.cost.price import complete
from layerwise.graph.fuse import fuse
from layerwise.importers.load import load_model
from layerwise.machine import load
from layerwise.search.baselines import NAMES, baseline
from layerwise.search.find import search


def model_of(name: str, batch: int, optimizer: str = "adam") -> CostModel:
    return CostModel(fuse(load_model(name, batch)), load("h100").device_graph(4), CostOptions(optimizer=optimizer))


@pytest.mark.parametrize("name", ["lenet5", "alexnet", "unet2d"])
def test_the_kinds_sum_up_to_the_peak(name: str) -> None:
    model = model_of(name, 8)
    searched = search(model, SearchSpace(4)).best.strategy
    for strategy in (searched, *(complete(model, baseline(model, other)) for other in NAMES)):
        kinds = peak_by_kind(model, strategy)
        assert set(kinds) == set(get_args(Kind))
        assert min(kinds.values()) >= 0
        assert sum(kinds.values()) == pytest.approx(peak_bytes(model, strategy).max(), rel=1e-12)


def test_each_kind_is_what_it_says() -> None:
    """Of layers so wide that the samples are nothing: parameters, twice that for Adam, gradients, and their buckets."""
    model = model_of("mlp:1024x1024x1024x10", 4)
    size = sum(prod(p.shape) * item for layer in model.graph.inner for _, p, item in layer.held())
    whole = complete(model, baseline(model, "data"))
    kinds = peak_by_kind(model, whole)
    assert kinds["parameters"] == size
    assert kinds["states"] == 2 * size
    assert size <= kinds["gradients"] <= 1.6 * size
    assert kinds["activations"] < 0.1 * size
    shared = peak_by_kind(
        model,
        {name: replace(c, states="sharded") for name, c in whole.items() if c.total > 1}
        | {name: c for name, c in whole.items() if c.total == 1 or model.graph[name].end},
    )
    assert shared["parameters"] == pytest.approx(size / 4, rel=0.02)
    assert shared["states"] == 2 * shared["parameters"]
    assert shared["gathered"] >= 0.9 * size
