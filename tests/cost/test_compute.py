"""Compute times: the roofline by hand, and what must hold of any layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerwise.config import Config
from layerwise.cost.compute.roofline import ComputeTime, compute_time
from layerwise.graph.builder import GraphBuilder
from layerwise.graph.fuse import fuse
from layerwise.graph.layer import Layer, LayerGraph
from layerwise.machine import Processor, Tile
from layerwise.ops.base import Op
from layerwise.ops.nn.conv import Conv
from layerwise.ops.nn.linear import Linear, MatMul
from layerwise.ops.nn.norm import GroupNorm
from layerwise.ops.nn.pool import Pool
from layerwise.ops.tensor.pointwise import Binary, Prelu, Unary
from layerwise.partition.layout import layout
from layerwise.tensor import TensorSpec
from tests.cost import brute, networks

# Arithmetic alone, or memory alone, or kernels alone cost anything. One element a tile: no quantisation.
ARITHMETIC = Processor("arithmetic", 1, 1e30, {"float32": 1e12}, 1, (Tile(1, 1, 1.0),), 1e-30)
MEMORY = replace(ARITHMETIC, memory_bandwidth_bytes_per_s=1e9, peak_flops={"float32": 1e30})
LAUNCHES = replace(MEMORY, memory_bandwidth_bytes_per_s=1e30, kernel_floor_s=1.0)


def one(spec: TensorSpec, *ops: Op) -> Layer:
    """The layer that these operators, one after the other, fuse into."""
    b = GraphBuilder("one")
    x = b.input("x", spec)
    for i, op in enumerate(ops):
        x = networks.add(b, f"op{i}", op, [x])
    (layer,) = fuse(b.finish([x])).inner
    return layer


def times(
    layer: Layer,
    processor: Processor,
    *degrees: dict[str, int],
    wanted: Sequence[bool] = (True,),
    optimizer: str = "sgd",
) -> ComputeTime:
    configs = [Config.of(d) for d in degrees or ({},)]
    return compute_time(layer, layout(configs, layer.space, 64), wanted, processor, "float32", optimizer)


IMAGE = TensorSpec((4, 6, 8, 8), ("n", "c", "h", "w"))
CONV = Conv(10, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))
FLOPS = 2 * 4 * 10 * 64 * 6 * 9


def test_convolution_by_hand() -> None:
    layer = one(IMAGE, CONV)
    first = times(layer, ARITHMETIC, wanted=[False])
    assert first.forward == pytest.approx(FLOPS / 1e12)
    assert first.backward == pytest.approx(FLOPS / 1e12)  # of the weights: nobody wants the gradient of the samples
    split = times(layer, ARITHMETIC, {}, {"n": 2, "c": 5}, {"h": 3}, {"k": 3})  # 3 rows of 8 at most; a third of k
    share = np.array([1, 1 / 10, 3 / 8, 1 / 3])
    assert split.forward == pytest.approx(FLOPS / 1e12 * share)
    assert split.backward == pytest.approx(2 * FLOPS / 1e12 * share)
    x, weight, y = 4 * 6 * 64, 10 * 6 * 9, 4 * 10 * 64
    moved = times(layer, MEMORY, {}, {"c": 2}, {"h": 4})
    halo = x * 4 / 8  # 2 rows and one more on either side
    expected = [x + weight + 10 + y, x + (weight + 10 + y) / 2, halo + weight + 10 + y / 4]
    assert moved.forward == pytest.approx(4e-9 * np.array(expected))
    assert moved.backward == pytest.approx(8e-9 * np.array(expected))


def test_linear_and_followers_by_hand() -> None:
    """A gradient flows through all that comes after the weights, though the samples want none."""
    layer = one(TensorSpec((8, 16), ("n", None)), Linear(12), Unary("relu"), Prelu(12))
    found = times(layer, ARITHMETIC, wanted=[False])
    assert found.forward == pytest.approx((2 * 8 * 16 * 12 + 2 * 8 * 12) / 1e12)
    assert found.backward == pytest.approx(found.forward)
    x, weight, y = 8 * 16, 12 * 16 + 12, 8 * 12
    moved = times(layer, MEMORY, {}, {"k": 4}, wanted=[False])  # the epilogue sees a quarter of the channels
    expected = [(x + weight + y) + 2 * y + (2 * y + 12), x / 4 + 12 * 4 + 3 + y + 2 * y / 4 + (2 * y / 4 + 3)]
    assert moved.forward == pytest.approx(4e-9 * np.array(expected))
    assert moved.backward - moved.forward == pytest.approx(4e-9 * np.array([2 * y, 2 * y / 4]))  # read twice more
    assert times(layer, LAUNCHES).forward == 3
    assert times(layer, LAUNCHES).backward == 4


def test_pooling_by_hand() -> None:
    pool = Pool("max", (2, 2), (2, 2), ((0, 0), (0, 0)), (1, 1))
    layer = one(IMAGE, pool, Unary("relu"))
    found = times(layer, ARITHMETIC, {}, {"n": 4, "h": 2})
    flops = 4 * 6 * 16 * (4 + 1)
    assert found.forward == pytest.approx([flops / 1e12, flops / 8 / 1e12])
    assert found.backward == pytest.approx(found.forward)
    x, y = 4 * 6 * 64, 4 * 6 * 16
    moved = times(layer, MEMORY)
    assert moved.forward == pytest.approx(4e-9 * (x + 3 * y))
    assert moved.backward == pytest.approx(4e-9 * (2 * x + 4 * y))
    assert (times(layer, MEMORY, wanted=[False]).backward == 0).all()  # at the samples: nothing to learn


def test_a_product_of_activations_has_the_gradients_that_are_wanted() -> None:
    b = GraphBuilder("product")
    x, y = (b.input(name, TensorSpec((4, 8, 8), ("n", "s", None))) for name in "xy")
    layer = b.finish([networks.add(b, "product", MatMul(), [x, y])])["product"]
    for wanted, kernels in (((False, False), 0), ((True, False), 1), ((False, True), 1), ((True, True), 2)):
        assert times(layer, LAUNCHES, wanted=wanted).backward == kernels


def test_a_follower_passes_on_the_gradient_of_its_own_input() -> None:
    """pool(x) + y: where only y learns, the pooling is not run backward."""
    b = GraphBuilder("added")
    x, y = (b.input(name, TensorSpec((2, 3, 4), ("n", "c", "l"))) for name in "xy")
    pooled = networks.add(b, "pool", Pool("max", (1,), (1,), ((0, 0),), (1,)), [x])
    layer = fuse(b.finish([networks.add(b, "add", Binary("add"), [pooled, y])]))["pool"]
    assert (layer.inputs, layer.epilogue) == (("x", "y"), ("add",))
    for wanted, kernels in (((False, False), 0), ((False, True), 1), ((True, False), 2), ((True, True), 2)):
        assert times(layer, LAUNCHES, wanted=wanted).backward == kernels


def test_tiles_and_waves_by_hand() -> None:
    """5 x 5 outputs in tiles of 2 x 2: 9 tiles on 4 processors are 3 waves; 4 x 2 are 2 tiles, each of 2 splits."""
    processor = replace(ARITHMETIC, processors=4, tiles=(Tile(2, 2, 0.5),))
    each = 2 * 2 * 2 / (1e12 / 4 * 0.5)  # a tile of depth 1
    found = [
        times(one(TensorSpec((rows, depth), ("n", None)), Linear(columns)), processor).forward
        for rows, depth, columns in ((5, 100, 5), (4, 1024, 2), (4, 100, 2), (4, 384, 2))
    ]
    assert np.ravel(found) == pytest.approx([3 * 100 * each, 512 * each, 100 * each, 256 * each])
    best = replace(processor, tiles=(Tile(2, 2, 0.5), Tile(8, 8, 0.5)))  # one large tile is slower than 9 small ones
    assert times(one(TensorSpec((5, 100), ("n", None)), Linear(5)), best).forward == pytest.approx(3 * 100 * each)


def test_the_optimizer_reads_and_writes_its_state() -> None:
    layer = one(TensorSpec((8, 16), ("n", None)), Linear(12))
    parameters = 4 * (12 * 16 + 12)
    for optimizer, touched in (("sgd", 3), ("momentum", 5), ("adam", 7)):
        found = times(layer, MEMORY, {}, {"n": 8}, {"c": 4}, {"k": 4}, optimizer=optimizer)
        biased = 4 * (12 * 4 + 3)  # of k, a quarter of the weights and, after the scatter, of the biases
        assert found.update == pytest.approx(
            1e-9 * touched * np.array([parameters, parameters, parameters / 4, biased])
        )


def test_cells_are_cut_as_coarsely_as_any_follower() -> None:
    """12 channels in groups of 4 over two devices: one has 8, which cost as much as all of a layer of 8."""
    spec = TensorSpec((16, 32, 20), ("n", "c", "l"))
    split = one(spec, networks.pointwise_conv(12, 1), GroupNorm(3))
    whole = one(spec, networks.pointwise_conv(8, 1), GroupNorm(2))
    for processor in (ARITHMETIC, MEMORY):
        assert times(split, processor, {"c": 2}).total == pytest.approx(times(whole, processor).total)


@given(networks.branches(), st.integers(2, 4), st.integers(1, 3))
@settings(max_examples=60)
def test_a_share_of_the_samples_costs_what_a_smaller_batch_does(network: LayerGraph, degree: int, each: int) -> None:
    """On any processor; parameters are updated whole."""
    large, small = network.rebatch(degree * each), network.rebatch(each)
    for layer in large.inner:
        if not any(d.label == "n" for d in layer.space.dims):
            continue
        wanted = [True] * len(layer.inputs)
        for processor in (brute.PROCESSOR, MEMORY):
            found = times(layer, processor, {"n": degree}, wanted=wanted)
            expected = times(small[layer.name], processor, wanted=wanted)
            for part in ("forward", "backward", "update"):
                assert getattr(found, part) == pytest.approx(getattr(expected, part)), layer.name


@given(st.tuples(*[st.integers(1, 3000)] * 3), st.integers(0, 2), st.integers(1, 600), st.integers(1, 3))
@settings(max_examples=200)
def test_more_work_never_takes_less_time(sizes: tuple[int, ...], which: int, more: int, kernel: int) -> None:
    """More samples, more input channels or more output channels."""
    larger = tuple(s + more * (i == which) for i, s in enumerate(sizes))
    found = []
    for n, depth, width in (sizes, larger):
        conv = Conv(width, (kernel,), (1,), ((0, 0),), (1,))
        layer = one(TensorSpec((n, depth, 8), ("n", "c", "l")), conv, Unary("relu"))
        found.append(times(layer, brute.PROCESSOR))
    for part in ("forward", "backward", "update"):
        assert getattr(found[0], part) <= getattr(found[1], part) * (1 + 1e-12), part
