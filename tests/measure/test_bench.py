"""A bench: every cell of every kind of layer runs forward and backward, on tensors of the shapes of its key."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from layerwise.config import Config
from layerwise.cost.model import CostModel, CostOptions
from layerwise.errors import LayerwiseError
from layerwise.graph.builder import GraphBuilder
from layerwise.graph.layer import LayerGraph
from layerwise.measure.bench import Bench, CellSpec, LossBench, LossSpec, Mode, UpdateBench, UpdateSpec
from layerwise.measure.cells import wanted_cells
from layerwise.measure.conditions import conditions, device_of, mode_of, modes
from layerwise.measure.job import bench_of
from layerwise.ops.nn.conv import Conv
from layerwise.tensor import TensorSpec
from tests.cost import brute, networks
from tests.examples import examples

NETWORKS = networks.windows() | networks.views() | networks.branches() | networks.sequences()
CPU = Mode(torch.device("cpu"), torch.float32)


@given(NETWORKS, st.sampled_from([(1,), (2,), (4,), (2, 6)]), st.data())
@examples(25)
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


def test_the_partial_sums_of_k_are_cut_and_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 devices with a quarter of k each: 3 others' parts are added to the quarter that is owned."""
    from layerwise.graph.builder import GraphBuilder
    from layerwise.ops.nn.linear import Linear
    from layerwise.tensor import TensorSpec

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
    with pytest.raises(LayerwiseError, match="float16: layerwise runs float64, float32"):
        mode_of(device_of(None), "float16", channels_last=False)
