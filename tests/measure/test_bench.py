"""A bench: every cell of every kind of layer runs forward and backward, on tensors of the shapes of its key."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from layerwise.config import Config
from layerwise.cost.model import CostModel, CostOptions
from layerwise.errors import LayerwiseError
from layerwise.graph.builder import GraphBuilder
from layerwise.graph.layer_graph import LayerGraph
from layerwise.measure import bench as cold
from layerwise.measure import measuring as layers
from layerwise.measure.bench import Bench, CellSpec, LossBench, LossSpec, Mode, UpdateBench, UpdateSpec
from layerwise.measure.cells import wanted_cells
from layerwise.measure.conditions import conditions, device_of, mode_of, modes
from layerwise.measure.measuring import bench_of
from layerwise.measure.timing import Stopwatch, nothing
from layerwise.ops.nn.conv import Conv
from layerwise.ops.nn.linear import Linear
from layerwise.tensor import TensorSpec
from tests.cost import brute, networks
from tests.examples import examples

NETWORKS = networks.windows() | networks.views() | networks.branches() | networks.sequences()
CPU = Mode(torch.device("cpu"), torch.float32)


@given(NETWORKS, st.sampled_from([(1,), (2,), (4,), (2, 6)]), st.data())
@examples(15)
def test_every_cell_runs(network: LayerGraph, sizes: tuple[int, ...], data: st.DataObject) -> None:
    model = CostModel(network, brute.machine(sizes))
    configs = {
        layer.name: data.draw(brute.configs(layer.space, model.devices.count, most=2)) for layer in network.inner
    }
    for cell in wanted_cells(model, configs).values():
        if not isinstance(cell.spec, CellSpec) or "float16" in cell.name:
            continue
        layer, bench = cell.spec.layer, Bench(cell.spec, CPU)
        for _ in range(2):  # what is left from the first step must not hinder the second
            try:
                bench.forward()
            except ValueError as error:  # PyTorch refuses to normalise a single value
                assert "more than 1" in str(error)  # noqa: PT017
                assert not any(cell.spec.shared)
                break
            assert bench.out is not None
            assert tuple(bench.out.shape) == cell.spec.owned.shape, layer.name
            leaves = bench.leaves
            assert [leaf.requires_grad for leaf in leaves] == list(cell.spec.needs_grad)
            bench.backward()
            if bench.differentiable:
                assert all(p.grad is not None and p.grad.shape == p.shape for p in bench.trained)
            bench.forget()
            assert all(p.grad is None for p in bench.trained)


def test_cells_of_mixed_precision() -> None:
    """What autocast leaves in 16 bits comes in 16 bits, its gradient too; parameters are of 32."""
    b = GraphBuilder("mixed")
    x = b.input("x", TensorSpec((4, 3, 8, 8), ("n", "c", "h", "w")))
    for name in ("first", "second"):
        x = networks.add(b, name, Conv(4, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)), [x])
    devices = brute.machine((1,))
    rates = {**devices.processor.peak_flops, "bf16": 1e12}
    devices = replace(devices, processor=replace(devices.processor, peak_flops=rates))
    model = CostModel(b.finish([x]), devices, CostOptions(dtype="bfloat16"))
    mode = mode_of(torch.device("cpu"), "bf16", channels_last=False)
    cells = wanted_cells(model, {layer.name: (Config(),) for layer in model.graph.inner}).values()
    inputs = []
    for cell in cells:
        if isinstance(cell.spec, CellSpec):
            bench = Bench(cell.spec, mode)
            inputs += [x.dtype for x in bench.inputs]
            bench.forward()
            assert bench.out is not None
            assert bench.out.dtype == bench.gradients[0].dtype == torch.bfloat16
            bench.backward()
            assert {p.grad.dtype for p in bench.trained if p.grad is not None} == {torch.float32}
        elif isinstance(cell.spec, LossSpec):
            assert cell.name.startswith("loss of bfloat16")
            assert LossBench(cell.spec, mode).outputs[0].dtype == torch.bfloat16
    assert inputs == [torch.float32, torch.bfloat16]


def test_the_partial_sums_of_k_are_cut_and_added() -> None:
    """4 devices with a quarter of k each: 3 others' parts are added to the quarter that is owned."""
    b = GraphBuilder("one")
    x = b.input("x", TensorSpec((8, 16), ("n", None)))
    graph = b.finish([networks.add(b, "linear", Linear(12), [x])])
    model = CostModel(graph, brute.machine((4,)))
    cells = wanted_cells(model, {"linear": (Config.of({"k": 4}),)})
    (spec,) = (cell.spec for cell in cells.values() if isinstance(cell.spec, CellSpec))
    assert (spec.cell.shape, spec.owned.shape) == ((8, 12, 4), (8, 3))
    bench = Bench(spec, CPU)
    assert [tuple(p.shape) for p in bench.trained] == [(12, 4), (3,)]
    bench.forward()
    assert bench.out is not None
    assert bench.reduce is not None
    part = torch.ones(8, 12)
    assert (bench.reduce(part) == 4).all()


