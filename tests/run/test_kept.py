"""What a loop keeps or changes between passes: as on one device, or refused."""

import copy
from collections.abc import Mapping
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from layerwise.run.layered import LayeredRun
from layerwise.run.local_tensor import local_tensor
from layerwise.run.parallel import ParallelModule, of
from tests.run.plans import difference
from tests.run.small_modules import SAMPLES, loss, mlp, on_ranks, plan_of, refused


@pytest.mark.parametrize("degrees", [{"n": 2}, {"c": 2}])
def test_a_gradient_that_is_kept_stays_as_it_is(degrees: Mapping[str, int]) -> None:
    """As loops keep them that combine the gradients of several tasks."""
    _, network = mlp()

    def rank(made: ParallelModule) -> float:
        loss(made(SAMPLES[0][made.share()])).backward()
        kept = [p.grad for p in made.parameters()]
        before = [local_tensor(g).clone() for g in kept if g is not None]
        made.zero_grad()
        loss(made(SAMPLES[1][made.share()])).backward()
        return max(difference(local_tensor(g), old) for g, old in zip(kept, before, strict=True) if g is not None)

    assert on_ranks(network, rank, 2, plan_of(network, 2, degrees)) == [0.0, 0.0]


def test_other_memory_for_a_parameter_is_followed() -> None:
    module, network = mlp()
    single = copy.deepcopy(module)

    def double(held: nn.Module) -> None:
        for p in held.parameters():
            p.data = 2 * p.data

    single(SAMPLES[0])
    double(single)

    def rank(made: ParallelModule) -> Tensor:
        assert isinstance(of(made), LayeredRun)
        x = SAMPLES[0][made.share()]
        made(x)
        double(made)
        return made(x).detach()

    out = on_ranks(network, rank, 2, plan_of(network, 2, {"c": 2}))
    assert difference(torch.cat(out), single(SAMPLES[0]).detach()) <= 1e-12


@pytest.mark.parametrize("degrees", [{"n": 2}, {"c": 2}, {}])
def test_a_gradient_written_to_between_local_and_summed_passes_is_one_devices(degrees: Mapping[str, int]) -> None:
    """As a loop does that scales, or zeroes, what it has accumulated: what waits for its sum, and what is summed."""
    module, network = mlp()

    def passes(made: nn.Module, share: slice) -> None:
        sync, x = getattr(made, "no_sync", nullcontext), SAMPLES[0][share]
        loss(made(x)).backward()
        with sync():
            loss(made(SAMPLES[1][share])).backward()
        for p in made.parameters():
            assert p.grad is not None
            p.grad.mul_(0.5)
        with sync():
            loss(made(x)).backward()
        loss(made(SAMPLES[2][share])).backward()
        torch.optim.SGD(made.parameters(), lr=0.1).step()

    single = copy.deepcopy(module)
    passes(single, slice(None))

    def rank(made: ParallelModule) -> dict[str, Tensor]:
        passes(made, made.share())
        return made.full_state_dict()

    for found in on_ranks(network, rank, 2, plan_of(network, 2, degrees)):
        for name, value in single.state_dict().items():
            assert difference(found[name], value) <= 1e-12, name


def test_a_norm_that_is_not_finite_is_told_on_every_rank() -> None:
    _, network = mlp()

    def act(made: ParallelModule) -> None:
        loss(made(SAMPLES[0][made.share()])).backward()
        if made.comm.rank:
            next(p.grad for p in made.parameters() if p.grad is not None).fill_(float("nan"))
        made.clip_grad_norm_(1.0, error_if_nonfinite=True)

    for text in refused(network, act, 2, plan_of(network, 2, {"c": 2})):
        assert text == "the norm of the gradients is nan, so they were not clipped"
    for text in refused(network, lambda made: made.clip_grad_norm_(1.0, 0)):
        assert text == "norm_type must be above 0, not 0"


def test_ranks_that_a_line_search_takes_apart_are_refused() -> None:
    """It decides by the loss, and every rank has the loss of its own samples."""
    _, network = mlp()

    def act(made: ParallelModule) -> None:
        optimizer = torch.optim.LBFGS(made.parameters(), max_iter=8, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimizer.zero_grad()
            value = loss(made(SAMPLES[0][made.share()]))
            value.backward()
            return value

        for _ in range(8):
            optimizer.step(closure)

    for text in refused(network, act):
        assert "has other parameters than rank" in text
