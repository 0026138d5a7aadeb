"""compile=True: what a rank computes by itself goes through torch.compile, and the numbers are one device's."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerwise
from layerwise.comm.solo import SoloComm
from layerwise.errors import LayerwiseError
from layerwise.ops.base import Role
from layerwise.ops.nn.linear import Linear
from layerwise.run.execute.segments import segments
from layerwise.run.load import load
from layerwise.run.parallel import ParallelModule, of
from layerwise.trace import Trace
from tests.comm.pool import run_ranks
from tests.comm.thread import run_threads
from tests.run import compile_ranks
from tests.run.compile_ranks import IMAGES, Net
from tests.run.plans import difference
from tests.run.small_modules import layered, on_ranks, plan_of, traced

QUICK = {"backend": "aot_eager"}  # traces and differentiates as inductor does, and generates no code


@cache
def single() -> Mapping[str, Tensor]:
    return compile_ranks.trained(SoloComm(), "layers", False)


def same_as_one_device(kind: str, compile: bool | Mapping[str, Any], timeout_s: float = 120.0) -> None:
    ranks: list[Any] = run_ranks(2, "tests.run.compile_ranks:trained", kind, compile, timeout_s=timeout_s)
    for name, value in single().items():
        if name == "own of input":  # of each rank's own loss
            assert difference(torch.cat([rank[name] for rank in ranks]) / 2, value) <= 1e-9
        elif name.startswith("own"):
            assert difference(torch.cat([rank[name] for rank in ranks]), value) <= 1e-9, name
        else:
            assert all(difference(rank[name], value) <= 1e-9 for rank in ranks), name


@pytest.mark.parametrize("kind", ["data", "rows", "eager"])
def test_two_ranks_compute_what_one_does(kind: str) -> None:
    same_as_one_device(kind, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["data", "layers"])
def test_inductor(kind: str) -> None:
    found = compile_ranks.trained(SoloComm(), kind, True)
    for name, value in single().items():
        assert difference(found[name], value) <= 1e-9, name


@pytest.mark.slow
def test_inductor_on_two_ranks() -> None:
    same_as_one_device("rows", {"options": {"compile_threads": 1}}, 900.0)  # a rank of the pool may have no children


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    """What another test has compiled."""
    torch.compiler.reset()


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).relu()


class Counted:
    """A compiler that counts what it is given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        self.graphs += 1
        return graph.forward


@pytest.mark.parametrize("layers", [True, False])
def test_one_device_compiles_the_model_as_one_graph(layers: bool) -> None:
    """Dropouts are in it: their seeds are no constants, a further step compiles nothing."""
    torch.manual_seed(0)
    compile: Any = {"backend": (backend := Counted())}
    model = layers_of(compile) if layers else layerwise.parallelize(Net().double(), IMAGES[0], compile=compile)
    first, again = model(IMAGES[0]), model(IMAGES[0])
    assert backend.graphs == 1
    assert difference(first, again) > 1e-3  # other draws
    model(IMAGES[0]).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_without_dropout_one_device_has_pytorchs_compiled_model() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(3, 4)
    expected = torch.compile(module, **QUICK)(x)
    model = layerwise.parallelize(module, x, compile=QUICK)
    assert torch.equal(model(x), expected)
    assert list(model.state_dict()) == list(module.state_dict())
    assert model._modules is module._modules


@pytest.mark.parametrize("layers", [True, False])
def test_compile_in_place(layers: bool) -> None:
    """As `nn.Module.compile`."""
    backend, x = Counted(), torch.ones(3, 4)
    model = layerwise.parallelize(Small(), x)
    if layers:
        network = layered(traced(Small(), x))
        model = load(plan_of(network, 1, {}), network)
    before = model(x)
    model.compile(backend=backend)
    assert torch.equal(model(x), before)
    assert backend.graphs == 1


@pytest.mark.parametrize(
    ("compile", "message"),
    [
        ("inductor", "compile is 'inductor'; it must be True, False or a dict"),
        ({"speed": 9}, "torch.compile has no argument 'speed'; it takes fullgraph"),
        ({"mode": "fastest"}, "torch.compile does not accept compile={'mode': 'fastest'}: Unrecognized mode"),
    ],
)
def test_what_compile_does_not_take(compile: Any, message: str) -> None:
    with pytest.raises(LayerwiseError) as raised:
        layerwise.parallelize(nn.Linear(4, 2), torch.ones(3, 4), compile=compile)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_model_that_is_compiled_already(in_place: bool) -> None:
    """One device runs it as it is."""
    torch.manual_seed(0)
    backend, module, x = Counted(), Small(), torch.randn(3, 4)
    expected, given = module(x), module
    if in_place:
        module.compile(backend=backend)
    else:
        given = torch.compile(module, backend=backend)
    model = layerwise.parallelize(given, x)
    assert torch.equal(model(x), expected)
    assert backend.graphs == 1


