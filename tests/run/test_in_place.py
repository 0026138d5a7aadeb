"""The parallel model is the user's model: its class, its names, its state; and it is untouched where that fails."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from layerwise.comm.solo import SoloComm
from layerwise.errors import LayerwiseError
from layerwise.run.load import load
from layerwise.run.parallel import ParallelModule, of, restore
from tests.comm.pool import run_ranks
from tests.comm.thread import run_threads
from tests.run.in_place_ranks import Net
from tests.run.small_modules import SAMPLES, layered, loss, plan_of, traced

SPLIT = {"c": 2}
KNOWN = list[type]()


class Listed(nn.Sequential):
    """A class that knows its subclasses."""

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        KNOWN.append(cls)


def made(model: nn.Module, comm: Any, degrees: dict[str, int] | None = None) -> Any:
    plan = plan_of(traced(copy.deepcopy(model)), comm.size, degrees)
    return load(plan, model, comm=comm, dtype=torch.float64, example_inputs=(SAMPLES[0],))


@pytest.mark.parametrize(("degrees", "device"), [(SPLIT, "cpu"), (None, "meta")], ids=["split", "data"])
def test_a_model_is_untouched_wherever_making_it_parallel_fails(degrees: Any, device: str) -> None:
    for steps in run_ranks(2, "tests.run.in_place_ranks:failed_at_every_step", degrees, device):
        assert isinstance(steps, int)
        assert steps > (60 if degrees else 20)


@pytest.mark.parametrize("degrees", [SPLIT, None], ids=["split", "data"])
def test_the_class_is_the_models_and_its_layers_stay(degrees: Any) -> None:
    def rank(comm: Any) -> None:
        model = Net()
        layers, kind, attributes = list(model.modules())[1:], type(model), set(vars(model))
        assert made(model, comm, degrees) is model
        assert isinstance(model, kind)
        assert isinstance(model, ParallelModule)
        assert (type(model).__name__, type(model).__module__) == (kind.__name__, kind.__module__)
        assert list(model.modules())[1:] == layers
        assert set(vars(model)) - attributes == {"_layerwise"}
        assert repr(model) == repr(Net())

    run_threads(2, rank, timeout_s=60)


def test_a_class_is_told_of_no_subclass_and_makes_plain_modules() -> None:
    model = Listed(nn.Linear(4, 4), nn.Tanh()).double()
    made(model, SoloComm())
    assert KNOWN == []
    assert type(model[:1]) is Listed
    assert type(type(model)(nn.Tanh())) is Listed


@pytest.mark.parametrize("degrees", [SPLIT, None], ids=["split", "data"])
def test_restore_makes_it_plain_with_its_values(degrees: Any) -> None:
    def rank(comm: Any) -> None:
        model = Net()
        kind = type(model)
        made(model, comm, degrees)
        model.first.weight.data.mul_(2)
        state, steps = of(model).full_state_dict(), of(model).steps_done
        restore(model)
        assert (type(model), steps) == (kind, 0)
        assert all(type(p) is nn.Parameter for p in model.parameters())
        assert model.third.weight is model.second.weight
        assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
        assert not any("forward" in vars(m) or "apply" in vars(m) for m in model.modules())
        loss(model(SAMPLES[0])).backward()
        with pytest.raises(LayerwiseError, match="the Net is not parallel"):
            of(model)

    run_threads(2, rank, timeout_s=60)


@pytest.mark.parametrize("by_layers", [True, False])
def test_a_model_and_its_run_go_with_the_last_reference(by_layers: bool) -> None:
    network = traced(Net())
    plan = plan_of(network, 1)
    model: Any = load(plan, layered(network) if by_layers else network, comm=SoloComm(), dtype=torch.float64)
    loss(model(SAMPLES[0])).backward()
    gone = weakref.ref(model), weakref.ref(of(model))
    gc.collect()
    gc.disable()
    try:
        del model
        assert [ref() for ref in gone] == [None, None]
    finally:
        gc.enable()
