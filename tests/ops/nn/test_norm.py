"""Norms need what the real ones touch; cells that share statistics make the whole, with what they are said to send."""

from collections.abc import Callable
from math import prod

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from benchmarks.common.live import Live
from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.ops.base import Op, space
from layerwise.ops.facts import Local, Statistics
from layerwise.ops.fused import needed_box
from layerwise.ops.nn.norm import BatchNorm, GroupNorm, InstanceNorm, LayerNorm, LocalResponseNorm, RMSNorm
from layerwise.ops.tensor.along import Softmax
from layerwise.tensor import TensorSpec
from tests.ops.harness import IMAGES, cells, check_identical, each, images, parameters, values, whole
from tests.ops.kernels import check_kernel, check_split, degrees


@pytest.mark.parametrize("op", [BatchNorm(), BatchNorm(False), GroupNorm(2), InstanceNorm(), InstanceNorm(True)])
@given(st.data())
def test_norms_need_their_own_box(op: BatchNorm | GroupNorm | InstanceNorm, data: st.DataObject) -> None:
    """Of the input; of a parameter its channels. Statistics are exchanged, which is tested below."""
    x = data.draw(images(ranks=(0, 3), low=2, high=5, block=2))
    x = TensorSpec((x.shape[0], 4, *x.shape[2:]), x.dims)
    where = space(op, (x,))
    assert where.dims[1].max_degree == (2 if isinstance(op, GroupNorm) else 4)
    cell = data.draw(cells(where))
    assert [needed_box(m, cell) for m in where.needs] == [cell]
    assert all(needed_box(p.maps, cell) == Box(cell.lo[1:2], cell.hi[1:2]) for p in where.parameters)
    trained = [p.name for p in where.parameters if p.trainable]
    assert trained == ["weight", "bias"] * op.affine


def test_statistics_only_over_what_can_be_split() -> None:
    x = TensorSpec((2, 4, 6, 6), ("n", "c", None, "w"))
    assert BatchNorm().statistics((x,), x) == Statistics((0, 3), (1,), 2)
    assert GroupNorm(2).statistics((x,), x) == Statistics((3,), (0, 1), 2, 2)
    assert InstanceNorm().statistics((x,), x) == Statistics((3,), (0, 1), 2)
    flat = TensorSpec((2, 4), ("n", "c"))
    assert BatchNorm().statistics((flat,), flat) == Statistics((0,), (1,), 2)
    assert GroupNorm(2).statistics((flat,), flat) is None
    merged = TensorSpec((2, 12, 3), ("n", "c", "l"), units=(1, 2, 1))
    assert GroupNorm(4).output(merged).units == (1, 6, 1)


def test_merged_channels_have_no_window() -> None:
    merged = TensorSpec((2, 12, 3), ("n", "c", "l"), units=(1, 2, 1))
    out = LocalResponseNorm(5).output(merged)
    assert (out.dims, out.units) == (("n", None, "l"), (1, 1, 1))


def held(op: Op, x: TensorSpec) -> dict[str, Tensor]:
    """Random parameters, but variances are positive."""
    return {k: t.square() + 0.1 if k == "running_var" else t for k, t in parameters(space(op, (x,))).items()}


def batch_norm(op: BatchNorm, training: bool) -> Callable[..., Tensor]:
    def reference(
        x: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None, **p: Tensor
    ) -> Tensor:
        own = training or not op.track
        return F.batch_norm(x, running_mean, running_var, **p, training=own, momentum=op.momentum or 0.0, eps=op.eps)

    return reference


@given(st.data())
def test_batch_norm(data: st.DataObject) -> None:
    """Outputs, gradients and running statistics, in training and in evaluation."""
    x = data.draw(images(ranks=(0, 3), low=1, high=5))
    if prod(x.shape) == x.shape[1]:
        x = TensorSpec((2, *x.shape[1:]), x.dims)
    affine, track, training = (data.draw(st.booleans()) for _ in range(3))
    op = BatchNorm(affine, 1e-3, data.draw(st.sampled_from([0.1, 0.7, 1.0])), track)
    cuts = data.draw(degrees(space(op, (x,))))
    check_kernel(op, [x], cuts, batch_norm(op, training), parameters=held(op, x), training=training)


@given(st.data())
def test_batch_norm_of_merged_channels(data: st.DataObject) -> None:
    """And of a dimension that cannot be cut, over which nothing is exchanged."""
    unit = data.draw(st.integers(1, 3))
    x = TensorSpec((3, 4 * unit, 5, 2), ("n", "c", "h", None), units=(1, unit, 1, 1))
    op = BatchNorm()
    cuts = data.draw(degrees(space(op, (x,))))
    check_kernel(op, [x], cuts, batch_norm(op, True), parameters=held(op, x))


