"""A plan that splits samples only is run by the model as the user wrote it: which plans are, and one device."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerwise.comm.solo import SoloComm
from layerwise.errors import LayerwiseError
from layerwise.run.data_parallel.module import DataRun
from layerwise.run.layered import LayeredRun
from layerwise.run.load import load
from layerwise.run.parallel import ParallelModule, of
from tests.run.own_modules import BATCH, IMAGES, alone, calm, loss, net
from tests.run.plans import difference
from tests.run.small_modules import on_ranks, plan_of, traced


def test_data_plans_are_run_by_the_module_itself() -> None:
    _, network = net()
    assert isinstance(of(alone()), DataRun)
    assert on_ranks(network, lambda made: type(of(made)), 2) == [DataRun] * 2
    assert on_ranks(network, lambda made: type(of(made)), 2, plan_of(network, 2, {"h": 2})) == [LayeredRun] * 2


def test_forwards_in_training_are_counted_on_one_device_too() -> None:
    """A checkpoint is named after them, and other ranks go on from there."""
    network = traced(nn.Linear(4, 4).double(), torch.randn(BATCH, 4).double())
    made = load(plan_of(network, 1), network, comm=SoloComm(), dtype=torch.float64)
    for training, steps in ((True, 1), (True, 2), (False, 2)):
        made.train(training)(torch.randn(BATCH, 4).double())
        assert made.steps_done == steps


def test_a_model_that_was_moved_away_is_refused_until_it_is_back() -> None:
    network = traced(nn.Linear(4, 4).double(), torch.randn(BATCH, 4).double())

    def moved(made: ParallelModule) -> str:
        with pytest.raises(LayerwiseError) as raised:
            made.to("meta")(torch.randn(BATCH, 4).double())
        return str(raised.value)

    for cut in ({"c": 2}, {"n": 2}):
        for text in on_ranks(network, moved, 2, plan_of(network, 2, cut)):
            assert "are on meta, but the parallel model runs on cpu" in text


class Planner(nn.Linear):
    """Has names that a parallel model has, too."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.plan = "mine"

    def share(self) -> str:
        """Of its own."""
        return "shared"


def test_names_of_the_models_own_are_its_own() -> None:
    network = traced(Planner(), torch.randn(BATCH, 4))
    made: Any = load(plan_of(network, 1), network, comm=SoloComm(), dtype=torch.float32)
    assert (made.plan, made.share()) == ("mine", "shared")
    assert (of(made).plan.gpus, of(made).share()) == (1, slice(0, BATCH))
    with pytest.raises(LayerwiseError, match="the Planner is not parallel"):
        of(Planner())
    with pytest.raises(AttributeError, match="'Planner' object has no attribute 'nothing'"):
        _ = made.nothing


class Functional(nn.Module):
    """Draws without a module."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.fc(x), 0.5)


class Twice(nn.Module):
    """Calls its dropout twice."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc(self.drop(x)))


class Uncalled(nn.Module):
    """Draws by a function under the name of a module that is never called, as attention of Hugging Face does."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.fc(x), self.dropout.p, self.training)


class Other(nn.Dropout):
    """Computes otherwise than its class."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


@pytest.mark.parametrize(
    "module",
    [Functional(), Twice(), nn.Sequential(Uncalled(), nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4), Other())],
    ids=["functional", "twice", "never called", "a subclass"],
)
def test_what_cannot_be_replaced_is_run_layer_by_layer(module: nn.Module) -> None:
    network = traced(module.double(), torch.randn(4, 4).double())
    for ranks in (1, 2):
        assert on_ranks(network, lambda made: type(of(made)), ranks) == [LayeredRun] * ranks


def test_on_one_device_it_is_plain_pytorch_bit_by_bit() -> None:
    module, _ = calm()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        plain, mine = copy.deepcopy(module).to(dtype), copy.deepcopy(module).to(dtype)
        plan = plan_of(traced(mine, IMAGES[0].to(dtype)), 1)
        made = load(plan, mine, comm=SoloComm(), dtype=dtype, example_inputs=(IMAGES[0].to(dtype),))
        for model in (plain, made):
            optimizer = torch.optim.AdamW(model.parameters())
            for x in IMAGES:
                optimizer.zero_grad()
                loss(model(x.to(dtype))).backward()
                optimizer.step()
        for (name, value), (other, mine_) in zip(plain.state_dict().items(), made.state_dict().items(), strict=True):
            assert name == other
            assert torch.equal(value, mine_), (dtype, name)


def test_any_batch_and_any_size_on_one_device() -> None:
    module, made = copy.deepcopy(calm()[0]), alone(calm)
    for shape in ((1, 3, 6, 6), (9, 3, 11, 5)):
        x = torch.randn(shape).double()
        assert all(torch.equal(a, b) for a, b in zip(made(x), module(x), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(made(x=x), module(x=x), strict=True))


def test_parameters_are_the_users_own() -> None:
    module = copy.deepcopy(calm()[0])
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    made = load(plan_of(calm()[1], 1), module, comm=SoloComm(), dtype=torch.float64, example_inputs=(IMAGES[0],))
    assert made is module
    before = module.conv.weight.clone()
    loss(made(IMAGES[0])).backward()
    optimizer.step()
    assert not torch.equal(before, module.conv.weight)


def test_a_copy_draws_as_its_original() -> None:
    made = alone()
    loss(made(IMAGES[0]))
    again, kept = copy.deepcopy(made), copy.deepcopy(made)
    assert isinstance(of(again), DataRun)
    assert all(torch.equal(a, b) for a, b in zip(again(IMAGES[1]), kept(IMAGES[1]), strict=True))


def test_hooks_of_layers_and_parameters() -> None:
    module = copy.deepcopy(calm()[0])
    seen = list[str]()
    module.conv.register_forward_hook(lambda *_: seen.append("conv"))
    plan = plan_of(calm()[1], 1)
    made = load(plan, module, comm=SoloComm(), dtype=torch.float64, example_inputs=(IMAGES[0],))
    assert seen == []  # not while it is traced
    made.head.register_full_backward_hook(lambda *_: seen.append("head"))
    made.head.weight.register_post_accumulate_grad_hook(lambda _: seen.append("gradient"))
    loss(made(IMAGES[0])).backward()
    assert sorted(seen) == ["conv", "gradient", "head"]


def test_compiled_as_one_graph() -> None:
    module, made = copy.deepcopy(calm()[0]), alone(calm)
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    for x in IMAGES:
        assert all(difference(a, b) <= 1e-12 for a, b in zip(compiled(x), module(x), strict=True))
