"""What a loop sees of the layers of a split plan: modules by the model's names, which are looked at, and not called."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layerwise.importers.load import Network
from layerwise.run.parallel import ParallelModule
from tests.run.plans import difference
from tests.run.small_modules import SAMPLES, loss, on_ranks, plan_of, refused, traced

Act = Callable[[Any], object]


class Scaled(nn.Linear):
    """Reads an attribute of its own."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * super().forward(x)


class Parts(nn.Module):
    """Lists, a module with two names, a weight with two, a parameter and a buffer that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.0)) for _ in range(2)])
        self.norm = nn.LayerNorm(4, eps=1e-3)
        self.again = self.blocks[0]
        self.tied, self.head = nn.Linear(4, 4), Scaled(4, 6)
        self.tied.weight = self.blocks[1][0].weight
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.ones(3))
        self.act, self.missing = nn.functional.relu, None
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.tied(self.norm(self.again(x))))

    def mean_loss(self, x: Tensor) -> Tensor:
        """Calls the model itself."""
        return loss(self(x))

    def through_head(self, x: Tensor) -> Tensor:
        """Calls one of its layers."""
        return self.head(x)


class Rooted(nn.Module):
    """A parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.linear = nn.Parameter(torch.ones(4)), nn.Linear(4, 6)
        self.register_buffer("scale", torch.ones(6))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.place) * self.scale


@cache
def parts() -> tuple[nn.Module, Network]:
    module = Parts()
    return module, traced(module)


SPLIT = {"c": 2}


def seen(model: nn.Module) -> list[object]:
    named = [(name, type(m), m.training) for name, m in model.named_modules(remove_duplicate=False)]
    children = [(name, type(m)) for name, m in model.named_children()]
    held = [name for name, _ in model.named_parameters() if name != "unused"]
    return [named[1:], children, held, [type(m) for m in model.modules()][1:], repr(model.blocks), model.act]


def test_a_module_around_it_has_all_parameters_and_buffers() -> None:
    """Also those of the model's root."""
    network = traced(module := Rooted())

    def look(made: Any) -> tuple[list[str], list[str]]:
        around = nn.ModuleList([made])
        return [name for name, _ in around.named_parameters()], [name for name, _ in around.named_buffers()]

    for found in on_ranks(network, look, 2, plan_of(network, 2, SPLIT)):
        assert found == look(module)


def test_modules_are_of_the_models_names_and_classes() -> None:
    module, network = parts()

    def look(made: Any) -> list[object]:
        assert made.again is made.blocks[0]
        assert made.tied.weight is made.blocks[1][0].weight
        assert made.get_submodule("blocks.0.1") is made.blocks[0][1]
        assert made.norm.eps == 1e-3
        assert made.head.out_features == 6
        assert made.blocks[0][2].p == 0.0
        assert made.head.weight.shape[0] in (3, 6)
        return seen(made)

    for found in on_ranks(network, look, 2, plan_of(network, 2, SPLIT)):
        assert found == seen(module)


def call(made: Any) -> Tensor:
    out: Tensor = made(SAMPLES[0][made.share()])
    return out


CHANGES: list[tuple[Act, str]] = [
    (lambda made: setattr(made.blocks[0][2], "p", 0.5), "'p' of module 'blocks.0.2', set after"),
    (lambda made: setattr(made.norm, "eps", 1e-5), "'eps' of module 'norm', set after"),
    (lambda made: setattr(made.head, "factor", 2.0), "'factor' of module 'head', set after"),
    (lambda made: delattr(made.norm, "eps"), "'eps' of module 'norm', set after"),
    (lambda made: made.blocks.append(nn.Tanh()), "layers were replaced"),
    (lambda made: setattr(made.blocks[0], "1", nn.Identity()), "layers were replaced"),
    (lambda made: setattr(made.head, "bias", None), "layers was replaced or added"),
    (lambda made: made.blocks.eval(), "'training' of module 'blocks', set after"),
    (lambda made: made.head.eval(), "'training' of module 'head', set after"),
    (lambda made: setattr(made, "training", False), "'training' of module 'blocks', set after"),
    (lambda made: setattr(made.head, "note", 1), "'note' of module 'head', set after"),
    (lambda made: made.head.half(), "of one of the model's layers is not supported"),
    (lambda made: made.norm(SAMPLES[0]), "a call or a hook of one of the model's layers is not supported"),
    (
        lambda made: made.norm.register_full_backward_hook(print),
        "a call or a hook of one of the model's layers is not supported",
    ),
    (lambda made: copy.deepcopy(made.head), "copy the whole model, or take state_dict()"),
    (lambda made: setattr(made, "act", None), "'act' of module '', set after"),
    (lambda made: made.through_head(SAMPLES[0]), "a call or a hook of one of the model's layers is not supported"),
]


