"""Guards: an optimizer over the wrong parameters is refused; loops that are right go on."""

import copy
import pickle

import pytest
import torch
from torch import nn

import layerwise
from layerwise.errors import LayerwiseError
from tests.api import script
from tests.api.script import Layered, data

pytestmark = pytest.mark.usefixtures("models_traced_once")

X, Y = data().tensors[0][:4], data().tensors[1][:4]
QUIET = {"verbose": False, "options": layerwise.ParallelOptions(measure_s=0)}


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    return script.step(model, X, Y, optimizer)


def test_an_optimizer_of_before_raises_at_its_step() -> None:
    model = Layered()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    module = layerwise.parallelize(model, X, **QUIET)
    with pytest.raises(LayerwiseError, match="build the optimizer over the returned model's parameters"):
        step(module, early)
    late = torch.optim.SGD(module.parameters(), lr=0.1)
    assert step(module, late) > step(module, late)


def test_the_original_may_be_trained_by_itself() -> None:
    model = Layered()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    layerwise.parallelize(model, X, **QUIET)
    assert step(model, optimizer) > step(model, optimizer)


def test_the_original_says_that_it_has_the_values_of_before() -> None:
    """Also a part of it, and where the parallel module is gone; before a step it is compared, copied, planned again."""
    model = Layered()
    module = layerwise.parallelize(model, X, **QUIET)
    torch.testing.assert_close(module(X), model(X))
    layerwise.parallelize(model, X, **QUIET)
    before = copy.deepcopy(model)
    step(module, torch.optim.SGD(module.parameters(), lr=0.1))
    trained = module.full_state_dict()
    del module
    part = next(model.children())
    uses = [model.state_dict, part.state_dict, lambda: model(X), lambda: copy.deepcopy(model)]
    uses += [lambda: pickle.dumps(model), lambda: layerwise.parallelize(model, X, **QUIET)]
    for use in uses:
        with pytest.raises(LayerwiseError, match="has kept its values of before training"):
            use()
    assert before.state_dict().keys() == trained.keys()
    layerwise.parallelize(before, X, **QUIET)
    model.load_state_dict(trained)
    torch.testing.assert_close(model.state_dict(), trained)
    torch.testing.assert_close(layerwise.parallelize(model, X, **QUIET)(X), model(X))


def test_the_originals_gradients_are_not_clipped_in_place_of_the_others() -> None:
    model = Layered()
    module = layerwise.parallelize(model, X, **QUIET)
    nn.functional.cross_entropy(module(X), Y).backward()
    with pytest.raises(LayerwiseError, match="build the optimizer over the returned model's parameters, and clip"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    model.load_state_dict(module.full_state_dict())
    assert all(p.grad is None for p in model.parameters())
