"""Training: the numbers of plain PyTorch on one device, whatever the plan; and the comparison that says so."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from layerwise.comm.base import Comm
from layerwise.comm.solo import SoloComm
from layerwise.config import Config
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.importers.load import Network, network_of
from layerwise.plan import Plan, parse_strategy
from layerwise.run.load import load
from layerwise.run.parallel import ParallelModule
from layerwise.train.compare import FinalState, difference, final_state, largest
from layerwise.train.data import Data, StepSampler, load_data
from layerwise.train.loop import MOST, OPTIMIZERS, Settings, Step, Trainer, sampler, until_next
from layerwise.train.score import TaskObjective, evaluate, held_out_loss
from layerwise.train.sources import CheckedTensors
from tests.comm.thread import run_threads
from tests.run.small_plans import graph, network, plan

MLP = "mlp:20x12x5"
SPLITS = {
    "data": plan(MLP, 6, 3),
    "classes": plan(MLP, 6, 4, {"0": {"n": 2, "c": 2}, "2": {"c": 4}}),
    "free": plan(MLP, 6, 2, {"0": {"c": 2}, "2": {"c": 2}}, "free"),
    "free, by samples": plan(MLP, 6, 3, {"0": {"c": 3}, "2": {"n": 3}}, "free"),
    "free, one sample": plan(MLP, 1, 2, {"0": {"c": 2}, "2": {}}, "free"),
}


def data_for(found: Plan, count: int = 26) -> Data:
    """Random numbers, float64; 11 held out."""
    wanted = load_data("synthetic", graph(MLP, found.batch)).task
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(count + 11, 20, generator=draw, dtype=torch.float64)
    y = torch.randint(5, (count + 11,), generator=draw)
    return Data("random", wanted, CheckedTensors((x[:count],), y[:count]), CheckedTensors((x[count:],), y[count:]))


def trainer(found: Plan, comm: Comm, data: Data, settings: Settings, accumulate: int = 1) -> Trainer:
    module = load(found, network(MLP, found.batch), comm=comm, dtype=torch.float64)
    return trainer_of(module, data, sampler(found, data.train.count, accumulate, 7), settings)


def trainer_of(module: ParallelModule, data: Data, steps: StepSampler, settings: Settings) -> Trainer:
    objective = TaskObjective(module, data.task, data.train)
    return Trainer(module, objective, steps, settings.build(module.parameters()), settings.clip)


def step_of(sampler: StepSampler, step: int) -> list[Tensor]:
    epoch, number = divmod(step, sampler.per_epoch)
    return sampler.steps(epoch)[number]


def in_plain_torch(
    made: Trainer, data: Data, settings: Settings, state: dict[str, Tensor], steps: int
) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of the same steps, each one batch, by PyTorch alone; and what the parameters are then."""
    model = nn.Sequential(nn.Linear(20, 12), nn.ReLU(), nn.Linear(12, 5)).double()
    model.load_state_dict(state)
    optimizer = settings.build(model.parameters())
    losses = []
    for step in range(steps):
        (x,), y = data.train.batch(torch.cat(step_of(made.sampler, step)))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        if settings.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def trained(found: Plan, settings: Settings, steps: int, accumulate: int = 1) -> tuple[list[Step], list[float], float]:
    """The steps; the losses by plain PyTorch; the largest difference of a parameter. Every rank must say the same."""
    data = data_for(found)

    def rank(comm: Comm) -> tuple[list[Step], list[float], float]:
        made = trainer(found, comm, data, settings, accumulate)
        before = made.module.full_state_dict()
        taken = list(made.run(steps))
        losses, state = in_plain_torch(made, data, settings, before, steps)
        after = made.module.full_state_dict()
        assert max(float((after[name] - before[name]).abs().max()) for name in after) > 1e-4  # something was learnt
        return taken, losses, max(float((after[name] - state[name]).abs().max()) for name in state)

    results = run_threads(found.gpus, rank)
    assert len({str([step.loss for step in taken]) for taken, _, _ in results}) == 1
    return results[0]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_numbers_of_plain_pytorch(split: str, accumulate: int) -> None:
    found = SPLITS[split]
    steps, losses, apart = trained(found, Settings("momentum", lr=0.05), 12, accumulate)
    assert [step.loss for step in steps] == pytest.approx(losses, rel=1e-12)
    assert apart < 1e-12
    assert [step.number for step in steps] == list(range(1, 13))
    if accumulate == 1 and found.batch == 6:
        short = [step for step in steps if step.samples < 6]  # 26 samples: four batches of 6, and 2
        least = {"data": 3, "classes": 4, "free": 1, "free, by samples": 3}[split]
        assert [step.samples for step in short] == ([2, 2] if least <= 2 else [])
        assert steps[-1].epoch == 3


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers(optimizer: str) -> None:
    settings = Settings(optimizer, lr=0.02, momentum=0.8, weight_decay=0.01, clip=0.3)
    steps, losses, apart = trained(SPLITS["classes"], settings, 5)
    assert [step.loss for step in steps] == pytest.approx(losses, rel=1e-9)
    assert apart < 1e-9