@pytest.mark.parametrize(("act", "message"), CHANGES)
def test_what_would_not_be_followed_is_refused(act: Act, message: str) -> None:
    _, network = parts()

    def change(made: Any) -> None:
        act(made)
        call(copy.deepcopy(made) if ", set after" in message else made)

    for text in refused(network, change, 2, plan_of(network, 2, SPLIT)):
        assert message in text


@pytest.mark.parametrize("act", [lambda made: made.eval().train(), lambda made: setattr(made.norm, "eps", 1e-3)])
def test_what_changes_nothing_is_not(act: Act) -> None:
    module, network = parts()

    def change(made: Any) -> Tensor:
        act(made)
        return call(made).detach()

    out = on_ranks(network, change, 2, plan_of(network, 2, SPLIT))
    assert difference(torch.cat(out), module(SAMPLES[0]).detach()) <= 1e-12


class Router(nn.Linear):
    """Keeps a loss, which is a number at first."""

    auxiliary: Tensor | float

    def __init__(self) -> None:
        super().__init__(4, 6)
        self.auxiliary, self.top, self.losses = 0.0, 1, list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        return self.keep(super().forward(x))

    def keep(self, x: Tensor) -> Tensor:
        """As a method that `forward` calls does it."""
        self.auxiliary = x.square().mean()
        self.losses.append(self.auxiliary)
        return x


def test_what_a_call_of_the_original_would_keep_is_not_there() -> None:
    """Not its first value: a loss that is 0.0 for ever would go unnoticed, and a list that nothing is added to."""
    network = traced(nn.Sequential(Router(), nn.Linear(6, 6)).double())

    def look(made: Any) -> None:
        assert made[0].top == 1
        with pytest.raises(AttributeError, match="'Router' object has no attribute 'auxiliary'"):
            loss(call(made)) + made[0].auxiliary
        with pytest.raises(AttributeError, match="'Router' object has no attribute 'losses'"):
            loss(call(made)) + sum(made[0].losses)

    on_ranks(network, look, 2, plan_of(network, 2, SPLIT))


def test_attributes_of_the_model_itself() -> None:
    """Those that a call sets are refused by a sentence; others, and methods that call the model, are as the model's."""
    module = Router().double()
    module.config = {"width": 6}  # type: ignore[assignment]
    network = traced(module)

    def look(made: Any) -> None:
        assert (made.top, made.config) == (1, {"width": 6})
        assert getattr(made, "nothing", None) is None
        made.note = "of the loop"
        assert made.note == "of the loop"
        with pytest.raises(AttributeError, match="'Router' object has no attribute 'nothing'"):
            _ = made.nothing
        for name in ("auxiliary", "losses"):
            with pytest.raises(AttributeError, match=f"'{name}' of the parallel module is not supported if the plan"):
                getattr(made, name)

    on_ranks(network, look, 2, plan_of(network, 2, SPLIT))


def test_a_method_that_calls_the_model_itself() -> None:
    module, network = parts()
    found = on_ranks(
        network, lambda made: made.mean_loss(SAMPLES[0][made.share()]).item(), 2, plan_of(network, 2, SPLIT)
    )
    assert abs(sum(found) / 2 - module.mean_loss(SAMPLES[0]).item()) <= 1e-12


class Frozen(nn.Sequential):
    """Keeps its batch norm in evaluation, as detectors do."""

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self[1].eval()
        return self


