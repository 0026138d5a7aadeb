"""Times of layers: by hand, as they were measured, and fitted to what was measured."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from layerwise.config import Config, SearchSpace
from layerwise.cost.compute.measured import LAYER, fitted, groups, held_out_error, latest, step_name, update_name
from layerwise.cost.compute.roofline import OPTIMIZERS, UPDATED, ComputeTime, compute_time
from layerwise.cost.model import CostModel, CostOptions
from layerwise.cost.price import basis, describe, measured_share, model_error, price, unmeasured_error, warnings
from layerwise.graph.builder import GraphBuilder
from layerwise.graph.fuse import fuse
from layerwise.graph.layer import Layer
from layerwise.graph.layer_graph import LayerGraph
from layerwise.machine import DeviceGraph, Processor, Tile
from layerwise.machine.layer_times import CellTime, Conditions, LayerTimes, Work
from layerwise.measure.cells import CellTask, wanted_cells
from layerwise.ops.base import Op
from layerwise.ops.nn.conv import Conv
from layerwise.ops.nn.linear import Linear, MatMul
from layerwise.ops.nn.norm import GroupNorm
from layerwise.ops.nn.pool import Pool
from layerwise.ops.tensor.pointwise import Binary, Prelu, Unary
from layerwise.partition.layout import layout
from layerwise.tensor import TensorSpec
from tests.cost import brute, networks
from tests.cost.test_model import residual
from tests.examples import examples

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
    for optimizer, touched in (("sgd", 3), ("momentum", 8), ("adam", 18)):
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
@examples(35)
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
@examples(60)
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


FIT_CONV = '{"op":{"kind":"conv","out_channels":4},"followers":[[{"kind":"unary","fn":"relu"},0,0]]}'
OTHER = '{"op":{"kind":"conv","out_channels":9},"followers":[[{"kind":"unary","fn":"relu"},0,0]]}'
PLAIN = '{"op":{"kind":"linear","out_features":4}}'
positive = st.floats(1e-6, 1e-2)


def cells(factors: tuple[float, float, float], count: int, seed: int = 0) -> dict[tuple[int, ...], CellTime]:
    """Times that are `factors` of random work, twice that backward."""
    rng = np.random.default_rng(seed)
    found = {}
    for i in range(count):
        work = (float(rng.integers(1, 4)), *rng.uniform(1e-5, 1e-3, 2).tolist())
        seconds = float(np.dot(factors, work))
        found[i,] = CellTime(seconds, 2 * seconds, 0.01, 9, Work(*work), Work(*work))
    return found


@given(st.tuples(positive, st.floats(0.5, 3), st.floats(0, 3)), st.integers(4, 12))
@examples(25)
def test_times_made_of_the_terms_are_found_again(factors: tuple[float, float, float], count: int) -> None:
    fit = fitted({FIT_CONV: cells(factors, count)})
    work = np.array([[2, 3e-4, 5e-4], [1, 1e-5, 1e-3]])
    for direction, times in ((0, 1), (1, 2)):
        found = fit(FIT_CONV, direction, work)
        assert found == pytest.approx(times * (work @ np.array(factors)), rel=1e-6)


@given(st.lists(st.tuples(positive, positive, positive, positive), min_size=4, max_size=12))
@examples(35)
def test_factors_are_never_negative(rows: list[tuple[float, float, float, float]]) -> None:
    """So no cell, however small, is predicted below nothing; and less work never takes longer."""
    known = {(i,): CellTime(t, t, 0.0, 1, Work(1, a, b), Work(1, a, c)) for i, (t, a, b, c) in enumerate(rows)}
    fit = fitted({FIT_CONV: known})
    for factors in fit.factors.values():
        assert (factors >= 0).all()
        assert factors.any()


def test_the_likest_cells_that_were_measured_are_fitted_to() -> None:
    one = np.array([[1.0, 1e-4, 1e-4]])
    slow, fast = cells((1e-5, 4, 4), 6), cells((1e-5, 1, 1), 6)
    both = fitted({FIT_CONV: slow, PLAIN: fast})
    assert both(FIT_CONV, 0, one) == pytest.approx(1e-5 + 8e-4)
    assert both(OTHER, 0, one) == pytest.approx(1e-5 + 8e-4)  # a convolution with relu, of other channels
    assert both(PLAIN, 0, one) == pytest.approx(1e-5 + 2e-4)
    pool = both('{"op":{"kind":"pool"}}', 0, one)
    assert pool is not None
    assert 1e-5 + 2e-4 < pool < 1e-5 + 8e-4  # like all of them
    assert both(update_name("sgd"), 0, one) is None
    assert fitted({FIT_CONV: dict(list(slow.items())[:3])})(FIT_CONV, 0, one) is None  # three cells for three factors
    assert groups(FIT_CONV) == (FIT_CONV, "conv+relu", "conv", "all")
    assert groups(update_name("sgd")) == (update_name("sgd"),)


def test_the_error_is_of_cells_held_out() -> None:
    where = Conditions("device", "2.13.0", "float32")
    exact = LayerTimes(where, cells={FIT_CONV: cells((1e-5, 2, 1), 20)})
    assert held_out_error(exact) == pytest.approx(0, abs=1e-9)
    assert held_out_error(LayerTimes(where, cells={FIT_CONV: cells((1e-5, 2, 1), 9)})) is None
    # A cell in two takes double: the fit lies between, whatever it was given.
    odd = {key: t if key[0] % 2 else CellTime(2 * t.forward_s, 2 * t.backward_s, 0, 1, t.forward, t.backward)
           for key, t in cells((1e-5, 2, 1), 40).items()}  # fmt: skip
    error = held_out_error(LayerTimes(where, cells={FIT_CONV: odd}))
    assert error is not None
    assert 0.2 < error < 0.7


WHERE = Conditions(brute.PROCESSOR.name, "2.13.0", "float32", threads=1)
SPACE = SearchSpace(6, ("n", "c", "l", "k"), spread=True)


def machine(*sets: LayerTimes) -> DeviceGraph:
    return replace(brute.machine((2, 6)), layers=sets)


def model_of(*sets: LayerTimes, **options: str) -> CostModel:
    return CostModel(residual(), machine(*sets), CostOptions(**options))  # type: ignore[arg-type]


def all_cells(model: CostModel) -> dict[tuple[str, tuple[int, ...]], CellTask]:
    return wanted_cells(model, {layer.name: SPACE.configurations(layer.space.dims) for layer in model.graph.inner})


def times_of(cells: list[CellTask], scale: float = 1.0) -> LayerTimes:
    """Made-up times: different for every cell."""
    found: dict[str, dict[tuple[int, ...], CellTime]] = {}
    for i, cell in enumerate(cells):
        t = scale * (1 + i) * 1e-5
        found.setdefault(cell.name, {})[cell.extents] = CellTime(t, 2 * t, 0.1, 9, cell.forward, cell.backward)
    return LayerTimes(WHERE, cells=found)


def test_every_configuration_costs_what_its_cell_was_measured_to() -> None:
    cells = all_cells(model_of())
    times = times_of(list(cells.values()))
    model = model_of(times)
    for layer in model.graph.inner:
        for config in SPACE.configurations(layer.space.dims):
            own = wanted_cells(
                model, {other.name: (Config(),) for other in model.graph.inner} | {layer.name: (config,)}
            )
            compute = model.node_cost(layer, (config,)).compute
            mine = [times.cells[name][row] for name, row in own if name in times.cells]
            assert any(np.isclose(compute.forward[0], t.forward_s) for t in mine), f"{layer.name} {config}"
            assert compute.measured == pytest.approx(compute.total)
            assert not compute.fitted.any()
    fused = model.graph["linear"]
    (config,) = (Config.of({"c": 3}),)
    (cell,) = (c for c in all_cells(model).values() if c.what == "linear" and c.extents[:3] == (6, 1, 30))
    (update,) = (c for c in all_cells(model).values() if c.name == update_name("sgd") and c.extents == (30, 1))
    expected = [times.cells[c.name][c.extents].forward_s for c in (cell, update)]
    compute = model.node_cost(fused, (config,)).compute
    assert [float(compute.forward[0]), float(compute.update[0])] == pytest.approx(expected)
    assert float(compute.backward[0]) == pytest.approx(2 * expected[0])


def test_the_rest_is_fitted_and_without_anything_to_fit_to_analytic() -> None:
    cells = list(all_cells(model_of()).values())
    analytic = model_of()
    some = times_of([c for i, c in enumerate(cells) if i % 2])
    none = LayerTimes(WHERE, cells={LAYER: {(): CellTime(1.0, 1.0, 0, 1)}})
    parts = {"measured": 0, "fitted": 0}
    for layer in analytic.graph.inner:
        configs = SPACE.configurations(layer.space.dims)
        compute = model_of(some).node_cost(layer, configs).compute
        assert (compute.measured >= 0).all()
        assert (compute.measured + compute.fitted <= compute.total * (1 + 1e-12)).all()
        for name in parts:
            parts[name] += int((getattr(compute, name) > 0).sum())
        left = model_of(none).node_cost(layer, configs).compute
        roofline = analytic.node_cost(layer, configs).compute
        for part in ("forward", "backward", "update"):
            assert getattr(left, part) == pytest.approx(getattr(roofline, part))
        assert not (left.measured + left.fitted).any()
    assert min(parts.values()) > 20


def test_what_the_runtime_adds_is_paid_by_layer_and_by_step() -> None:
    cells = list(all_cells(model_of()).values())
    times = times_of(cells)
    extra = {LAYER: {(): CellTime(0.25, 0.5, 0, 1)}, step_name("sgd"): {(): CellTime(3.0, 5.0, 0, 1)}}
    plain, more = model_of(times), model_of(replace(times, cells={**times.cells, **extra}))
    for layer in plain.graph.inner:
        a, b = (model.node_cost(layer, (Config(),)).compute for model in (plain, more))
        assert float((b.forward - a.forward)[0]) == pytest.approx(0.25)
        assert float((b.backward - a.backward)[0]) == pytest.approx(0.5)
    serial = {layer.name: Config() for layer in plain.graph.inner}
    difference = price(more, serial).step_time_s - price(plain, serial).step_time_s
    assert difference == pytest.approx(8 + 0.75 * len(serial))


def test_the_shares_are_of_the_whole() -> None:
    model = model_of(replace(times_of(list(all_cells(model_of()).values())[::3]), held_out_error=0.07))
    serial = {layer.name: Config() for layer in model.graph.inner}
    found = price(model, serial)
    on = basis(model, found)
    assert on.measured + on.fitted + on.analytic == pytest.approx(1)
    assert min(on.measured, on.fitted) > 0
    assert on.of_step == pytest.approx(sum(p.seconds["compute"] for p in found.layers.values()) / found.step_time_s)
    share = measured_share(model, serial)
    assert share == pytest.approx(on.measured)
    assert model_error(model, serial) == pytest.approx(0.01 * on.measured + 0.07 * (on.fitted + on.analytic))
    said = describe(model, on)
    assert f"{on.measured:.0%} measured on {WHERE.device} (float32, torch 2.13.0, 1 thread)" in said
    assert "median error 7.0% on cells held out" in said
    assert "not measured but an analytic roofline" in describe(model_of(), basis(model_of(), price(model_of(), serial)))


@pytest.mark.parametrize(("held_out", "unmeasured"), [(None, 0.03), (0.01, 0.03), (0.3, 0.3)])
def test_what_is_fitted_errs_as_cells_held_out_of_the_fit_do(held_out: float | None, unmeasured: float) -> None:
    """But no less than a roofline is taken to, as few cells may fit one another by chance."""
    wanted = list(all_cells(model_of()).values())
    serial = {layer.name: Config() for layer in model_of().graph.inner}
    for known in (wanted, wanted[::3], wanted[:0]):
        model = model_of(replace(times_of(known), held_out_error=held_out))
        share = measured_share(model, serial)
        assert model_error(model, serial) == pytest.approx(0.01 * share + unmeasured * (1 - share))
    assert unmeasured_error(model) == unmeasured
    assert model_error(model_of(), serial) == unmeasured_error(model_of()) == 0.03


def test_the_latest_set_of_the_element_type_is_used() -> None:
    sets = [
        LayerTimes(replace(WHERE, dtype=d, torch=t)) for d, t in (("float32", "1"), ("float64", "2"), ("float32", "3"))
    ]
    assert latest(sets, "float32") is sets[2]
    assert latest(sets, "float64") is sets[1]
    assert latest(sets, "bfloat16") is None


def test_other_conditions_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layerwise.cost.price.version", lambda name: {"torch": "2.13.0+cpu"}[name])
    assert not list(warnings(model_of()))
    assert not list(warnings(model_of(LayerTimes(WHERE))))
    (said,) = warnings(model_of(LayerTimes(WHERE), dtype="float16"))
    assert "has times for float32 only, so t_C in float16 is analytic" in said
    (said,) = warnings(model_of(LayerTimes(replace(WHERE, torch="2.11.0+cu128"))))
    assert "torch 2.11.0+cu128, but 2.13.0+cpu is installed" in said
    (said,) = warnings(model_of(LayerTimes(replace(WHERE, device="another"))))
    assert "measured on another" in said


class Passes(TorchDispatchMode):
    """Counts the tensors of `size` elements that operations read and write."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.count = size, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read = self.full(args)
        if not func.is_view:
            writes = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
            self.count += len({x.data_ptr() for x in read}) + ((writes and bool(read)) or len(self.full(out)))
        return out

    def full(self, values: Any) -> list[Tensor]:
        """Those of the parameters' size."""
        return [x for x in pytree.tree_leaves(values) if isinstance(x, Tensor) and x.numel() == self.size]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_is_priced_by_what_pytorch_reads_and_writes(name: str, foreach: bool) -> None:
    p = nn.Parameter(torch.randn(1000))
    made: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "sgd": lambda: torch.optim.SGD([p], 0.1, foreach=foreach),
        "momentum": lambda: torch.optim.SGD([p], 0.1, momentum=0.9, foreach=foreach),
        "adam": lambda: torch.optim.Adam([p], foreach=foreach),
    }
    optimizer = made[name]()
    for _ in range(2):  # states are made in the first
        p.grad = torch.randn(1000)
        with torch.no_grad(), Passes(1000) as passes:
            optimizer.step()
    assert passes.count == UPDATED[name]
