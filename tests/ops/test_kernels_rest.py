"""Kernels of reductions and losses: cells make the whole, both ways."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from layerwise.ops.base import space
from layerwise.ops.loss import Loss
from layerwise.ops.reduce import Reduce
from layerwise.tensor import TensorSpec
from tests.ops.harness import images, values
from tests.ops.kernels import check_kernel, degrees
from tests.ops.test_loss import REAL as LOSSES
from tests.ops.test_reduce import REAL as REDUCTIONS
from tests.ops.test_reduce import run as reduced
from tests.ops.whole import check_identical, whole


@given(st.data())
def test_reduce(data: st.DataObject) -> None:
    x = data.draw(images(ranks=(0, 3), low=1, high=4))
    rank = len(x.shape)
    dims = data.draw(st.lists(st.integers(0, rank - 1), min_size=1, max_size=rank, unique=True))
    dims = [d - rank if data.draw(st.booleans()) else d for d in dims]
    op = Reduce(data.draw(st.sampled_from([*REDUCTIONS, "prod"])), tuple(dims), data.draw(st.booleans()))  # type: ignore[arg-type]
    check_kernel(op, [x], data.draw(degrees(space(op, (x,)))), lambda t: reduced(op, t))


def test_the_norm_of_nothing_has_no_slope() -> None:
    x, op = TensorSpec((2, 3), ("n", "c")), Reduce("norm2", (1,))
    t = torch.zeros(2, 3).requires_grad_()
    op.run(whole(op, [x]), [t], {}).sum().backward()  # type: ignore[no-untyped-call]
    assert t.grad is not None
    assert torch.equal(t.grad, torch.zeros(2, 3))


@pytest.mark.parametrize("mode", ["sum", "prod", "max", "min"])
@pytest.mark.parametrize("dtype", ["bool", "int32", "int64", "float32"])
def test_types_are_those_that_are_planned(mode: str, dtype: str) -> None:
    op, x = Reduce(mode, (0, -1)), TensorSpec((2, 3, 2), ("n", "c", "l"), dtype)  # type: ignore[arg-type]
    t = torch.tensor([[1, 0], [1, 1], [0, 1]]).expand(2, 3, 2).to(getattr(torch, dtype))
    out = op.run(whole(op, [x]), [t], {})
    assert str(out.dtype) == f"torch.{op.output(x).dtype}"
    wanted = t.double()
    assert torch.equal(out.double(), reduced(op, wanted))


TYPES: dict[str, type] = {"ignore_index": int, "log_target": bool}
ARGUMENTS = {
    "cross_entropy": [(), (("label_smoothing", 0.1),), (("ignore_index", 99),)],
    "nll": [(), (("ignore_index", 99.0),)],
    "smooth_l1": [(), (("beta", 0.5),)],
    "kl": [(), (("log_target", 1),)],
}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@given(st.data())
def test_loss(data: st.DataObject) -> None:
    fn = data.draw(st.sampled_from(sorted(LOSSES)))
    reduction = data.draw(st.sampled_from(["mean", "sum", "none", "batchmean"]))
    arguments = data.draw(st.sampled_from(ARGUMENTS.get(fn, [()])))
    op = Loss(fn, reduction, arguments)  # type: ignore[arg-type]
    x = data.draw(images(ranks=(0, 2), low=1, high=4, block=3))
    target = x
    if fn == "nll" or (fn == "cross_entropy" and data.draw(st.booleans())):
        target = TensorSpec((x.shape[0], *x.shape[2:]), (x.dims[0], *x.dims[2:]), "int64")
    elif arguments == (("ignore_index", 99),):
        op, arguments = Loss(fn, reduction), ()  # type: ignore[arg-type]
    a, b = values([x, target])
    if fn == "bce":
        a, b = a.sigmoid(), b.sigmoid()
    if fn == "kl":
        b = b.abs()
    real = {"bce": F.binary_cross_entropy, "kl": F.kl_div}.get(fn, LOSSES[fn])

    def reference(p: Tensor, t: Tensor) -> Tensor:
        losses: Tensor = real(p, t, reduction="none", **{k: TYPES.get(k, float)(v) for k, v in arguments})
        rows = losses.reshape(len(losses), -1)
        return losses if reduction == "none" else rows.mean(1) if reduction == "mean" else rows.sum(1)

    check_kernel(op, [x, target], data.draw(degrees(space(op, (x, target)))), reference, inputs=[a, b])


def test_tokens_merged_with_samples() -> None:
    x, target = TensorSpec((12, 5), ("n", "c"), units=(3, 1)), TensorSpec((12,), ("n",), "int64", units=(3,))
    check_kernel(Loss("cross_entropy"), [x, target], (4,), lambda a, b: F.cross_entropy(a, b, reduction="none"))


@pytest.mark.parametrize("fn", ["cross_entropy", "nll"])
@pytest.mark.parametrize("arguments", [(), (("ignore_index", 2),)])
def test_ignored_targets(fn: str, arguments: tuple[tuple[str, float], ...]) -> None:
    """A mean is over what is left, wherever it lies; a sum, and what is not reduced, is PyTorch's."""
    x, target = TensorSpec((4, 3, 2), ("n", "c", "l")), TensorSpec((4, 2), ("n", "l"), "int64")
    a = torch.randn(x.shape, dtype=torch.float64)
    b = torch.tensor([[0, 1], [1, 0], [0, 0], [1, 1]])
    ignored = int(dict(arguments).get("ignore_index", -100))
    real = {"cross_entropy": F.cross_entropy, "nll": F.nll_loss}[fn]
    mean = Loss(fn, "mean", arguments)  # type: ignore[arg-type]
    at = whole(mean, [x, target])
    torch.testing.assert_close(mean.run(at, [a, b], {}).mean(), real(a, b, ignore_index=ignored))
    b[1, 0] = b[3, 0] = b[3, 1] = ignored
    torch.testing.assert_close(mean.run(at, [a, b], {}).mean(), real(a, b, ignore_index=ignored))

    def reference(p: Tensor, t: Tensor) -> Tensor:
        each: Tensor = real(p, t, ignore_index=ignored, reduction="none")
        return each.sum(1) * len(p) / (t != ignored).sum()

    for cuts in range(1, 5):  # some cells have nothing that counts
        check_kernel(mean, [x, target], (cuts,), reference, inputs=[a, b])
    total = Loss(fn, "sum", arguments)  # type: ignore[arg-type]
    out = total.run(whole(total, [x, target]), [a, b], {})
    torch.testing.assert_close(out.sum(), real(a, b, ignore_index=ignored, reduction="sum"))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_one_device_calls_pytorchs_own(reduction: str) -> None:
    x, target = TensorSpec((8, 3), ("n", "c")), TensorSpec((8,), ("n",), "int64")
    op = Loss("cross_entropy", reduction)  # type: ignore[arg-type]
    check_identical(op, [x, target], lambda a, b: F.cross_entropy(a, b, reduction="none"))
    pooled = TensorSpec((4, 6, 5, 7), ("n", "c", "h", "w"))
    check_identical(Reduce("mean", (2, 3)), [pooled], lambda t: t.mean((2, 3)))
