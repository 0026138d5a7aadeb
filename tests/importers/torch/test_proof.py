"""What a trace does not show, or a table has wrong, is found: noticed while it is traced, or by running the layers."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import getattr_static
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from layerwise.errors import LayerwiseError
from layerwise.importers.load import network_of
from layerwise.importers.registry import Built, _builds, register_op
from layerwise.importers.torch import affordable
from layerwise.importers.torch.from_torch import from_torch
from layerwise.importers.torch.read.effects import UntracedEffects
from layerwise.importers.torch.unfused import UnlikeError
from layerwise.ops.tensor.pointwise import Binary, Unary
from tests.run.small_modules import layered, on_ranks, plan_of, refused

Step = Callable[[nn.Module, Tensor], Tensor]
X = torch.zeros(2, 4)


class Net(nn.Module):
    def __init__(self, between: Step) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.between, self.steps, self.tally = between, 0, {"steps": 0}

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self, self.first(x)))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def hooked(_: nn.Module, x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient)  # type: ignore[no-untyped-call]
    return x


def counted(net: nn.Module, x: Tensor) -> Tensor:
    net.steps += 1  # type: ignore[operator]
    return x * (net.steps > 3)


def tallied(net: nn.Module, x: Tensor) -> Tensor:
    net.tally["steps"] += 1  # type: ignore[index, operator]
    return x


def inferred(_: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.sum(1, keepdim=True)


def twice(reentrant: bool) -> Step:
    return lambda net, x: checkpoint(lambda y: torch.relu(net.norm(y)), x, use_reentrant=reentrant)


@pytest.mark.parametrize(
    ("between", "words"),
    [
        (lambda net, x: Doubled.apply(x), "has an autograd function, Doubled,"),
        (hooked, "registers a hook of a gradient"),
        (lambda net, x: x + torch.autograd.grad(x.sum(), net.first.weight)[0].sum(), "calls torch.autograd.grad"),
    ],
)
def test_noticed(between: Step, words: str) -> None:
    net, effects = Net(between), UntracedEffects()
    with effects.on(net):
        net(X)
    assert [found for found in effects.found if words in found] == list(effects.found) != []


@pytest.mark.parametrize(
    "between",
    [
        lambda net, x: inferred(net, x) + x,
        lambda net, x: x * (torch.utils.data.get_worker_info() is None) * (1 if torch.compiler.is_exporting() else 2),
    ],
    ids=["inference mode", "asks whether it is traced"],
)
def test_what_is_not_in_the_trace_is_found_by_running(between: Step) -> None:
    torch.manual_seed(0)
    net = Net(between)
    with pytest.raises(UnlikeError, match="gives other numbers than the model as written"):
        network_of(net, (torch.randn(4, 4),), None, "test")
    assert float(net.norm.num_batches_tracked) == 0  # as before


@pytest.mark.parametrize("reentrant", [False, True])
def test_statistics_that_move_in_the_backward_pass_too_are_seen(reentrant: bool) -> None:
    """The model as it is written has the same numbers, so a plan that splits samples alone may run it."""
    torch.manual_seed(0)
    net = Net(twice(reentrant=reentrant))
    graph = network_of(net, (torch.randn(4, 4),), None, "test").graph
    assert graph.unseen[0].startswith("moves running statistics of batch norms twice a step")
    assert float(net.norm.num_batches_tracked) == 0  # as before


@contextmanager
def stopped_tanh() -> Iterator[None]:
    """Within it a row of the table is wrong."""
    register_op("aten::tanh", lambda call: Built(Unary("detach"), (Built(Unary("tanh"), (call.operand("self"),)),)))
    try:
        yield
    finally:
        del _builds["aten::tanh"]


def test_a_row_that_multiplies_instead_of_adding_is_refused_by_name() -> None:
    class Shift(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + x.tanh()

    net = nn.Sequential(nn.Linear(4, 4), Shift(), nn.Linear(4, 4))
    register_op("aten::add.Tensor", lambda call: Built(Binary("mul"), tuple(call.tensors)))
    try:
        for example in (torch.randn(4, 4), torch.full((4, 4), float("nan"))):
            with pytest.raises(UnlikeError, match="layer '1"):
                network_of(net, (example,), None, "test")
    finally:
        del _builds["aten::add.Tensor"]
    assert network_of(net, (torch.randn(4, 4),), None, "test").unproven is None


def test_a_gradient_that_a_row_stops_is_refused_by_name() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    with stopped_tanh(), pytest.raises(UnlikeError, match=r"the gradient of '0.weight'"):
        network_of(net, (torch.randn(4, 4),), None, "test")


def test_a_gradient_of_an_input_that_a_row_stops_is_refused_where_it_is_asked_for() -> None:
    model, x = nn.Sequential(nn.Tanh(), nn.Linear(4, 4)).double(), torch.randn(4, 4).double()
    with stopped_tanh():
        network = layered(network_of(model, (x,), None, "test"))
        with pytest.raises(UnlikeError, match=r"layer '0.*the gradient of 'input'"):
            network_of(model, (x.clone().requires_grad_(),), None, "test")
    said = refused(network, lambda module: module(x[:2].clone().requires_grad_()))
    assert all("which the layers compute differently" in line for line in said)
    on_ranks(network, lambda module: module(x[:2]), 2)


@pytest.mark.parametrize("hides", [False, True])
def test_evaluation_is_proven_where_it_is_first_needed(hides: bool) -> None:
    """By then no rank has all values: it is run with drawn ones."""

    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.last(x if self.training or (hides and torch.compiler.is_exporting()) else x.square())

    def evaluated(module: nn.Module) -> Tensor:
        with torch.inference_mode():
            made: Tensor = module.eval()(x[:2])
        return made

    torch.manual_seed(0)
    model, x = Doubles().double(), torch.randn(4, 4).double()
    network = network_of(model, (x,), None, "test")
    assert network.unproven is None
    plan = plan_of(network, 2, {"c": 2})
    if hides:
        said = refused(network, evaluated, plan=plan)
        assert all("does something else in evaluation: layer 'last' gives other numbers" in line for line in said)
    else:
        made = on_ranks(network, evaluated, 2, plan)
        assert all(torch.allclose(one, model.eval()(x[:2])) for one in made)


@pytest.mark.parametrize("training", [True, False])
def test_random_numbers_are_none_of_the_differences(training: bool) -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x) + torch.randn(x.shape[0], 4) + torch.rand_like(x)
            x = nn.functional.dropout(x, 0.4, self.training)
            kept = torch.floor(0.8 + torch.rand(x.shape[0], 1))
            return self.last(x / 0.8 * kept if self.training else x)

    before = torch.get_rng_state()
    assert network_of(Drops().train(training), (torch.randn(4, 4),), None, "test").unproven is None
    assert not torch.equal(before, torch.get_rng_state())  # of the parameters and the example
    model, x, before = Drops(), torch.randn(4, 4), torch.get_rng_state()
    network_of(model, (x,), None, "test")
    assert torch.equal(before, torch.get_rng_state())


def test_products_count_as_what_takes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affordable, "FLOPS", 0.0)
    monkeypatch.setattr(affordable, "FLOPS_A_LAYER", 3000.0)
    network = network_of(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), (torch.randn(4, 64),), None, "test")
    assert network.unproven is not None
    assert "running 5 samples would take too long" in network.unproven


def test_what_cannot_be_run_is_traced_twice() -> None:
    with torch.device("meta"):
        net = Net(lambda net, x: counted(net, x))
    network = network_of(net, (torch.randn(4, 4, device="meta"),), None, "test")
    assert network.unproven == "it is on the meta device"
    assert "changes its attribute 'steps'" in network.graph.unseen[0]


def test_sparse_gradients_are_what_they_are_in_full() -> None:
    net = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3))
    assert network_of(net, (torch.arange(8).reshape(4, 2),), None, "test").unproven is None


def test_ranks_of_a_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(1 << 40))
    network = network_of(nn.Linear(4, 4), (torch.randn(4, 4),), None, "test")
    assert network.unproven is not None
    assert "it would take more than 0.0 GiB" in network.unproven


def test_exported() -> None:
    net = Net(lambda net, x: counted(net, Doubled.apply(x)))
    unseen = network_of(net, (X,), None, "test").graph.unseen
    assert [found.split()[0] for found in unseen] == ["has", "changes"]
    assert net.steps == 0  # as before


def sized(net: nn.Module, x: Tensor) -> Tensor:
    net.steps, net.training = x.shape[1], True
    return x


def flagged(net: nn.Module, x: Tensor) -> Tensor:
    first, net.steps = net.steps == 0, 1
    return -x if first else x


@pytest.mark.parametrize(
    ("between", "words"),
    [
        (counted, "changes its attribute 'steps'"),
        (tallied, "changes its attribute 'tally'"),
        (sized, None),
        (flagged, "changes its"),
        (lambda net, x: x if x.grad_fn is None else -x, "without gradients"),
        (lambda net, x: -x if torch.is_grad_enabled() else x, "without gradients"),
    ],
)
def test_what_another_call_may_do_otherwise(between: Step, words: str | None) -> None:
    """Numbers that change; another network at first, or without gradients. What is set once is not lost."""
    net = Net(between)
    unseen = network_of(net, (torch.randn(4, 4),), None, "test").graph.unseen
    assert unseen == () if words is None else words in unseen[0]
    assert (net.steps, net.tally) == (0, {"steps": 0})  # as before


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_are_layers(reentrant: bool) -> None:
    net = Net(lambda net, x: checkpoint(torch.relu, x, use_reentrant=reentrant))
    made, plain = from_torch(net, X), from_torch(Net(lambda net, x: torch.relu(x)), X)
    assert made.unseen == ()
    assert [(layer.op, layer.frozen) for layer in made.layers] == [(layer.op, layer.frozen) for layer in plain.layers]


def test_what_reentrant_checkpointing_does_not_differentiate_is_seen() -> None:
    """PyTorch warns that a checkpoint of inputs without gradients has none either."""

    class First(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(checkpoint(self.first, x, use_reentrant=True))

    seen = network_of(First(lambda net, x: x), (X,), None, "test").graph.unseen
    assert "a reentrant checkpoint, none of whose inputs has a gradient" in seen[0]


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_other_random_numbers_are_refused(draw: Callable[[], float]) -> None:
    with pytest.raises(LayerwiseError, match="draws Python's or numpy's random numbers"):
        from_torch(Net(lambda net, x: x if draw() < 0.5 else -x), X)


def test_other_threads_are_not_watched() -> None:
    other = Net(lambda net, x: Doubled.apply(twice(reentrant=True)(net, hooked(net, x))))
    effects, before = UntracedEffects(), getattr_static(torch.autograd.Function, "apply")
    made: list[Tensor] = []
    with effects.on(other):
        thread = threading.Thread(target=lambda: made.append(other(torch.randn(2, 4))))
        thread.start()
        thread.join()
    assert effects.found == {}
    made[0].sum().backward()
    assert other.norm.num_batches_tracked == 2  # it was checkpointed
    assert getattr_static(torch.autograd.Function, "apply") is before


def test_a_model_that_pytorch_does_not_differentiate_in_evaluation() -> None:
    """As MONAI's VarAutoEncoder, which writes into what its backward pass would need."""

    def written(net: nn.Module, x: Tensor) -> Tensor:
        std = x.exp()
        return torch.randn_like(std) * std + x if net.training else std.add_(x)

    net = Net(written)
    for mode in (net.train(), net.eval()):
        assert network_of(mode, (torch.randn(4, 4),), None, "test").unproven is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_an_example_may_have_any_numbers(value: float) -> None:
    """As torch.empty makes them: statistics that are NaN are not moved twice."""
    made = network_of(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), (torch.full((4, 4), value),), None, "test")
    assert (made.unproven, made.graph.unseen) == (None, ())