def test_updates_and_losses() -> None:
    for optimizer in ("sgd", "momentum", "adam"):
        update = bench_of(UpdateSpec(optimizer, (6, 2)), CPU)
        assert isinstance(update, UpdateBench)
        before = [p.detach().clone() for p in update.parameters]
        update.forward()
        assert all((p != old).any() for p, old in zip(update.parameters, before, strict=True))
    loss = bench_of(LossSpec(((4, 3), (2, 3, 5), (4,))), CPU)
    assert isinstance(loss, LossBench)
    loss.forward()
    assert loss.total is not None
    assert loss.total.dim() == 0
    loss.backward()


def test_mixed_precision_is_as_the_runtime_has_it() -> None:
    mode = mode_of(torch.device("cpu"), "bfloat16", channels_last=False)
    with mode.mixed():
        assert nn.Linear(4, 4)(torch.ones(2, 4)).dtype == torch.bfloat16
    assert mode.dtype == torch.float32
    last = mode_of(torch.device("cpu"), "float32", channels_last=True)
    assert last.filled((2, 3, 4, 4)).is_contiguous(memory_format=torch.channels_last)


def test_conditions_are_those_in_force() -> None:
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark
    with modes("float32", "all", cudnn_benchmark=True) as tf32:
        assert tf32 == "all"
        assert torch.backends.cudnn.allow_tf32
        assert torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.cudnn.benchmark
    with modes("float32", None, cudnn_benchmark=False) as tf32:
        assert (tf32, torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32) == ("conv", True, False)
    after = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark
    assert after == before
    where = conditions(CPU, "float32", "conv", cudnn_benchmark=True)
    assert (where.tf32, where.cudnn_benchmark, where.threads) == ("off", False, torch.get_num_threads())
    assert where.torch == torch.__version__


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_is_not_there_cannot_be_measured() -> None:
    with pytest.raises(LayerwiseError, match=r"--device cuda: .*measure with --device cpu"):
        device_of("cuda")
    with pytest.raises(LayerwiseError, match="only NVIDIA GPUs have it"):
        mode_of(device_of(None), "tf32", channels_last=False)
    with pytest.raises(LayerwiseError, match="float16: layerwise supports only float64, float32"):
        mode_of(device_of(None), "float16", channels_last=False)


@pytest.mark.parametrize(("text", "size"), [("2048K\n", 2**21), ("odd", cold.USUAL_BYTES), (None, cold.USUAL_BYTES)])
def test_the_size_of_a_cores_own_cache(tmp_path: Path, text: str | None, size: int) -> None:
    if text is not None:
        (tmp_path / "index2").mkdir()
        (tmp_path / "index2" / "size").write_text(text)
    assert cold.own_cache_bytes(tmp_path) == size