def test_a_model_that_freezes_its_batch_norms_itself() -> None:
    network = traced(nn.Sequential.train(Frozen(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)).double()))

    def act(made: ParallelModule) -> None:
        call(made.eval())
        call(made.train())

    for text in refused(network, act, 2, plan_of(network, 2, SPLIT)):
        assert text.startswith("'training' of module '1', set after the model was made parallel,")


# ------------------------------------------------------------------------------------------------ apply


def test_apply_sees_whole_parameters_and_the_models_modules() -> None:
    """In PyTorch's order; what it sets and collects is of the parallel model. Where ranks differ, rank 0's count."""
    module, network = parts()
    order: list[type] = []
    module.apply(lambda m: order.append(type(m)))

    def rank(made: Any) -> dict[str, Tensor]:
        collected: list[nn.Module] = []
        made.apply(collected.append)
        assert [type(m) for m in collected[:-1]] == order[:-1]
        assert collected[-1] is made
        assert isinstance(made, Parts)
        assert {*collected} == {*made.modules()}

        def change(m: nn.Module) -> None:
            if type(m) is Scaled:
                assert type(m.weight) is nn.Parameter
                assert m.weight.shape == (6, 4)
                m.weight.data = torch.full_like(m.weight, made.comm.rank + 1.0)
                m.bias.requires_grad = False
                m.bias.data.copy_(torch.arange(6.0) + made.comm.rank)

        assert made.apply(change) is made
        made.blocks[1].apply(lambda m: m.apply(lambda n: nn.init.zeros_(n.bias) if isinstance(n, nn.Linear) else None))
        assert not made.head.bias.requires_grad
        assert made.head.weight.requires_grad
        loss(call(made)).backward()
        return dict(made.full_state_dict())

    wanted = module.state_dict() | {
        "head.weight": torch.ones(6, 4, dtype=torch.float64),
        "head.bias": torch.arange(6, dtype=torch.float64),
        "blocks.1.0.bias": torch.zeros(4, dtype=torch.float64),
    }
    for state in on_ranks(network, rank, 2, plan_of(network, 2, SPLIT)):
        assert all(torch.equal(state[name], value) for name, value in wanted.items())


def keep(made: Any) -> None:
    kept: list[nn.Parameter] = []
    made.apply(lambda m: kept.extend(m.parameters(recurse=False)))
    torch.optim.SGD(kept, lr=0.1)


def with_gradients(made: Any) -> None:
    loss(call(made)).backward()
    made.apply(lambda m: None)


def untie(m: nn.Module) -> None:
    if isinstance(m, Parts):
        m.tied.weight = nn.Parameter(m.tied.weight.clone())


def shorten(m: nn.Module) -> None:
    if isinstance(m, Scaled):
        m.bias.data = torch.zeros(5, dtype=torch.float64)


def swap(m: nn.Module) -> None:
    if isinstance(m, nn.Linear):
        m._parameters["bias"] = nn.Parameter(torch.zeros_like(m.bias))


LOST: list[tuple[Act, str]] = [
    (keep, "a parameter was used that is no longer the model's, because parallelize or apply() replaced it"),
    (with_gradients, "has a gradient: call zero_grad() first"),
    (lambda made: made.apply(untie), "layers was replaced or added"),
    (lambda made: made.apply(swap), "apply() replaced a tensor or module of the model"),
    (lambda made: made.apply(shorten), "'head.bias' has shape (5,)"),
    (
        lambda made: made.apply(lambda m: m.register_forward_hook(print)),
        "a call or a hook of one of the model's layers is not supported",
    ),
]


@pytest.mark.parametrize(("act", "message"), LOST)
def test_apply_refuses_what_would_be_lost(act: Act, message: str) -> None:
    """And the model is as before."""
    module, network = parts()

    def rank(made: Any) -> None:
        try:
            act(made)
        finally:
            state = made.full_state_dict()
            assert all(torch.equal(state[name], value) for name, value in module.state_dict().items())

    for text in refused(network, rank, 2, plan_of(network, 2, SPLIT)):
        assert message in text
