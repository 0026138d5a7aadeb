"""Kernels of reductions and losses: cells make the whole, both ways."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from layerwise.errors import LayerwiseError
from layerwise.ops.base import space
from layerwise.ops.nn.loss import Loss, LossSum
from layerwise.ops.tensor.reduce import PartialReduce, Reduce
from layerwise.tensor import TensorSpec
from tests.ops.harness import images, values
from tests.ops.kernels import check_kernel, degrees
from tests.ops.nn.test_loss import REAL as LOSSES
from tests.ops.tensor.test_reduce import REAL as REDUCTIONS
from tests.ops.tensor.test_reduce import run as reduced
from tests.ops.whole import check_identical, whole


@given(st.data())
def test_reduce(data: st.DataObject) -> None:
    x = data.draw(images(ranks=(0, 3), low=1, high=4))
    rank = len(x.shape)
    dims = data.draw(st.lists(st.integers(0, rank - 1), min_size=1, max_size=rank, unique=True))
    dims = [d - rank if data.draw(st.booleans()) else d for d in dims]
    op = Reduce(data.draw(st.sampled_from([*REDUCTIONS, "prod"])), tuple(dims), data.draw(st.booleans()))  # type: ignore[arg-type]
    check_kernel(op, [x], data.draw(degrees(space(op, (x,)))), lambda t: reduced(op, t))


@given(st.data())
def test_partial_reduce(data: st.DataObject) -> None:
    """What is divided can be split between parts, and the parts' numbers give the whole's."""
    x = data.draw(images(ranks=(0, 3), low=1, high=3))
    x = replace(x, shape=(*x.shape[:1], *(2 * extent for extent in x.shape[1:])))
    dims = tuple(data.draw(st.lists(st.integers(1, len(x.shape) - 1), min_size=1, unique=True)))
    parts = tuple(data.draw(st.sampled_from([1, x.shape[d] // 2, x.shape[d]])) for d in dims)
    op = PartialReduce(data.draw(st.sampled_from(["mean", "sum", "prod", "norm2"])), dims, parts)  # type: ignore[arg-type]

    def reference(t: Tensor) -> Tensor:
        for d, count in zip(dims, parts, strict=True):
            pieces = t.chunk(count, d)
            t = torch.cat([reduced(Reduce(op.mode, (d,), keepdim=True), p) for p in pieces], d)
        return t

    check_kernel(op, [x], data.draw(degrees(space(op, (x,)))), reference)
    (t,) = values([x])
    rest = Reduce(op.mode, dims)
    torch.testing.assert_close(reduced(rest, reference(t)), reduced(rest, t))


def test_parts_must_divide() -> None:
    with pytest.raises(LayerwiseError, match=r"dimension 1 of \(n=2, l=9\) cannot be divided into 4 equal parts"):
        PartialReduce("sum", (1,), (4,)).output(TensorSpec((2, 9), ("n", "l")))


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


WEIGHED = {
    "classes": ("cross_entropy", (), ("weight",), [(3,)]),
    "classes smoothed": ("cross_entropy", (("label_smoothing", 0.1),), ("weight",), [(3,)]),
    "classes, some ignored": ("cross_entropy", (("ignore_index", 1),), ("weight",), [(3,)]),
    "nll": ("nll", (), ("weight",), [(3,)]),
    "elements": ("bce_logits", (), ("weight", "pos_weight"), [(4, 1, 4, 6), (3, 1, 1)]),
}


@pytest.mark.parametrize("name", WEIGHED)
@pytest.mark.parametrize("parts", [(), (2, 3)])
def test_weights_and_parts(name: str, parts: tuple[int, ...]) -> None:
    """The mean over all samples is PyTorch's, whatever is split."""
    fn, arguments, weighted, shapes = WEIGHED[name]
    x = TensorSpec((4, 3, 4, 6), ("n", "c", "h", "w"))
    classes = fn != "bce_logits"
    target = TensorSpec((4, 4, 6), ("n", "h", "w"), "int64") if classes else x
    parts = parts if classes else parts and (1, *parts)
    weights = [TensorSpec(shape, (None,) * len(shape)) for shape in shapes]
    op = Loss(fn, "mean", arguments, weighted, parts)  # type: ignore[arg-type]
    inputs = [x, target, *weights]
    a, b, *w = (t.abs() if i > 1 else t for i, t in enumerate(values(inputs)))
    w = [t.detach() for t in w]
    real = LOSSES[fn] if classes else F.binary_cross_entropy_with_logits
    kinds = {k: TYPES.get(k, float)(v) for k, v in arguments}

    def reference(p: Tensor, t: Tensor, *given: Tensor) -> Tensor:
        named = {k: t.detach() for k, t in zip(weighted, given, strict=True)}
        each = real(p, t, reduction="none", **kinds, **named)
        whole_of = real(p, t, **kinds, **named)
        total = each * (whole_of.detach() / each.sum().detach()) * len(p)  # those of positions, which mean to the loss
        return total.flatten(1).sum(1) if not parts else _by_part(total, parts)

    check_kernel(op, inputs, (2, *(1,) * (len(parts) - 1), *(3,)[: len(parts)]), reference, inputs=[a, b, *w])
    made = op.run(whole(op, inputs), [a, b, *w], {})
    taken = LossSum("mean").run(whole(LossSum(), [op.output(*inputs)]), [made], {}) if parts else made
    torch.testing.assert_close(taken.mean(), real(a, b, **kinds, **dict(zip(weighted, w, strict=True))))


def _by_part(t: Tensor, parts: tuple[int, ...]) -> Tensor:
    for d, count in enumerate(parts, start=1):
        t = torch.stack([p.sum(d) for p in t.chunk(count, d)], d)
    return t


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
