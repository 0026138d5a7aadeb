"""What once went wrong without a word: each mended finding of a review, on the kind of plan that had it."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from layerwise.config import Config
from layerwise.importers.load import Network
from layerwise.run.local_tensor import local_tensor
from layerwise.run.parallel import ParallelModule
from tests.run.own_modules import IMAGES, alone, calm, loss, net, same_on_ranks, state_and_gradients
from tests.run.plans import difference
from tests.run.small_modules import on_ranks, plan_of, refused, traced


@pytest.mark.parametrize("degrees", [{"n": 2}, {"h": 2}, {"c": 2}], ids=str)
def test_channels_last_and_a_fused_optimizer(degrees: dict[str, int]) -> None:
    """Gradients lie in memory as their parameters: fused optimizers pair up elements by their place."""

    def loop(model: nn.Module, share: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        model = model.to(memory_format=torch.channels_last)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        for x in IMAGES:
            optimizer.zero_grad()
            loss(model(share(x).to(memory_format=torch.channels_last))).backward()
            optimizer.step()
        return dict(model.full_state_dict() if isinstance(model, ParallelModule) else model.state_dict())

    module, network = calm()
    single = loop(copy.deepcopy(module), lambda x: x)
    for found in on_ranks(network, lambda made: loop(made, lambda x: x[made.share()]), 2, plan_of(network, 2, degrees)):
        for name, value in single.items():
            # Adam magnifies rounding where a gradient is zero, as of a bias before a batch norm.
            assert difference(found[name], value) <= 1e-6, name


@pytest.mark.parametrize("degrees", [{"n": 2}, {"h": 2}], ids=str)
@pytest.mark.parametrize("known", [False, True])
def test_unlike_shapes_are_refused_on_every_rank(degrees: dict[str, int], known: bool) -> None:
    """Also where one rank has seen its own before: it does not go on, and the other does not wait for ever."""
    _, network = calm()

    def act(made: ParallelModule) -> None:
        if known:
            made(IMAGES[0][made.share()])
        made(IMAGES[0][made.share()][..., : 5 + made.comm.rank])

    for text in refused(network, act, 2, plan_of(network, 2, degrees)):
        assert "the ranks fed samples of different shapes" in text


def test_ranks_without_a_batch_norm_may_have_unlike_shapes() -> None:
    """As batches of sentences that each rank pads to its longest."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    ).double()
    network = traced(module, IMAGES[0])

    def rank(made: ParallelModule) -> Tensor:
        out: Tensor = made(IMAGES[0][made.share()][..., : 5 + made.comm.rank])
        out.square().mean().backward()
        return made[0].weight.grad

    one, two = on_ranks(network, rank, 2)
    torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_a_dropout_in_training_within_evaluation_draws_anew_in_every_call() -> None:
    """Monte Carlo dropout: alike for any number of ranks."""

    def loop(model: nn.Module, share: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        model.eval()
        model.drop.train()
        with torch.no_grad():
            one, two = (model(share(IMAGES[0]))[0] for _ in range(2))
        assert not torch.equal(one, two)
        return {"own one": one, "own two": two}

    same_on_ranks(loop)


@cache
def forgetful() -> tuple[nn.Module, Network]:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4, track_running_stats=False)
    module = nn.Sequential(nn.Conv2d(3, 4, 1), norm, nn.Flatten(), nn.Linear(144, 5)).double()
    return module, traced(module, IMAGES[0])


def test_a_batch_norm_without_running_statistics_takes_the_whole_batchs_in_evaluation() -> None:
    def loop(model: nn.Module, share: Callable[[Tensor], Tensor]) -> dict[str, Tensor | None]:
        with torch.no_grad():
            before = model.eval()(share(IMAGES[0]))
        model(share(IMAGES[1])).square().mean().backward()
        return {"own before": before} | state_and_gradients(model)

    same_on_ranks(loop, forgetful)
    module, network = forgetful()
    wanted = module(IMAGES[0]).detach()

    def rank(made: ParallelModule) -> Tensor:
        out: Tensor = made.eval()(IMAGES[0][made.share()]).detach()
        return out

    for degrees in ({"h": 2}, {"c": 2}):
        found = torch.cat(on_ranks(network, rank, 2, plan_of(network, 2, degrees)))
        assert difference(found, wanted) <= 1e-9


def test_a_state_dict_is_taken_in_one_order_on_all_ranks() -> None:
    """Whatever the order of its keys on a rank: what other ranks hold is collected on the way."""
    _, network = net()
    state = {name: value + 1 for name, value in alone().full_state_dict().items()}

    def rank(made: ParallelModule) -> dict[str, Tensor]:
        keys = sorted(state, reverse=bool(made.comm.rank))
        made.load_state_dict({key: state[key] for key in keys})
        return made.full_state_dict()

    for degrees in ({"n": 2}, {"c": 2}):
        for found in on_ranks(network, rank, 2, plan_of(network, 2, degrees)):
            assert all(torch.equal(found[name], value) for name, value in state.items())


class Heads(nn.Module):
    """Two outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 2)
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.body(x))
        return self.one(x), self.two(x)


@pytest.mark.parametrize("user", [None, 1])
def test_an_unused_output_of_a_layer_cut_as_its_samples_are_fed(user: int | None) -> None:
    """Nothing is between it and its layer, whose leaves autograd comes by without a gradient. user: a rank."""
    samples = torch.randn(4, 4, dtype=torch.float64)
    network = traced(Heads(), samples)
    plan = replace(
        plan_of(network, 2, {}),
        strategy={"body": Config.of({"c": 2}), "one": Config.of({"n": 2}), "two": Config.of({"n": 2})},
    )

    def act(made: ParallelModule) -> Tensor | None:
        one, two = made(samples[made.share()])
        (one.sum() + (two.sum() if made.comm.rank == user else 0)).backward()
        gradient = made.get_parameter("two.bias").grad
        return None if gradient is None else local_tensor(gradient).clone()

    for gradient in on_ranks(network, act, 2, plan):
        assert gradient is None if user is None else gradient.tolist() == [1.0, 1.0]  # the mean over two ranks' sums


@pytest.mark.parametrize("degrees", [{"n": 2}, {"c": 2}], ids=str)
def test_a_batch_of_fewer_samples_than_ranks(degrees: dict[str, int]) -> None:
    network = traced(nn.Linear(4, 4).double(), torch.randn(4, 4, dtype=torch.float64))
    for text in refused(
        network,
        lambda made: made(torch.randn(1, 4, dtype=torch.float64)[made.share(1)]),
        2,
        plan_of(network, 2, degrees),
    ):
        assert text.startswith("a batch of 1 samples leaves some of 2 ranks without one")
