"""Facts read off layer graphs: sizes, channels, windows, and which inputs a filter split gathers."""

from functools import cache

import pytest

from benchmarks.paradl.facts import Facts, LayerFacts, facts_of
from benchmarks.paradl.halos import halo_messages, published_halo
from layerwise.graph.fuse import fuse
from layerwise.importers.load import load_model
from layerwise.machine import load


@cache
def facts(name: str) -> Facts:
    return facts_of(fuse(load_model(name, 2)), load("v100"))


def layer(model: str, name: str) -> LayerFacts:
    return next(y for y in facts(model).layers if y.name == name)


def test_the_sizes_of_vgg16() -> None:
    f = facts("vgg16")
    assert f.parameters == 138_357_544
    assert f.weights == f.parameters - 13_416  # biases
    assert len(f.weighted()) == 16
    second = layer("vgg16", "features.2")
    assert (second.inputs, second.outputs) == (64 * 224 * 224, 64 * 224 * 224)
    assert (second.weights, second.biases, second.filters, second.channels) == (64 * 64 * 9, 64, 64, 64)
    assert second.places == (("h", 224), ("w", 224))


def test_cosmoflow_is_what_paradl_ran() -> None:
    assert facts("cosmoflow:256").parameters == 2_131_252
    assert dict(layer("cosmoflow:256", "features.0").places) == {"d": 254, "h": 254, "w": 254}


def test_what_is_gathered() -> None:
    """Not the network's input, not what a pooling reads; a residual addition needs its own channels only."""
    assert layer("vgg16", "features.0").gathered == ()
    assert layer("vgg16", "features.4").gathered == ()
    assert layer("vgg16", "features.5").gathered == (64 * 112 * 112,)
    assert layer("vgg16", "classifier.0").gathered == (512 * 7 * 7,)
    assert layer("resnet50", "layer1.1.conv3").gathered == (64 * 56 * 56,)


@pytest.mark.parametrize(
    ("name", "kernel", "low", "high"),
    [("layer1.0.conv2", 3, 1, 1), ("layer2.0.conv2", 3, 1, 0), ("conv1", 7, 3, 2), ("layer1.0.conv1", 1, 0, 0)],
)
def test_how_far_a_window_reaches(name: str, kernel: int, low: int, high: int) -> None:
    """A stride of two starts on its own first row, so it needs one row fewer of the next cell."""
    window = layer("resnet50", name).windows[0]
    assert (window.kernel, window.low, window.high) == (kernel, low, high)


def test_halos() -> None:
    conv = layer("resnet50", "layer1.0.conv2")  # 3 × 3, 64 channels of 56 × 56
    assert published_halo(conv, {"h": 4}) == (64 * 56, 64 * 56)
    assert published_halo(conv, {"h": 2, "w": 2}) == (2 * 64 * 28, 2 * 64 * 28)
    assert published_halo(conv, {}) == (0, 0)
    assert list(halo_messages(conv, {"h": 4})) == [64 * 56, 64 * 56]
    assert list(halo_messages(conv, {"h": 2})) == [64 * 56]
    assert list(halo_messages(layer("resnet50", "layer2.0.conv2"), {"h": 4})) == [128 * 56]