@given(st.data())
def test_group_norm(data: st.DataObject) -> None:
    block, groups = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    rank = data.draw(st.integers(1, 3))
    x = TensorSpec((data.draw(st.integers(1, 3)), block * groups, *each(data.draw, rank, 2, 5)), IMAGES[rank])
    op = GroupNorm(groups, data.draw(st.booleans()), 1e-3)
    cuts = data.draw(degrees(space(op, (x,))))
    check_kernel(op, [x], cuts, lambda t, **p: F.group_norm(t, groups, **p, eps=op.eps))


def test_group_norm_of_groups_of_one_number() -> None:
    """PyTorch refuses a sample whose groups have one number each, and takes several: then a cell may have one."""
    x = TensorSpec((3, 2, 1), IMAGES[1])
    check_kernel(GroupNorm(2), [x], (3, 1, 1), lambda t, **p: F.group_norm(t, 2, **p))


@given(st.data())
def test_instance_norm(data: st.DataObject) -> None:
    x = data.draw(images(low=2, high=5))
    affine, track, training = (data.draw(st.booleans()) for _ in range(3))
    op = InstanceNorm(affine, 1e-3, track, 0.3)
    cuts = data.draw(degrees(space(op, (x,))))

    def reference(
        t: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None, **p: Tensor
    ) -> Tensor:
        own = training or not track
        return F.instance_norm(t, running_mean, running_var, **p, use_input_stats=own, momentum=0.3, eps=op.eps)

    check_kernel(op, [x], cuts, reference, parameters=held(op, x), training=training)