def test_forward_finds_the_inputs_and_backward_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    b = GraphBuilder("linear")
    x = b.input("x", TensorSpec((4, 6), ("n", None)))
    graph = b.finish([b.add("linear", Linear(3), [x], ["weight", "bias"])])
    cells = wanted_cells(CostModel(graph, brute.machine((1,))), {"linear": (Config(),)}).values()
    (cell,) = (c for c in cells if "linear" in c.name)
    seen: list[str] = []

    def leave_only(recent: Sequence[Tensor] | None, device: torch.device) -> None:
        seen.append("all" if recent is None else str([tuple(x.shape) for x in recent]))

    class Told(Bench):
        def forward(self) -> None:
            seen.append("forward")
            super().forward()

        def backward(self) -> None:
            seen.append("backward")
            super().backward()

    monkeypatch.setattr(cold, "leave_only", leave_only)
    monkeypatch.setattr(layers, "Bench", Told)
    layers.timed(cell, CPU, Stopwatch(CPU.device, 0.0, least=1, warm=1))
    assert seen[:5] == ["[(4, 6)]", "forward", "[(4, 3)]", "backward", "all"]
    assert len(seen) % 5 == 0


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def passes(self, *seconds: float) -> Passing:
        return Passing(self, seconds)


class Passing:
    """Something that takes so long, one call after the other, then over again."""

    def __init__(self, clock: Clock, seconds: tuple[float, ...]) -> None:
        self.clock, self.seconds, self.calls = clock, itertools.cycle(seconds), 0

    def __call__(self) -> None:
        self.clock.now += next(self.seconds)
        self.calls += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: made.now)
    return made


def test_medians_of_each_part(clock: Clock) -> None:
    forward, backward, between = clock.passes(1, 2, 9), clock.passes(5), clock.passes(100)
    found = Stopwatch(CPU.device, budget_s=650.0, least=4, warm=3)([forward, backward], [between, nothing])
    assert found.seconds == pytest.approx((2, 5))  # the odd 9 does not count
    assert found.samples == 5  # in 650 s, where the last of the warm-up took 107 or 114
    assert forward.calls == found.samples + 2  # the last to warm up counts, as it takes long


def test_a_pause_that_comes_in_every_few_samples_is_part_of_what_short_ones_take(clock: Clock) -> None:
    paused, once = clock.passes(*[0.001] * 4, 0.006), clock.passes(*[0.01] * 40, 0.5, *[0.01] * 400)
    assert Stopwatch(CPU.device, budget_s=1.0)([paused]).seconds == pytest.approx((0.002,))  # as in a quota of a core
    assert Stopwatch(CPU.device, budget_s=1.0)([once]).seconds == pytest.approx((0.01,))


def test_slow_ones_are_repeated_at_least_and_fast_ones_at_most(clock: Clock) -> None:
    slow, slower, fast = clock.passes(0.09), clock.passes(50.0), clock.passes(1e-6)
    for passes, samples, calls in ((slow, 5, 7), (slower, 3, 4)):  # with those to warm up
        stopwatch = Stopwatch(CPU.device, budget_s=0.1, least=5)
        assert stopwatch([passes]).samples == samples
        assert passes.calls == calls
        assert stopwatch.least_s(0.09 if passes is slow else 50.0) == pytest.approx(clock.now)
        clock.now = 0.0
    assert Stopwatch(CPU.device, budget_s=1.0, most=30)([fast]).samples == 30


def test_the_spread_is_of_the_middle_half(clock: Clock) -> None:
    steady, shaky = clock.passes(*[0.02] * 7, 0.07), clock.passes(0.01, 0.03)
    assert Stopwatch(CPU.device, budget_s=0.0, least=8, warm=8)([steady]).spread == 0
    assert Stopwatch(CPU.device, budget_s=0.0, least=8)([shaky]).spread == pytest.approx(1.0)
