"""Losses need their own samples, and all of the rest of them unless nothing is reduced."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.ops.base import space
from layerwise.ops.facts import Local
from layerwise.ops.nn.loss import Loss
from layerwise.tensor import TensorSpec
from tests.ops.harness import IMAGES, cells, check_needs, images

REAL = {
    "cross_entropy": F.cross_entropy,
    "nll": F.nll_loss,
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": F.smooth_l1_loss,
    "bce": lambda x, t, reduction: F.binary_cross_entropy(x.sigmoid(), t.sigmoid(), reduction=reduction),
    "bce_logits": F.binary_cross_entropy_with_logits,
    "kl": lambda x, t, reduction: F.kl_div(x, t.abs(), reduction=reduction),
}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@given(st.data())
def test_loss_needs(data: st.DataObject) -> None:
    fn = data.draw(st.sampled_from(list(REAL)))
    reduction = data.draw(st.sampled_from(["mean", "sum", "none"]))
    op = Loss(fn, reduction)
    x = data.draw(images(ranks=(0, 2), low=2, high=4, block=3))
    target = x
    if fn == "nll" or (fn == "cross_entropy" and data.draw(st.booleans())):
        target = TensorSpec((x.shape[0], *x.shape[2:]), (x.dims[0], *x.dims[2:]), "int64")
    cell = data.draw(cells(space(op, (x, target))))

    def reference(a: Tensor, b: Tensor) -> Tensor:
        losses = REAL[fn](a, b, reduction="none")
        rows = losses.reshape(x.shape[0], -1)
        return losses if reduction == "none" else rows.mean(1) if reduction == "mean" else rows.sum(1)

    check_needs(op, [x, target], cell, reference, poison=0.5)
    if reduction == "mean" and target.differentiable:  # the mean over the batch is PyTorch's own
        a, b = (torch.rand(s.shape, dtype=torch.float64) for s in (x, target))
        torch.testing.assert_close(reference(a, b).mean(), REAL[fn](a, b, reduction="mean"))


def test_labels() -> None:
    tokens = TensorSpec((12, 50), ("n", "c"), units=(3, 1))  # (n, s) merged
    ids = TensorSpec((12,), ("n",), "int64", units=(3,))
    assert Loss("cross_entropy").output(tokens, ids) == TensorSpec((12,), ("n",), units=(3,))
    image = TensorSpec((2, 5, 4, 4), IMAGES[2])
    classes = TensorSpec((2, 4, 4), ("n", "h", "w"), "int64")
    assert Loss("nll", "none").output(image, classes) == TensorSpec((2, 4, 4), ("n", "h", "w"))
    assert Loss("mse").output(image, image) == TensorSpec((2,), ("n",))


@pytest.mark.parametrize("fn", ["cross_entropy", "nll", "mse"])
def test_targets_that_do_not_fit(fn: str) -> None:
    x = TensorSpec((2, 5, 4), IMAGES[1])
    with pytest.raises(LayerwiseError, match=r"prediction \(n=2, c=5, l=4\) does not fit a target \(n=2, l=5\)"):
        Loss(fn).output(x, TensorSpec((2, 5), ("n", "l")))


@pytest.mark.parametrize("weighted", [False, True])
def test_more_positions_than_16_bits_can_count(weighted: bool) -> None:
    """float16 ends at 65504: the mean of more targets is one nevertheless."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 300, 300, generator=generator).half()
    target = torch.randint(0, 2, (1, 300, 300), generator=generator)
    weights = [torch.tensor([1.0, 2.0]).half()] if weighted else []
    op = Loss("cross_entropy", weighted=("weight",) * weighted)
    labels = {4: IMAGES[2], 3: ("n", "h", "w"), 1: (None,)}
    specs = [TensorSpec(tuple(t.shape), labels[t.dim()], str(t.dtype)[6:]) for t in (x, target, *weights)]
    whole = Box((0,), (1,))
    needs = tuple(Box((0,) * t.dim(), tuple(t.shape)) for t in (x, target, *weights))
    local = Local(space(op, tuple(specs)), tuple(specs), whole, needs)
    wanted = F.cross_entropy(x.float(), target, *(w.float() for w in weights))
    torch.testing.assert_close(op.run(local, [x, target, *weights], {}).float(), wanted[None], rtol=2e-3, atol=0)
