"""Habits of users of DistributedDataParallel: each either gives one device's numbers, or is refused with a reason."""

from __future__ import annotations

import copy
import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from layerwise.comm.base import Comm, CommError
from layerwise.comm.thread import run_threads
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.graph.load import Network, network_of
from layerwise.plan import Plan, parse_strategy
from layerwise.run.load import load
from layerwise.run.module import ParallelModule
from layerwise.run.out_of_memory import enough_memory
from tests.run.plans import difference

Gradients = dict[str, Tensor]
SAMPLES = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def plan_of(network: Network, ranks: int, degrees: Mapping[str, int] | None = None) -> Plan:
    """All layers cut alike: by samples, where `degrees` says nothing else. {}: on rank 0 alone."""
    graph = fuse(network.graph)
    cut = {"n": ranks} if degrees is None else dict(degrees)
    strategy = parse_strategy({layer.name: cut for layer in graph.inner}, graph, ranks)
    return Plan("test", graph.digest, graph.batch, ranks, ranks, "sample", True, strategy)


def traced(module: nn.Module, example: Tensor = SAMPLES[0]) -> Network:
    return network_of(module, (example,), len(example), "test")


def on_ranks(network: Network, act: Callable[[ParallelModule], object], ranks: int, plan: Plan | None = None) -> list:
    found = plan or plan_of(network, ranks)
    return run_threads(ranks, lambda comm: act(load(found, network, comm=comm, dtype=torch.float64)), timeout_s=20)


def refused(network: Network, act: Callable[[ParallelModule], object], ranks: int = 2) -> list[str]:
    """What each rank says."""

    def rank(module: ParallelModule) -> str:
        with pytest.raises(LayerwiseError) as raised:
            act(module)
        return str(raised.value)

    return on_ranks(network, rank, ranks)


def loss(out: Tensor) -> Tensor:
    return out.square().sum(1).mean()


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def equal(found: Mapping[str, Tensor | None], single: Mapping[str, Tensor | None]) -> None:
    assert found.keys() == single.keys()
    for name, value in single.items():
        here = found[name]
        assert (here is None) == (value is None), name
        if here is not None and value is not None:
            assert difference(here, value) <= 1e-9, name


@cache
def mlp() -> tuple[nn.Module, Network]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    return module, traced(module)


# ------------------------------------------------------------------------------------------------------ load