def test_cumulative_averages_are_refused() -> None:
    x = TensorSpec((4, 3, 6), IMAGES[1])
    op = BatchNorm(momentum=None)
    with pytest.raises(LayerwiseError, match="momentum"):
        op.run(whole(op, [x]), [torch.rand(x.shape)], held(op, x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "op",
    [BatchNorm(), BatchNorm(False, track=False), GroupNorm(2), GroupNorm(4, False), InstanceNorm(True, track=True)],
)
@pytest.mark.parametrize("shape", [(4, 8, 6, 6), (2, 8, 4, 4)])
def test_what_is_sent(op: Op, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """One all-reduce forward, one backward, of the numbers a key that planning counts; back in float32 at least."""
    x = TensorSpec(shape, IMAGES[2])
    statistics = op.statistics((x,), op.output(x))
    assert statistics is not None
    sent: list[Tensor] = []

    def all_reduce(t: Tensor) -> Tensor:
        sent.append(t.clone())
        return t.mul_(2)  # as of two equal devices: theirs may be overwritten

    own = tuple(s // 2 if i in statistics.over[-1:] else s for i, s in enumerate(shape))
    box = Box((0,) * 4, own)
    at = Local(space(op, (x,)), (x,), box, (box,), True, all_reduce)
    t = torch.rand(own).to(dtype).requires_grad_()
    out = op.run(at, [t], {k: v.to(dtype) for k, v in held(op, x).items()})
    keys = prod(own[i] for i in statistics.keys) // statistics.block
    exact = torch.promote_types(dtype, torch.float32)
    assert [(s.numel(), s.dtype) for s in sent] == [(statistics.per_key * keys, torch.float64)]
    assert out.dtype == dtype
    out.backward(torch.rand_like(out))  # type: ignore[no-untyped-call]
    assert [(s.numel(), s.dtype) for s in sent] == [(statistics.per_key * keys, t) for t in (torch.float64, exact)]
    assert statistics.item_bytes(dtype.itemsize) == tuple(s.dtype.itemsize for s in sent)


@pytest.mark.parametrize("op", [BatchNorm(), BatchNorm(False), GroupNorm(2), InstanceNorm(True), InstanceNorm()])
def test_nothing_is_sent_back_for_an_input(op: Op) -> None:
    """Whose gradient nobody wants; the weights' are there all the same."""
    x, sent = TensorSpec((4, 8, 6, 6), IMAGES[2]), []

    def all_reduce(t: Tensor) -> Tensor:
        sent.append(t)
        return t.mul(2)

    box = Box((0,) * 4, (4, 8, 6, 3))
    at = Local(space(op, (x,)), (x,), box, (box,), True, all_reduce)
    weights = {k: v.requires_grad_("running" not in k) for k, v in held(op, x).items()}
    out = op.run(at, [torch.rand(4, 8, 6, 3).double()], weights)
    if out.requires_grad:
        out.square().sum().backward()  # type: ignore[no-untyped-call]
    assert len(sent) == 1
    assert all(v.grad is not None and bool(v.grad.any()) for v in weights.values() if v.requires_grad)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_sixteen_bits(weights: torch.dtype) -> None:
    """Shared statistics are no worse than PyTorch's own, also with parameters in float32 (autocast)."""
    x = TensorSpec((4, 8, 16, 16), IMAGES[2])
    op, g = BatchNorm(), torch.Generator().manual_seed(0)
    t = (torch.randn(x.shape, generator=g) + 3).bfloat16()
    slope = torch.randn(x.shape, generator=g).bfloat16()

    def run(dtype: torch.dtype, weights: torch.dtype, shared: bool) -> list[Tensor]:
        p = {k: v.bfloat16().to(weights) for k, v in held(op, x).items()}
        leaves = [t.to(dtype).clone().requires_grad_(), *(p[k].requires_grad_() for k in ("weight", "bias"))]
        out = op.run(whole(op, [x], all_reduce=(lambda s: s) if shared else None), leaves[:1], p)
        return [out, *torch.autograd.grad(out, leaves, slope.to(dtype)), p["running_mean"], p["running_var"]]

    exact = run(torch.float64, torch.float64, shared=False)
    real, mine = (run(torch.bfloat16, weights, shared) for shared in (False, True))
    for truth, a, b in zip(exact, real, mine, strict=True):
        assert a.dtype == b.dtype
        assert (b - truth).abs().max() <= 1.2 * (a - truth).abs().max() + 1e-3


@pytest.mark.parametrize("op", [BatchNorm(), GroupNorm(2), InstanceNorm(), InstanceNorm(True, track=True)])
@pytest.mark.parametrize("mean", [0, 1000, 10000, -30000])
def test_large_means_do_not_cancel(op: Op, mean: float) -> None:
    """Where the running mean, of a first step or of other data, says nothing of them, or nothing is known."""
    x = TensorSpec((8, 2, 16, 16), IMAGES[2])
    t = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)) + mean
    slope = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))

    def run(dtype: torch.dtype, shared: bool) -> list[Tensor]:
        start = {"weight": torch.ones, "bias": torch.zeros, "running_mean": torch.zeros, "running_var": torch.ones}
        p = {one.name: start[one.name](2, dtype=dtype) for one in op.parameters((x,), x)}
        given = t.to(dtype).requires_grad_()
        out = op.run(whole(op, [x], all_reduce=(lambda s: s) if shared else None), [given], p)
        (gradient,) = torch.autograd.grad(out, given, slope.to(dtype))
        return [out, gradient, *(p[name] for name in ("running_mean", "running_var") if name in p)]

    exact, mine = run(torch.float64, shared=False), run(torch.float32, shared=True)
    for truth, made in zip(exact, mine, strict=True):
        assert (made - truth).abs().max() <= (1e-6 + 2e-7 * abs(mean)) * truth.abs().max()


def test_channels_last() -> None:
    """The layout of the input stays that of the output and of the gradient."""
    x = TensorSpec((4, 8, 6, 6), IMAGES[2])
    op = BatchNorm()
    t = torch.randn(x.shape, dtype=torch.float64).to(memory_format=torch.channels_last).requires_grad_()
    p = held(op, x)
    real = batch_norm(op, True)(t.detach(), **{k: v.clone() for k, v in p.items()})
    out = op.run(whole(op, [x], all_reduce=lambda s: s), [t], p)
    torch.testing.assert_close(out, real)
    out.square().sum().backward()  # type: ignore[no-untyped-call]
    assert t.grad is not None
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert t.grad.is_contiguous(memory_format=torch.channels_last)


@given(st.data())
def test_layer_and_rms_norm(data: st.DataObject) -> None:
    shape = each(data.draw, 4, 2, 5)
    x = TensorSpec(shape, ("n", "s", "h", "c"))
    rank, weight, bias = data.draw(st.integers(1, 3)), data.draw(st.booleans()), data.draw(st.booleans())
    normal = data.draw(st.booleans())
    op: Op = (
        LayerNorm(rank, weight, bias, 1e-3)
        if normal
        else RMSNorm(rank, weight, data.draw(st.sampled_from([None, 1e-3])))
    )

    def reference(t: Tensor, **p: Tensor) -> Tensor:
        if isinstance(op, RMSNorm):
            return F.rms_norm(t, shape[-rank:], **p, eps=op.eps)
        return F.layer_norm(t, shape[-rank:], **p, eps=1e-3)

    where = space(op, (x,))
    assert [d.label for d in where.dims] == [*x.dims[:-rank], *[None] * rank]
    assert where.out == x
    check_split(data, op, [x], reference, tight=min(shape) > 2)  # of two numbers the norm hardly depends on either