def test_a_mean_that_is_nothing_but_rounding_is_no_difference() -> None:
    """Of a layer norm: its numbers cancel, a sample's alone in another order than all samples' together."""

    class Mean(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return 3 * super().forward(x).mean()

    torch.manual_seed(0)
    model = Mean(nn.Linear(4, 4096), nn.LayerNorm(4096)).double()
    assert network_of(model, (torch.randn(2, 100, 4).double(),), None, "test").unproven is None


def test_a_running_mean_that_is_nothing_but_rounding_is_no_difference() -> None:
    """Of features that a batch norm has centred, and stochastic depth has scaled: as in a new EfficientNet."""

    class Depth(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.empty(len(x), 1).bernoulli_(0.7).div_(0.7)

    torch.manual_seed(0)
    wide = nn.Linear(64, 256, bias=False)
    model = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), Depth(), wide, nn.BatchNorm1d(256))
    for dtype in (torch.float32, torch.float64):
        made = network_of(model.to(dtype), (torch.randn(4, 4, dtype=dtype),), None, "test")
        assert made.unproven is None


def test_counts_beside_an_output_are_proven() -> None:
    class Counts(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
            y = super().forward(x)
            return y, (y > 0).sum(1), (y.argmax(1) == 0).float().mean()

    assert network_of(Counts(4, 4), (torch.randn(4, 4),), None, "test").unproven is None