def test_a_compiled_model_is_not_split() -> None:
    plan = plan_of(compile_ranks.network(), 2, {"h": 2})

    def rank(comm: Any) -> str:
        module = Net().double()
        module.left.compile(backend=QUICK["backend"])
        with pytest.raises(LayerwiseError) as raised:
            load(plan, module, comm=comm, dtype=torch.float64, example_inputs=(IMAGES[0],))
        return str(raised.value)

    for text in run_threads(2, rank):
        assert text.startswith("module 'left' is compiled already")


# ---------------------------------------------------------------------------------------------------- segments


def layers_of(compile: Any, dtype: torch.dtype = torch.float64, **how: Any) -> Any:
    """Layer by layer, on one device."""
    network = layered(compile_ranks.network(dtype))
    return load(plan_of(network, 1, {}), network, dtype=dtype, compile=compile, **how)


@pytest.mark.parametrize("kind", ["layers", "rows", "filters", "eager"])
def test_a_segment_has_all_that_does_not_communicate(kind: str) -> None:
    """From where something arrives to where something leaves, and no layer that communicates."""

    def rank(module: ParallelModule) -> list[list[str]]:
        schedule = module.rank_schedule
        found = segments(schedule, QUICK, training=True)
        inside = [scheduled for segment in found for scheduled in segment.layers]
        assert len({s.layer.name for s in inside}) == len(inside)
        for segment in found:
            assert not any(edge.travels for scheduled in segment.layers[1:] for edge in scheduled.edges)
            names = {scheduled.layer.name for scheduled in segment.layers[:-1]}
            assert not any(edge.travels and edge.source in names for s in schedule.layers for edge in s.edges)
        for scheduled in schedule.layers:
            alone = scheduled.work is not None and not scheduled.work.communicates
            alone = alone and not (scheduled.recompute or scheduled.gathered)
            assert (scheduled in inside) == (alone and scheduled.layer.role is Role.COMPUTE)
        names = [scheduled.layer.name for scheduled in schedule.layers]
        for last in schedule.blocks:
            before = set(names[: names.index(last) + 1])
            assert all(len({s.layer.name in before for s in segment.layers}) == 1 for segment in found)
        return [[scheduled.layer.name for scheduled in segment.layers] for segment in found]

    network = layered(compile_ranks.network())
    first, second = on_ranks(network, rank, 2, compile_ranks.plan(kind, 2))
    if kind == "layers":  # nothing travels; the batch norm communicates
        assert len(first) == 1
        assert first == second


@pytest.mark.parametrize("mixed", [True, False])
def test_mixed_precision_and_recomputation(mixed: bool) -> None:
    """Segments are compiled within autocast, for its types; recomputed layers run as they are, between segments."""
    outputs, dtype = [], torch.float32 if mixed else torch.float64
    for compile in (False, QUICK):
        model = layers_of(compile, dtype, checkpoint_activations=not mixed)
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            out = model(IMAGES[0].to(dtype))
        out.square().sum().backward()
        assert out.dtype == (torch.bfloat16 if mixed else dtype)
        outputs.append([out.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) if mixed else difference(a, b) <= 1e-12 for a, b in zip(*outputs, strict=True))


def test_a_trace_has_a_span_a_segment() -> None:
    model = layers_of(QUICK)
    trace = of(model).trace = Trace()
    model(IMAGES[0]).sum().backward()
    names = [span.name for span in trace.spans() if span.category == "compute"]
    assert names == ["conv … head", "conv … head (backward)"]


def test_a_second_derivative_is_refused() -> None:
    model = layers_of(QUICK).eval()
    x = IMAGES[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        gradient.square().sum().backward()


def test_what_cannot_be_compiled_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Linear.run

    def breaks(self: Linear, *given: Any) -> Tensor:
        if self.out_features == 8:
            torch._dynamo.graph_break()
        return run(self, *given)

    monkeypatch.setattr(Linear, "run", breaks)
    with pytest.raises(LayerwiseError, match=r"^layer 'conv … head' cannot be compiled: leave compile= out "):
        layers_of(QUICK)(IMAGES[0])


def test_what_a_kernel_refuses_is_named() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    network = layered(traced(module, torch.ones(2, 4, dtype=torch.float64)))
    model = load(plan_of(network, 1, {}), network, dtype=torch.float64, compile=QUICK)
    with pytest.raises(LayerwiseError, match=r"^layer '.*': Expected more than 1 value per channel"):
        model(torch.ones(1, 4, dtype=torch.float64))