def test_ranks_meet_twice_a_second_and_after_ten_steps_at_most() -> None:
    """Steps that were fast may become slow, and then a signal must be heard all the same."""
    assert [until_next(pace_s) for pace_s in (1e-4, 0.01, 0.1, 2.0)] == [MOST, MOST, 5, 1]


def test_settings_reach_the_optimizer() -> None:
    p = [nn.Parameter(torch.zeros(1))]
    made = Settings("momentum", lr=0.5, momentum=0.7, weight_decay=0.1).build(p)
    assert isinstance(made, torch.optim.SGD)
    assert {key: made.defaults[key] for key in ("lr", "momentum", "weight_decay")} == {
        "lr": 0.5, "momentum": 0.7, "weight_decay": 0.1,
    }  # fmt: skip
    assert Settings("sgd").build(p).defaults["momentum"] == 0
    assert isinstance(Settings("adamw").build(p), torch.optim.AdamW)
    assert Settings("adam").build(p).defaults["lr"] == OPTIMIZERS["adam"]


def test_bytes_are_those_of_whole_steps() -> None:
    found = SPLITS["classes"]
    data = data_for(found, 30)

    def rank(comm: Comm) -> tuple[int, int, int]:
        made = trainer(found, comm, data, Settings(), 2)
        list(made.run(1))
        one = made.sent.total()
        list(made.run(3))  # five batches an epoch: the third step has but one
        return one, made.sent.total(), made.full

    for one, all_sent, full in run_threads(4, rank):
        assert one > 0
        assert full == 3  # 1 + 2
        assert all_sent == 3 * one


def test_after_each_step_and_resuming() -> None:
    found = SPLITS["data"]
    data = data_for(found)

    def rank(comm: Comm) -> tuple[list[int], list[float], list[float]]:
        done: list[int] = []
        whole = [step.loss for step in trainer(found, comm, data, Settings()).run(7, after=done.append)]
        halves = trainer(found, comm, data, Settings())
        losses = [step.loss for steps in (halves.run(3), halves.run(7, first=3)) for step in steps]
        return done, whole, losses

    for done, whole, halves in run_threads(3, rank):
        assert done == list(range(1, 8))
        assert whole == halves


@pytest.mark.parametrize("split", SPLITS)
def test_accuracy_counts_every_held_out_sample_once(split: str) -> None:
    found = SPLITS[split]
    data = data_for(found)  # 11 held out: the last batch is short

    def rank(comm: Comm) -> tuple[float, float]:
        made = trainer(found, comm, data, Settings("adam", lr=0.01))
        list(made.run(4))
        score = evaluate(made.module, data)
        assert score is not None
        assert made.module.training
        model = nn.Sequential(nn.Linear(20, 12), nn.ReLU(), nn.Linear(12, 5)).double()
        model.load_state_dict(made.module.full_state_dict())
        assert data.held_out is not None
        (x,), y = data.held_out.batch(torch.arange(11))
        return score.accuracy, float((model(x).argmax(1) == y).double().mean())

    for accuracy, plain in run_threads(found.gpus, rank):
        assert 0 < plain < 1
        assert accuracy == pytest.approx(plain, abs=1e-12)


def test_a_sample_too_small_for_its_network_is_one_sentence() -> None:
    """One rank runs the model as it is written, so PyTorch's own batch norm refuses one value a channel."""
    model = nn.Sequential(nn.Linear(20, 5), nn.BatchNorm1d(5)).double()
    normed = network_of(model, (torch.randn(2, 20).double(),), 1, "normed")
    found = Plan(
        "normed", normed.graph.digest, 1, 1, 1, "sample", False, {layer.name: Config() for layer in normed.graph.inner}
    )
    data, module = data_for(found), load(found, normed, dtype=torch.float64)
    made = trainer_of(module, data, sampler(found, 26), Settings())
    with pytest.raises(
        LayerwiseError, match=r"^the model does not accept a batch of 1: Expected more than 1 value per"
    ):
        list(made.run(1))


def test_nothing_to_tell_the_accuracy_by() -> None:
    found = SPLITS["data"]
    data = replace(data_for(found), held_out=None)
    assert evaluate(trainer(found, SoloComm(), data, Settings()).module, data) is None


