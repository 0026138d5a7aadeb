"""What a loop keeps or changes between passes: as on one device, or refused."""

import copy
from collections.abc import Mapping

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


def test_a_gradient_zeroed_between_local_and_summed_passes_is_refused() -> None:
    _, network = mlp()

    def act(made: ParallelModule) -> None:
        x = SAMPLES[0][made.share()]
        loss(made(x)).backward()
        with made.no_sync():
            loss(made(x)).backward()
        made.zero_grad(set_to_none=False)
        loss(made(x)).backward()

    for text in refused(network, act):
        assert "was written to between passes" in text
