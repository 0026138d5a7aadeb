"""Guards: an optimizer over the wrong parameters is refused; loops that are right go on."""

import pytest
import torch
from torch import nn

import layerwise
from layerwise.errors import LayerwiseError
from tests.api import script
from tests.api.script import Layered, data

pytestmark = pytest.mark.usefixtures("models_traced_once")

X, Y = data().tensors[0][:4], data().tensors[1][:4]
QUIET = {"options": layerwise.ParallelOptions(measure_s=0, verbose=False)}


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    return script.step(model, X, Y, optimizer)


def test_an_optimizer_of_before_raises_at_its_step() -> None:
    model = Layered()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    module = layerwise.parallelize(model, X, **QUIET)
    with pytest.raises(LayerwiseError, match="build the optimizer after parallelize returns"):
        step(module, early)
    late = torch.optim.SGD(module.parameters(), lr=0.1)
    assert step(module, late) > step(module, late)


def test_parameters_of_before_are_used_by_nothing() -> None:
    model = Layered()
    early = list(model.parameters())
    nn.functional.cross_entropy(layerwise.parallelize(model, X, **QUIET)(X), Y).backward()
    for use in (
        lambda: nn.utils.clip_grad_norm_(early, 1.0),
        lambda: early[0].numel(),
        lambda: torch.autograd.grad(model(X).sum(), early),
        lambda: torch._foreach_mul_([next(model.parameters()).detach(), early[0]], 2.0),
        lambda: model(X).sum().backward(inputs=early),
    ):
        with pytest.raises(LayerwiseError, match="a parameter was used that is no longer the model's"):
            use()


def test_a_parallel_model_is_made_plain_before_it_is_made_parallel_again() -> None:
    model, kind = Layered(), type(Layered())
    layerwise.parallelize(model, X, **QUIET)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    trained, out = model.full_state_dict(), model.eval()(X)
    with pytest.raises(LayerwiseError, match="is already parallel"):
        layerwise.parallelize(model, X, **QUIET)
    with pytest.raises(LayerwiseError, match="is already parallel"):
        layerwise.parallelize(nn.Sequential(model), X, **QUIET)
    layerwise.restore(model)
    assert type(model) is kind
    assert all(type(p) is nn.Parameter for p in model.parameters())
    torch.testing.assert_close(model.state_dict(), trained)
    torch.testing.assert_close(model(X), out)
    with pytest.raises(LayerwiseError, match="is not parallel"):
        layerwise.restore(model)
    layerwise.parallelize(model, X, **QUIET)
    torch.testing.assert_close(model(X), out)