class Everything(nn.Module):
    """Values of all kinds: parameters, buffers, some of them not saved, a tensor that is neither, and made of these."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.norm.running_mean += seed
        self.register_buffer("scale", torch.rand(6))
        self.register_buffer("shift", torch.rand(6), persistent=False)
        self.plain = torch.rand(6, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x) * self.scale + self.shift) * self.plain + (self.plain * 2 + 1)


def test_rank_0s_values_win(monkeypatch: pytest.MonkeyPatch) -> None:
    built = [Everything(seed).double() for seed in range(3)]
    single, lock = copy.deepcopy(built[0]), threading.Lock()

    def alone(*given: object) -> Network:  # torch.export is not for threads
        with lock:
            return network_of(*given)

    monkeypatch.setattr(importlib.import_module("layerwise.run.load"), "network_of", alone)
    plan, x = plan_of(traced(built[0]), 3), SAMPLES[0]

    def rank(comm: Comm) -> tuple[Tensor, Mapping[str, Tensor]]:
        module = load(plan, built[comm.rank], comm=comm, dtype=torch.float64, example_inputs=(x[:2],))
        out = module.eval()(x[module.share()])
        return out.detach(), module.full_state_dict()

    ranks = run_threads(3, rank, timeout_s=20)
    assert difference(torch.cat([out for out, _ in ranks]), single.eval()(x)) <= 1e-9
    for _, state in ranks:
        equal(state, single.state_dict())
    for module in built:  # as with DDP
        equal(module.state_dict(), single.state_dict())


def test_ranks_with_different_models_are_refused() -> None:
    networks = [mlp()[1], replace(mlp()[1], built={})]
    plan = plan_of(networks[0], 2)

    def rank(comm: Comm) -> str:
        with pytest.raises(CommError) as raised:
            load(plan, networks[comm.rank], comm=comm)
        return str(raised.value)

    for text in run_threads(2, rank, timeout_s=20):
        assert "the ranks have built different models: '0.weight' is there" in text


@pytest.mark.parametrize(
    ("what", "unlike"),
    [("plan", {}), ("arguments of load", {"dtype": torch.float64}), ("arguments of load", {"seed": 1})],
)
def test_ranks_that_load_differently_are_refused(what: str, unlike: dict[str, object]) -> None:
    _, network = mlp()
    plans = [plan_of(network, 2), plan_of(network, 2) if unlike else plan_of(network, 2, {"c": 2})]

    def rank(comm: Comm) -> str:
        with pytest.raises(CommError) as raised:
            load(plans[comm.rank], network, comm=comm, **(unlike if comm.rank else {}))
        return str(raised.value)

    for text in run_threads(2, rank, timeout_s=20):
        assert text.startswith(f"the ranks differ in {what}: ")


def test_a_frozen_parameter_is_refused_at_load() -> None:
    module = copy.deepcopy(mlp()[0])
    module[2].weight.requires_grad_(False)
    network = traced(module)
    with pytest.raises(LayerwiseError, match=r"parameter '2\.weight' has requires_grad=False"):
        load(plan_of(network, 1), network)
    with pytest.raises(LayerwiseError, match=r"parameter '2\.weight' has requires_grad=False"):
        load(plan_of(network, 1), module, example_inputs=(SAMPLES[0],))


@pytest.mark.parametrize("part", [nn.BatchNorm1d(6), nn.Dropout(0.5)], ids=["batch norm", "dropout"])
@pytest.mark.parametrize("training", [True, False])
def test_a_part_in_another_mode_is_refused(part: nn.Module, training: bool) -> None:
    module = nn.Sequential(nn.Linear(4, 6), part).double().train(training)
    part.train(not training)
    modes = ("evaluation", "training") if training else ("training", "evaluation")
    with pytest.raises(LayerwiseError, match=f"layer '1' is in {modes[0]} mode and the model is not"):
        traced(module)
    module.train()
    assert traced(module).graph.layers


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(torch.relu(self.norm(x))))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_batch_norm_called_twice_is_refused(ranks: int) -> None:
    network = traced(Twice().double())

    def rank(comm: Comm) -> str:
        with pytest.raises(LayerwiseError) as raised:
            load(plan_of(network, ranks), network, comm=comm)
        return str(raised.value)

    for text in run_threads(ranks, rank, timeout_s=20):
        assert "uses buffer 'norm.running_mean' that another layer has, too" in text


# ------------------------------------------------------------------------------------------------------ gradients


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.shared(torch.relu(self.shared(self.first(x))))))


@cache
def tied() -> tuple[nn.Module, Network]:
    torch.manual_seed(0)
    module = Tied().double()
    return module, traced(module)


FROZEN = {
    "one of a bucket": (mlp, {"2.bias"}),
    "the first layer": (mlp, {"0.weight", "0.bias"}),
    "the last layer": (mlp, {"2.weight", "2.bias"}),
    "a tied one": (tied, {"shared.weight"}),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", FROZEN)
def test_freezing_after_loading(case: str, ranks: int) -> None:
    make, frozen = FROZEN[case]
    module, network = make()

    def train(made: nn.Module, share: slice) -> list[dict[str, Tensor | None]]:
        """Gradients with some frozen from the beginning, then from the middle of the training on, and then no more."""
        named = dict(made.named_parameters())

        def freeze(yes: bool) -> None:
            for name in frozen:
                named[name].requires_grad_(not yes)

        def step(i: int) -> dict[str, Tensor | None]:
            loss(made(SAMPLES[i][share])).backward()
            return gradients(made)

        freeze(True)
        seen = [step(0)]
        freeze(False)
        seen.append(step(1))
        freeze(True)
        seen.append(step(2))
        return seen

    single = train(copy.deepcopy(module), slice(None))
    assert {name for name, g in single[0].items() if g is None} == frozen
    for found in on_ranks(network, lambda made: train(made, made.share()), ranks):
        for here, there in zip(found, single, strict=True):
            equal(here, there)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("synchronised", [(1, 0, 1), (0, 0, 1), (1, 1, 1), (0, 1, 1), (1, 0, 0, 1), (0, 1, 0, 1)])
def test_gradients_add_up_whichever_are_synchronised(synchronised: Sequence[int], ranks: int) -> None:
    module, network = mlp()
    single = copy.deepcopy(module)
    for i in range(len(synchronised)):
        loss(single(SAMPLES[i % 3])).backward()

    def rank(made: ParallelModule) -> dict[str, Tensor | None]:
        for i, now in enumerate(synchronised):
            x = SAMPLES[i % 3][made.share()]
            if now:
                loss(made(x)).backward()
            else:
                with made.no_sync():
                    loss(made(x)).backward()
        return gradients(made)

    for found in on_ranks(network, rank, ranks):
        equal(found, gradients(single))


# ------------------------------------------------------------------------------------------------------ inputs


def test_ranks_that_feed_unlike_numbers_of_samples_are_refused() -> None:
    _, network = mlp()
    told = refused(network, lambda made: made(SAMPLES[0][: 3 if made.comm.rank else 5]))
    assert len(set(told)) == 1
    assert told[0].startswith("the ranks were given 5, 3 samples: give module(..., batch=B)")


@pytest.mark.parametrize("fed", [1, 3, 7])
def test_ranks_that_feed_as_many_samples_as_each_other(fed: int) -> None:
    module, network = mlp()
    single, x = copy.deepcopy(module), SAMPLES.flatten(0, 1)[: 2 * fed]
    loss(single(x)).backward()

    def rank(made: ParallelModule) -> dict[str, Tensor | None]:
        loss(made(x[made.comm.rank * fed :][:fed])).backward()
        return gradients(made)

    for found in on_ranks(network, rank, 2):
        equal(found, gradients(single))


def test_an_input_that_requires_a_gradient_is_refused() -> None:
    _, network = mlp()
    x = SAMPLES[0].clone().requires_grad_()
    for text in refused(network, lambda made: made(x[made.share()])):
        assert "requires a gradient, which is not made: give it detached" in text

    def without(made: ParallelModule) -> Tensor:
        with torch.no_grad():
            return made(x[made.share()])

    assert torch.cat(on_ranks(network, without, 2)).shape == (8, 3)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_batch_norm_of_one_value_a_channel_names_its_layer(ranks: int) -> None:
    network = traced(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).double(), SAMPLES[0][:2])

    def rank(comm: Comm) -> str:
        plan = plan_of(network, ranks)
        module = load(plan, network, comm=comm, dtype=torch.float64, local_batch_norm=True)
        x = SAMPLES[0][:1]
        assert module.eval()(x, batch=ranks).shape == (1, 6)
        with pytest.raises(LayerwiseError) as raised:
            module.train()(x, batch=ranks)
        return str(raised.value)

    for text in run_threads(ranks, rank, timeout_s=20):
        assert text.startswith("layer '1")
        assert "more than 1 value per channel" in text


# ------------------------------------------------------------------------------------------------------ state


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.register_buffer("mask", torch.tensor([1, 0, 2**60 + 1, 1, 0, 7]))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)) * (self.mask > 0) * self.mask.clamp(max=9)


@pytest.mark.parametrize("degrees", [{}, {"n": 2}, {"c": 3}], ids=str)
def test_the_state_is_whole_and_stays_as_it_was(degrees: dict[str, int]) -> None:
    module = Masked().double()
    network = traced(module)

    def rank(made: ParallelModule) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        before = made.full_state_dict()
        kept = {name: value.clone() for name, value in before.items()}
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        loss(made(SAMPLES[0][made.share()])).backward()
        optimizer.step()
        return before, kept, made.full_state_dict()

    for before, kept, after in on_ranks(network, rank, 3, plan_of(network, 3, degrees)):
        for name, value in module.state_dict().items():
            assert before[name].dtype == after[name].dtype == value.dtype
            assert torch.equal(before[name], value), name
            assert torch.equal(kept[name], value), name
        moved = {name for name in after if not torch.equal(after[name], before[name])}
        assert moved == set(after) - {"mask"}
        assert after["norm.num_batches_tracked"] == 1


# ------------------------------------------------------------------------------------------------------ memory


def fails(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    "act",
    [lambda: fails(MemoryError()), lambda: torch.empty(2**60), lambda: fails(torch.OutOfMemoryError("CUDA: 3 GiB"))],
    ids=["Python", "CPU", "GPU"],
)
def test_out_of_memory_says_what_to_do(act: Callable[[], object]) -> None:
    plan = replace(plan_of(mlp()[1], 2), predicted={"memory_bytes": 3e9})
    with (
        pytest.raises(LayerwiseError, match=r"^rank 1 ran out of memory \(the plan predicts 3 GB.*: search for more"),
        enough_memory(plan, 1),
    ):
        act()
    with (
        pytest.raises(LayerwiseError, match="^rank 0 ran out of memory: search"),
        enough_memory(plan_of(mlp()[1], 2), 0),
    ):
        act()


def test_other_errors_are_left_as_they_are() -> None:
    for error in (RuntimeError("a bug"), ValueError("another"), LayerwiseError("a mistake")):
        with pytest.raises(type(error)) as raised, enough_memory(plan_of(mlp()[1], 1), 0):
            fails(error)
        assert raised.value is error
