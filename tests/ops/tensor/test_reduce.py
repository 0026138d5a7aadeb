"""Reductions, softmax, sums along a dimension, losses: what they need, and that cells make the whole."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
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
from layerwise.ops.nn.loss import Loss, LossSum
from layerwise.ops.tensor.along import Cumsum, Gather, OneHot, Positions, Scatter, Softmax, Take
from layerwise.ops.tensor.reduce import PartialReduce, Reduce
from layerwise.tensor import TensorSpec
from tests.ops.harness import IMAGES, cells, check_identical, check_needs, images, values, whole
from tests.ops.kernels import check_kernel, check_split, degrees

REAL = {
    "mean": torch.mean,
    "sum": torch.sum,
    "max": torch.amax,
    "min": torch.amin,
    "norm2": lambda t, dims, keep: torch.linalg.vector_norm(t, 2, dims, keep),
}


def run(op: Reduce, t: Tensor) -> Tensor:
    if op.mode != "prod":
        return REAL[op.mode](t, op.dims, op.keepdim)
    for dim in sorted((d % t.ndim for d in op.dims), reverse=True):
        t = t.prod(dim, op.keepdim)
    return t


def test_labels() -> None:
    x = TensorSpec((4, 6, 5, 5), ("n", "c", "h", "w"), units=(1, 2, 1, 1))
    assert Reduce("mean", (2, 3)).output(x) == TensorSpec((4, 6), ("n", "c"), units=(1, 2))
    assert Reduce("mean", (-1, -2), True).output(x) == TensorSpec((4, 6, 1, 1), x.dims, units=x.units)
    assert Reduce("sum", (0, 1), True).output(x).dims == (None, "c", "h", "w")
    assert Reduce("sum", (0, 1, 2, 3)).output(x).shape == ()
    assert math.prod(Reduce("sum", (1,), True).output(x).units) == 1


@given(st.data())
def test_softmax(data: st.DataObject) -> None:
    x = data.draw(images(ranks=(0, 3), low=2, high=5))
    dim = data.draw(st.integers(-len(x.shape), len(x.shape) - 1).filter(lambda d: x.shape[d] > 1))
    op = Softmax(dim, data.draw(st.booleans()))
    where = space(op, (x,))
    assert where.dims[dim].max_degree == 1
    assert where.out == x
    f = F.log_softmax if op.log else F.softmax
    check_split(data, op, [x], lambda t: f(t, dim))


@given(st.data())
def test_cumsum(data: st.DataObject) -> None:
    x = data.draw(images(ranks=(0, 2), low=2, high=4))
    dim = data.draw(st.integers(-len(x.shape), len(x.shape) - 1))
    op = Cumsum(dim)
    where = space(op, (x,))
    assert where.dims[dim].max_degree == 1
    check_split(data, op, [x], lambda t: t.cumsum(dim), tight=False)


def test_cumsum_of_integers_is_wide() -> None:
    assert Cumsum(1).output(TensorSpec((2, 3), ("n", "s"), "int32")).dtype == "int64"


@given(st.data())
def test_gather(data: st.DataObject) -> None:
    x = data.draw(images(ranks=(0, 2), low=2, high=4))
    dim = data.draw(st.integers(0, len(x.shape) - 1))
    taken = data.draw(st.integers(1, 5))
    dims = tuple(None if i == dim else d for i, d in enumerate(x.dims))
    index = TensorSpec((*x.shape[:dim], taken, *x.shape[dim + 1 :]), dims, "int64")
    op, extent = Gather(dim, wraps=data.draw(st.booleans())), x.shape[dim]
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(-extent if op.wraps else 0, extent, index.shape, generator=generator)
    inputs = [*values([x]), places]

    def gather(t: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return t.gather(dim, at % extent)

    check_kernel(op, [x, index], data.draw(degrees(space(op, (x, index)))), gather, inputs=inputs)


@given(st.data())
def test_take(data: st.DataObject) -> None:
    x = data.draw(images(ranks=(0, 2), low=2, high=4))
    dim = data.draw(st.integers(0, len(x.shape) - 1))
    extents = data.draw(st.lists(st.integers(1, 4), max_size=2))
    index = TensorSpec(tuple(extents), (None, "s")[2 - len(extents) :], "int64")
    op = Take(dim)
    where, count = space(op, (x, index)), x.shape[dim]
    places = torch.randint(-count, count, index.shape, generator=torch.Generator().manual_seed(0))

    def take(t: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return t[(slice(None),) * dim + (at,)]

    check_kernel(op, [x, index], data.draw(degrees(where)), take, inputs=[*values([x]), places])


def test_positions_in_several_dimensions() -> None:
    index, op = TensorSpec((2, 2, 2), ("n", "s", None), "int64"), Positions((3, 5))
    places = torch.tensor([[[0, 4], [2, -1]], [[-3, 0], [1, -5]]])
    flat = torch.tensor([[4, 14], [0, 5]])
    check_kernel(op, [index], [2, 2], lambda _: flat, inputs=[places])


@pytest.mark.parametrize("at", [[0, 5], [0, -6], [3, 0]])
def test_a_position_that_a_dimension_has_not(at: list[int]) -> None:
    """Though there is one in the tensor, in the next row."""
    op, index = Positions((3, 5)), TensorSpec((1, 2), ("n", None), "int64")
    with pytest.raises(LayerwiseError, match="a position is out of range 0 to"):
        op.run(whole(op, [index]), [torch.tensor([at])], {})


NAMES = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}  # of PyTorch


@given(st.data())
def test_one_hot(data: st.DataObject) -> None:
    x = data.draw(images(ranks=(0, 2), low=2, high=4))
    dim = data.draw(st.integers(1, len(x.shape) - 1))
    index = TensorSpec((*x.shape[:dim], 1, *x.shape[dim + 1 :]), x.dims, "int64")
    op = OneHot(dim, 3, "float64", on=0.5)
    check_kernel(
        op,
        [index],
        data.draw(degrees(space(op, (index,)))),
        lambda t: 0.5 * F.one_hot(t.squeeze(dim), 3).movedim(-1, dim).double(),
    )


@pytest.mark.parametrize("given_class", [-1, 3])
def test_a_class_that_there_is_not(given_class: int) -> None:
    index, op = TensorSpec((2, 1), ("n", "c"), "int64"), OneHot(1, 3, "float32")
    with pytest.raises(LayerwiseError, match=f"a position is out of range 0 to 2: .*{given_class}"):
        op.run(whole(op, [index]), [torch.tensor([[1], [given_class]])], {})


@given(st.data())
def test_scatter(data: st.DataObject) -> None:
    x = data.draw(images(ranks=(0, 2), low=2, high=4))
    dim = data.draw(st.integers(0, len(x.shape) - 1))
    written = data.draw(st.integers(1, x.shape[dim]))
    shape = (*x.shape[:dim], written, *x.shape[dim + 1 :])
    dims = tuple(None if i == dim else d for i, d in enumerate(x.dims))
    order = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)).argsort(dim)  # no position twice
    mode = data.draw(st.sampled_from(["write", "value", *NAMES]))
    places = order.narrow(dim, 0, written) // (2 if mode in NAMES else 1)  # but there
    index, source = TensorSpec(shape, dims, "int64"), TensorSpec(shape, dims)
    op = Scatter(dim, value=2.5) if mode == "value" else Scatter(dim, mode)  # type: ignore[arg-type]
    specs = [x, index] if mode == "value" else [x, index, source]

    def reference(t: Tensor, at: Tensor, *given: Tensor) -> Tensor:
        if not given:
            return t.scatter(dim, at, 2.5)
        return t.scatter_reduce(dim, at, *given, NAMES[mode]) if mode in NAMES else t.scatter(dim, at, *given)

    a, *rest = values([x, source][: len(specs) - 1])
    check_kernel(op, specs, data.draw(degrees(space(op, tuple(specs)))), reference, inputs=[a, places, *rest])


LOSSES = {
    "cross_entropy": F.cross_entropy,
    "nll": F.nll_loss,
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": F.smooth_l1_loss,
    "bce": lambda x, t, reduction: F.binary_cross_entropy(x.sigmoid(), t.sigmoid(), reduction=reduction),
    "bce_logits": F.binary_cross_entropy_with_logits,
    "kl": lambda x, t, reduction: F.kl_div(x, t.abs(), reduction=reduction),
}


def test_labels_of_losses() -> None:
    tokens = TensorSpec((12, 50), ("n", "c"), units=(3, 1))  # (n, s) merged
    ids = TensorSpec((12,), ("n",), "int64", units=(3,))
    assert Loss("cross_entropy").output(tokens, ids) == TensorSpec((12,), ("n",), units=(3,))
    image = TensorSpec((2, 5, 4, 4), IMAGES[2])
    classes = TensorSpec((2, 4, 4), ("n", "h", "w"), "int64")
    assert Loss("nll", "none").output(image, classes) == TensorSpec((2, 4, 4), ("n", "h", "w"))
    assert Loss("mse").output(image, image) == TensorSpec((2,), ("n",))


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


@given(st.data())
def test_reduce(data: st.DataObject) -> None:
    x = data.draw(images(ranks=(0, 3), low=1, high=4))
    rank = len(x.shape)
    dims = data.draw(st.lists(st.integers(0, rank - 1), min_size=1, max_size=rank, unique=True))
    dims = [d - rank if data.draw(st.booleans()) else d for d in dims]
    mode = data.draw(st.sampled_from([*REAL, "prod"]))
    op = Reduce(mode, tuple(dims), data.draw(st.booleans()))
    several = x.volume > op.output(x).volume  # the norm of one number has a slope of one sign, its extreme no choice
    check_split(data, op, [x], lambda t: run(op, t), tight=mode not in ("max", "min") and several)
    assert op.flops((x,), np.array(op.output(x).shape)) == x.volume * (2 if mode == "norm2" else 1)


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
            t = torch.cat([run(Reduce(op.mode, (d,), keepdim=True), p) for p in pieces], d)
        return t

    check_kernel(op, [x], data.draw(degrees(space(op, (x,)))), reference)
    (t,) = values([x])
    rest = Reduce(op.mode, dims)
    torch.testing.assert_close(run(rest, reference(t)), run(rest, t))


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
    assert torch.equal(out.double(), run(op, wanted))


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
    plain = {"bce": F.binary_cross_entropy, "kl": F.kl_div}.get(fn, LOSSES[fn])
    named = {k: TYPES.get(k, float)(v) for k, v in arguments}

    def reference(p: Tensor, t: Tensor, real: Callable[..., Tensor] = plain) -> Tensor:
        losses = real(p, t, reduction="none", **named)
        rows = losses.reshape(len(losses), -1)
        return losses if reduction == "none" else rows.mean(1) if reduction == "mean" else rows.sum(1)

    where = space(op, (x, target))
    check_kernel(op, [x, target], data.draw(degrees(where)), reference, inputs=[a, b])
    if not arguments and min(x.shape) > 1:
        check_needs(op, [x, target], data.draw(cells(where)), partial(reference, real=LOSSES[fn]), poison=0.5)
    if reduction == "mean" and target.differentiable:  # the mean over the batch is PyTorch's own
        torch.testing.assert_close(reference(a, b).mean(), plain(a, b, reduction="mean", **named))


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