@given(st.data())
def test_local_response_norm(data: st.DataObject) -> None:
    """Of even sizes as PyTorch has them and as ONNX has them."""
    x = data.draw(images(ranks=(0, 3), low=1, high=3, block=2))
    size = data.draw(st.integers(1, 6))
    before = data.draw(st.sampled_from([None, (size - 1) // 2, 0]))
    op = LocalResponseNorm(size, 0.5, 0.75, 1.5, before)
    first = size // 2 if before is None else before

    def reference(t: Tensor) -> Tensor:
        padded = F.pad(t.square(), (0,) * (2 * t.ndim - 4) + (first, size - 1 - first))
        return t / (op.k + op.alpha * padded.unfold(1, size, 1).mean(-1)) ** op.beta

    check_split(data, op, [x], reference)
    if before is None and len(x.shape) > 2:
        (t,) = values([x])
        torch.testing.assert_close(reference(t), F.local_response_norm(t, size, op.alpha, op.beta, op.k))


IMAGE = TensorSpec((4, 6, 5, 7), IMAGES[2])
TOKENS = TensorSpec((4, 6, 8), ("n", "s", "c"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("op", "x", "reference"),
    [
        (BatchNorm(), IMAGE, None),
        (BatchNorm(False, 1e-4, 0.3, False), IMAGE, None),
        (GroupNorm(3), IMAGE, lambda t, **p: F.group_norm(t, 3, **p)),
        (InstanceNorm(True), IMAGE, lambda t, **p: F.instance_norm(t, **p)),
        (LayerNorm(1), TOKENS, lambda t, **p: F.layer_norm(t, (8,), **p)),
        (RMSNorm(2), TOKENS, lambda t, **p: F.rms_norm(t, (6, 8), **p)),
        (LocalResponseNorm(5), IMAGE, lambda t: F.local_response_norm(t, 5)),
        (Softmax(1), IMAGE, lambda t: t.softmax(1)),
        (Softmax(-1, True), IMAGE, lambda t: t.log_softmax(-1)),
    ],
)
def test_one_device_calls_pytorchs_own(
    op: Op, x: TensorSpec, reference: Callable[..., Tensor] | None, training: bool, dtype: torch.dtype
) -> None:
    if isinstance(op, BatchNorm):
        reference = batch_norm(op, training)
    assert reference is not None
    if isinstance(op, LocalResponseNorm) and dtype == torch.bfloat16:
        pytest.skip("PyTorch has none of these on a CPU")
    check_identical(op, [x], reference, training=training, dtype=dtype)


@pytest.mark.parametrize(
    ("op", "layer"),
    [
        (BatchNorm(), nn.BatchNorm2d(6)),
        (GroupNorm(2), nn.GroupNorm(2, 6)),
        (InstanceNorm(True, track=True), nn.InstanceNorm2d(6, affine=True, track_running_stats=True)),
        (LayerNorm(2), nn.LayerNorm((5, 7))),
        (RMSNorm(1), nn.RMSNorm(7)),
    ],
)
def test_initial_values_are_pytorchs(op: Op, layer: nn.Module) -> None:
    real = dict(layer.named_parameters()) | {k: v for k, v in layer.named_buffers() if v.dim()}
    found = {p.name: torch.full(p.shape, p.scale) for p in space(op, (IMAGE,)).parameters if p.initial == "constant"}
    assert found.keys() == real.keys()
    for name, value in found.items():
        assert torch.equal(value, real[name])


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_without_gradients_a_group_norm_of_shared_statistics_makes_one_tensor(weights: torch.dtype) -> None:
    """As memory is predicted; its numbers are those with gradients."""
    op, x = GroupNorm(2), TensorSpec((2, 8, 32, 32), IMAGES[2])
    at, t = whole(op, [x], all_reduce=lambda s: s), torch.randn(x.shape).to(weights)
    p = {name: value.to(weights) for name, value in held(op, x).items()}
    with torch.no_grad(), Live([t, *p.values()]) as live:
        before, out = live.peak, op.run(at, [t], p)
    assert live.peak - before < 1.1 * out.nbytes
    assert torch.equal(out, op.run(at, [t.requires_grad_()], p))
    mixed = {name: value.float() for name, value in p.items()}
    with torch.no_grad():
        assert torch.equal(op.run(at, [t], mixed), op.run(at, [t.requires_grad_()], mixed))