class Judged(nn.Module):
    """A model that ends in a loss."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.linear, self.reduction = nn.Linear(20, 5), reduction

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.linear(x), target, reduction=self.reduction)


def judged(reduction: str, io: Literal["sample", "free"], batch: int) -> tuple[Plan, Network, nn.Module]:
    """Split by samples over three ranks."""
    model = Judged(reduction).double()
    own = network_of(model, (torch.randn(2, 20).double(), torch.zeros(2, dtype=torch.int64)), batch, "judged")
    fused = fuse(own.graph)
    strategy = parse_strategy({layer.name: {"n": 3} for layer in own.graph.inner}, fused, 3)
    return Plan("judged", fused.digest, batch, 3, 3, io, True, strategy), own, model


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("io", ["sample", "free"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_of_the_models_own(reduction: str, io: Literal["sample", "free"], accumulate: int) -> None:
    found, own, model = judged(reduction, io, batch=6)
    data = replace(data_for(found), task=load_data("synthetic", fuse(own.graph)).task)

    def rank(comm: Comm) -> tuple[list[float], dict[str, Tensor]]:
        module = load(found, own, comm=comm, dtype=torch.float64)
        settings, steps = Settings("sgd", lr=0.01), sampler(found, 26, accumulate, 7)
        made = trainer_of(module, data, steps, settings)
        losses = [step.loss for step in made.run(5)]
        assert evaluate(module, data) is None
        return losses, module.full_state_dict()

    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    results = run_threads(3, rank)  # the module has copied the values that the model has now
    plain = []
    steps = sampler(found, 26, accumulate, 7)
    for step in range(5):
        (x,), y = data.train.batch(torch.cat(step_of(steps, step)))
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        plain.append(loss.item())
    for losses, state in results:
        assert losses == pytest.approx(plain, rel=1e-12)
        for name, value in model.state_dict().items():
            assert torch.allclose(state[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_held_out_loss_of_ranks_with_unequal_shares(reduction: str) -> None:
    """It used to be the mean of the ranks' means."""
    found, own, model = judged(reduction, "sample", batch=5)
    data = replace(data_for(found), task=load_data("synthetic", fuse(own.graph)).task)  # 11 held out: two batches

    def rank(comm: Comm) -> float | None:
        return held_out_loss(load(found, own, comm=comm, dtype=torch.float64), data)

    assert data.held_out is not None
    (x,), y = data.held_out.batch(torch.arange(10))
    with torch.no_grad():
        plain = sum(model(x[i : i + 5], y[i : i + 5]).item() for i in (0, 5)) / 2
    assert run_threads(3, rank) == [pytest.approx(plain, rel=1e-12)] * 3


# --------------------------------------------------------------------------------------------------- comparison


def test_a_plan_compares_equal_to_one_device_and_another_does_not() -> None:
    found = SPLITS["classes"]
    data = data_for(found)

    def rank(comm: Comm) -> FinalState:
        made = trainer(found, comm, data, Settings("adam"))
        return final_state(made.module, [step.loss for step in made.run(4)])

    planned, single = run_threads(4, rank)[2], rank(SoloComm())
    names = set(single.state)
    same = difference(single, planned, names)
    assert same.beyond(1e-11) == []
    assert set(same.as_dict()) == {"loss", "gradients", "parameters", "buffers"}
    assert single.gradients["2.bias"].abs().max() > 1e-3
    assert not torch.equal(single.gradients["2.bias"], single.state["2.bias"])
    other = difference(single, replace(planned, losses=[*planned.losses[:3], 9.0]), names)
    assert other.beyond(1e-9) == ["loss"]
    broken = {**planned.state, "2.bias": planned.state["2.bias"] * (1 + 1e-6)}
    moved = difference(single, replace(planned, state=broken), names)
    assert moved.beyond(1e-9) == ["parameters"]
    assert moved.parameters == pytest.approx(1e-6, rel=1e-3)
    assert moved.worst["parameters"] == "2.bias"
    assert difference(single, replace(planned, state=broken), set()).beyond(1e-9) == ["buffers"]
    grown = {**planned.gradients, "0.weight": planned.gradients["0.weight"] + 1}
    assert difference(single, replace(planned, gradients=grown), names).beyond(1e-9) == ["gradients"]


def pairs(*values: tuple[Sequence[float], Sequence[float]]) -> list[tuple[str, Tensor, Tensor]]:
    return [(str(i), torch.tensor(a), torch.tensor(b)) for i, (a, b) in enumerate(values)]


def test_largest_difference() -> None:
    assert largest(pairs(([2.0, -4.0], [2.0, -4.5]), ([1.0], [1.05]))) == (pytest.approx(0.125), "0")
    assert largest(pairs(([1.0], [1.0]))) == (0.0, "")
    assert largest([]) == (0.0, "")
    assert largest(pairs(([0.0], [0.0]))) == (0.0, "")
    assert largest(pairs(([0.0], [1e-20])))[0] == math.inf
    noise, _ = largest(pairs(([1.0], [1.0]), ([1e-9], [-1e-9])))  # of a gradient that is zero but for rounding
    assert noise == pytest.approx(2e-6)
    for bad in (math.nan, math.inf):
        assert not largest(pairs(([1.0], [bad]), ([1.0], [2.0])))[0] <= 1
        assert not largest(pairs(([bad], [bad]), ([1.0], [1.0])))[0] <= 1
