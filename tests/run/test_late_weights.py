"""Late weights: gradients are PyTorch's own, bit by bit, and that of the weights is made when the token comes by."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from layerwise.run.execute.autograd import ordered
from layerwise.run.execute.deferred_weights import DeferredWeights, defer_weights

CONVS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def layer(rank: int, groups: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(rank)
    x, weight, bias = torch.randn(2, 4, *(7,) * rank), torch.randn(6, 4 // groups, *(3,) * rank), torch.randn(6)
    return [t.to(dtype).requires_grad_() for t in (x, weight, bias)]


def late_and_plain(rank: int, groups: int, given: list[Tensor]) -> tuple[Tensor, Tensor]:
    x, weight, bias = given
    how = [2] * rank, [1] * rank, [1] * rank, groups
    deferred = DeferredWeights(weight.dtype, nullcontext)
    _, held = defer_weights(torch.zeros((), requires_grad=True), weight, deferred)
    return deferred.convolve(x, held, bias, *how), CONVS[rank](x, weight, bias, *how)


@pytest.mark.parametrize(("rank", "groups"), [(1, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_are_bit_by_bit_as_in_one_call(rank: int, groups: int, dtype: torch.dtype, autocast: bool) -> None:
    given = layer(rank, groups, dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        made = late_and_plain(rank, groups, given)
    assert torch.equal(*made)
    for _ in range(2):  # a second pass of the same graph
        late, plain = (torch.autograd.grad(out.square().sum(), given, retain_graph=True) for out in made)
        for a, b in zip(late, plain, strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


def test_gradients_of_gradients() -> None:
    given = layer(2, 1, torch.float64)
    found = []
    for out in late_and_plain(2, 1, given):
        first = torch.autograd.grad(out.pow(3).sum(), given, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), given))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


@pytest.mark.parametrize("comes_by", [True, False])
def test_the_weights_wait_for_the_token(comes_by: bool) -> None:
    """As an exchange between does; without the convolution there is no gradient, and nothing is made."""
    x, weight, bias = layer(2, 1, torch.float64)
    done: list[str] = []
    weight.register_post_accumulate_grad_hook(lambda w: done.append("nothing" if w.grad is None else "weights"))
    deferred = DeferredWeights(weight.dtype, nullcontext)
    token, held = defer_weights(torch.zeros((), requires_grad=True), weight, deferred)
    token, y = ordered(token, x * 1, at_backward=lambda: done.append("exchange"))
    out = deferred.convolve(y, held, bias, [1, 1], [1, 1], [1, 1], 1)
    used = ordered(token, out, at_backward=lambda: done.append("next layer"))
    (used[1].sum() if comes_by else y.sum()).backward()
    assert done == (["next layer", "exchange", "weights"] if comes_by else ["exchange", "nothing"])
    assert (weight.grad is not None) == comes_by
