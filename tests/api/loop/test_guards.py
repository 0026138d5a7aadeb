"""Guards: an optimizer over the wrong parameters is refused; loops that are right go on."""

import pytest
import torch
from torch import Tensor, nn

import layerwise
from layerwise.errors import LayerwiseError
from tests.api.script import Layered, data, network

pytestmark = pytest.mark.usefixtures("models_traced_once")

X, Y = data().tensors[0][:4], data().tensors[1][:4]
QUIET = {"verbose": False, "measure_s": 0}


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(X), Y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def test_an_optimizer_of_before_is_right_where_the_model_itself_is_run() -> None:
    model = network()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    module = layerwise.parallelize(model, X, **QUIET)
    assert step(module, early) > step(module, early)


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


def test_a_parallel_module_is_parallel_already() -> None:
    module = layerwise.parallelize(network(), X, **QUIET)
    with pytest.raises(LayerwiseError, match="parallel already"):
        layerwise.parallelize(module, X)


def test_parallelize_within_autocast_is_refused() -> None:
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(LayerwiseError, match=r"called within torch\.autocast.*call it before"),
    ):
        layerwise.parallelize(network().float(), X.float(), **QUIET)
