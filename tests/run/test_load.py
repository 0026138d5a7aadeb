"""Loading: rank 0's values win; ranks that load other things, and modules that cannot be trained, are refused."""

import copy
import importlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layerwise.comm.base import Comm, CommError
from layerwise.errors import LayerwiseError
from layerwise.importers.load import Network, network_of, with_constants
from layerwise.run.load import load
from tests.comm.thread import run_threads
from tests.run.plans import difference
from tests.run.small_modules import SAMPLES, equal, layered, mlp, plan_of, traced


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

    def alone(*given: Any, **named: Any) -> Network:  # torch.export is not for threads
        with lock:
            return network_of(*given, **named)

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


class Positions(nn.Module):
    """Adds a table of sines that its forward pass computes in its own element type."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.last = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        table = (torch.arange(6, dtype=x.dtype, device=x.device) / 7).sin()
        return self.last(torch.tanh(self.linear(x) + table))


def test_a_table_is_computed_in_the_type_of_the_run() -> None:
    """Traced in float32, run in float64: the sines have float64's digits."""
    given, x = Positions(), SAMPLES[0]
    single, network = copy.deepcopy(given).double(), traced(given, x.float())
    plan = plan_of(network, 2, {"c": 2})

    def off(network: Network) -> float:
        def rank(comm: Comm) -> Tensor:
            module = load(plan, layered(network), comm=comm, dtype=torch.float64)
            return module(x[module.share()]).detach()

        return difference(torch.cat(run_threads(2, rank, timeout_s=20)), single(x))

    assert off(network) > 1e-9
    assert off(with_constants(network, (x.float(),), {}, torch.float64)) <= 1e-14


@pytest.mark.parametrize(
    ("message", "unlike"),
    [
        ("the ranks differ in plan: ", lambda: {"plan": plan_of(mlp()[1], 2, {"c": 2})}),
        ("the ranks differ in arguments of load: ", lambda: {"dtype": torch.float64}),
        ("the ranks differ in arguments of load: ", lambda: {"seed": 1}),
        (
            "the ranks have built different models: '0.weight' is missing on one of the ranks 0 and 1",
            lambda: {"model": replace(mlp()[1], built={})},
        ),
    ],
    ids=["plan", "dtype", "seed", "model"],
)
def test_ranks_that_load_differently_are_refused(message: str, unlike: Callable[[], dict[str, Any]]) -> None:
    alike, other = {"plan": plan_of(mlp()[1], 2), "model": mlp()[1]}, unlike()

    def rank(comm: Comm) -> str:
        with pytest.raises(CommError) as raised:
            load(comm=comm, **alike | (other if comm.rank else {}))
        return str(raised.value)

    for text in run_threads(2, rank, timeout_s=20):
        assert message in text


@pytest.mark.parametrize("part", [nn.BatchNorm1d(6), nn.Dropout(0.5)], ids=["batch norm", "dropout"])
@pytest.mark.parametrize("training", [True, False])
def test_a_part_in_another_mode_is_refused(part: nn.Module, training: bool) -> None:
    module = nn.Sequential(nn.Linear(4, 6), part).double().train(training)
    part.train(not training)
    modes = ("evaluation", "training") if training else ("training", "evaluation")
    with pytest.raises(LayerwiseError, match=f"layer '1' is in {modes[0]} mode but the model is not"):
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
    network = layered(traced(Twice().double()))

    def rank(comm: Comm) -> str:
        with pytest.raises(LayerwiseError) as raised:
            load(plan_of(network, ranks), network, comm=comm)
        return str(raised.value)

    for text in run_threads(ranks, rank, timeout_s=20):
        assert "shares buffer 'norm.running_mean' with another layer" in text
