"""A rank's part of a 3-D convolution goes to oneDNN where PyTorch would take im2col, and has PyTorch's numbers."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from layerwise.geometry import Box
from layerwise.ops.base import space
from layerwise.ops.facts import Local
from layerwise.ops.fused import needed_box
from layerwise.ops.nn import onednn
from layerwise.ops.nn.conv import Conv
from layerwise.tensor import TensorSpec
from tests.examples import examples

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch has no oneDNN here")
HOW = (1, 1, 1), (1, 1, 1), (1, 1, 1), 1
Shapes = tuple[int, int, tuple[int, int, int]]  # input and output channels, extents


def tensors(inputs: int, outputs: int, extents: Sequence[int], kernel: Sequence[int] = (3, 3, 3)) -> list[Tensor]:
    made = torch.randn(1, inputs, *extents), torch.randn(outputs, inputs, *kernel), torch.randn(outputs)
    return [t.requires_grad_() for t in made]


def by_onednn(out: Tensor) -> bool:
    """Whether `convolve` has chosen it."""
    assert out.grad_fn is not None
    return type(out.grad_fn).__name__ == "ConvolutionBackward"


def close(mine: Tensor, other: Tensor) -> None:
    assert mine.shape == other.shape
    assert mine.layout == torch.strided
    torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5 * float(other.detach().abs().max()))


@examples(40)
@given(st.data())
def test_numbers_are_those_of_pytorch(data: st.DataObject) -> None:
    """Forward and backward; odd extents, padding and strides; inputs that are parts of other tensors."""
    three = st.tuples(*[st.integers(1, 3)] * 3)
    kernel = data.draw(three.filter(lambda k: max(k) > 1))
    stride, padding = data.draw(three), data.draw(st.tuples(*[st.integers(0, 2)] * 3))
    x, weight, bias = tensors(
        data.draw(st.integers(8, 19)),
        data.draw(st.integers(1, 19)),
        data.draw(st.tuples(*[st.integers(5, 17)] * 3)),
        kernel,
    )
    layout = data.draw(st.sampled_from(["whole", "a view", "channels last"]))
    if layout == "a view":
        x = functional.pad(x.detach(), (1, 2, 0, 1, 2, 0))[..., 2:, :-1, 1:-2].requires_grad_()
    if layout == "channels last":
        x = x.detach().to(memory_format=torch.channels_last_3d).requires_grad_()
    leaves = [x, weight, *([bias] if data.draw(st.booleans()) else [])]
    wanted = [t for t in leaves if data.draw(st.booleans())] or leaves
    for t in leaves:
        t.requires_grad_(any(t is w for w in wanted))
    how = stride, padding, (1, 1, 1), 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onednn, "LEAST_PRODUCTS", 0)
        onednn._quicker.cache_clear()
        out = onednn.convolve(x, weight, *leaves[2:] or [None], *how)
        onednn._quicker.cache_clear()
    assert by_onednn(out)
    other = functional.conv3d(x, weight, *leaves[2:] or [None], *how)
    close(out, other)
    one = torch.randn(1, 1, 1, 1, 1)  # as of a sum: the gradient is expanded
    gradient = one.expand_as(out) if data.draw(st.booleans()) else torch.randn_like(out)
    for mine, theirs in zip(*(torch.autograd.grad(y, wanted, gradient) for y in (out, other)), strict=True):
        close(mine, theirs)


@pytest.mark.parametrize("groups", [1, 2])
def test_it_can_be_differentiated_twice(groups: int) -> None:
    """Of one thread PyTorch leaves groups along one dimension to im2col, too: kernels of one position elsewhere."""
    leaves, how = tensors(16, 16, (5, 9, 21)), HOW
    if groups == 2:
        x, weight, bias = tensors(32, 32, (16, 16, 16), (3, 1, 1))
        leaves = [x, weight.detach()[:, :16].clone().requires_grad_(), bias]
        how = (1, 1, 1), (1, 0, 0), (1, 1, 1), 2
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        made = []
        for convolve in (onednn.convolve, functional.conv3d):
            out = convolve(*leaves, *how)
            assert by_onednn(out) == (convolve is onednn.convolve)
            first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
            made.append([out, *first, *torch.autograd.grad(sum((g * g).sum() for g in first), leaves)])
    finally:
        torch.set_num_threads(threads)
    for mine, theirs in zip(*made, strict=True):
        close(mine, theirs)


@pytest.mark.parametrize("extents", [(5, 9, 21), (4, 16, 64), (16, 16, 16)])
def test_only_what_pytorch_leaves_to_im2col_is_taken(extents: tuple[int, int, int]) -> None:
    x, weight, bias = tensors(16, 16, extents)
    assert by_onednn(onednn.convolve(x, weight, bias, *HOW))
    both = torch.cat([x, x])
    assert not by_onednn(onednn.convolve(both, weight, bias, *HOW))
    assert not by_onednn(onednn.convolve(x, weight, bias, (1, 1, 1), (1, 1, 1), (1, 2, 1), 1))
    deep = torch.cat([x] * 100, 3)  # channels * depth * height above 20,480
    assert not by_onednn(onednn.convolve(deep, weight, bias, *HOW))


@pytest.mark.parametrize(
    ("inputs", "outputs", "extents", "kernel"),
    [(8, 8, (4, 4, 4), (3, 3, 3)), (4, 16, (8, 16, 64), (3, 3, 3)), (64, 64, (8, 16, 16), (1, 1, 1))],
)
def test_where_im2col_is_as_fast_it_stays(
    inputs: int, outputs: int, extents: tuple[int, int, int], kernel: tuple[int, int, int]
) -> None:
    leaves = tensors(inputs, outputs, extents, kernel)
    how = (1, 1, 1), tuple(k // 2 for k in kernel), (1, 1, 1), 1
    out = onednn.convolve(*leaves, *how)
    assert not by_onednn(out)
    assert torch.equal(out, functional.conv3d(*leaves, *how))


@pytest.mark.parametrize(
    ("dtype", "around"),
    [
        (torch.float64, nullcontext),
        (torch.bfloat16, nullcontext),
        (torch.float32, lambda: torch.autocast("cpu", torch.bfloat16)),
        (torch.float32, lambda: torch.autocast("cpu", torch.float16)),
        (torch.float32, lambda: torch.backends.mkldnn.flags(enabled=False)),
    ],
    ids=["float64", "bfloat16", "autocast bfloat16", "autocast float16", "oneDNN is off"],
)
def test_other_types_and_settings_are_pytorchs(
    dtype: torch.dtype, around: Callable[[], AbstractContextManager[object]]
) -> None:
    leaves = [t.detach().to(dtype).requires_grad_() for t in tensors(16, 16, (5, 9, 21))]
    with around():
        mine, theirs = onednn.convolve(*leaves, *HOW), functional.conv3d(*leaves, *HOW)
    assert not by_onednn(mine)
    assert torch.equal(mine, theirs)
    assert mine.dtype == theirs.dtype


def test_a_compiler_sees_pytorchs_convolution() -> None:
    leaves = tensors(16, 16, (5, 9, 21))
    assert by_onednn(onednn.convolve(*leaves, *HOW))
    out = torch.compile(lambda *t: onednn.convolve(*t, *HOW), backend="aot_eager", fullgraph=True)(*leaves)
    other = functional.conv3d(*leaves, *HOW)
    assert torch.equal(out, other)
    for mine, theirs in zip(*(torch.autograd.grad(y.sum(), leaves) for y in (out, other)), strict=True):
        assert torch.equal(mine, theirs)


def test_whole_samples_are_pytorchs() -> None:
    """As in DistributedDataParallel, or in the user's own module, which runs where all layers are split by samples."""
    op = Conv(16, (3, 3, 3), (1, 1, 1), ((1, 1),) * 3, (1, 1, 1))
    spec = TensorSpec((2, 16, 9, 10, 21), ("n", "c", "d", "h", "w"))
    x, weight, bias = tensors(16, 16, spec.shape[2:])
    box = Box((1, 0, 0, 0, 0, 0), (2, 16, 9, 10, 21, 16))
    local = Local(space(op, (spec,)), (spec,), box, (Box((1, 0, 0, 0, 0), (2, *spec.shape[1:])),))
    out = op.run(local, [x], {"weight": weight, "bias": bias})
    assert by_onednn(onednn.convolve(x, weight, bias, *HOW))
    assert not by_onednn(out)
    assert torch.equal(out, functional.conv3d(x, weight, bias, *HOW))


def test_parts_of_a_layer_take_it_and_a_whole_layer_does_not() -> None:
    """What one device computes is PyTorch's, bit for bit; the parts of it along depth add up to that."""
    op = Conv(16, (3, 3, 3), (1, 1, 1), ((1, 1),) * 3, (1, 1, 1))
    spec = TensorSpec((1, 16, 9, 10, 21), ("n", "c", "d", "h", "w"))
    where = space(op, (spec,))
    x, weight, bias = tensors(16, 16, spec.shape[2:])
    other = functional.conv3d(x, weight, bias, *HOW)

    def part(first: int, last: int) -> Tensor:
        box = Box((0, 0, first, 0, 0, 0), (1, 16, last, 10, 21, 16))
        needed = needed_box(where.needs[0], box)
        local = Local(where, (spec,), box, (needed,))
        return op.run(local, [x[needed.slices()]], {"weight": weight, "bias": bias})

    whole = part(0, 9)
    assert not by_onednn(whole)
    assert torch.equal(whole, other)
    parts = [part(0, 4), part(4, 9)]
    assert all(map(by_onednn, parts))
    joined = torch.cat(parts, 2)
    close(joined, other)
    gradient = torch.randn_like(other)
    grads = [torch.autograd.grad(y, (x, weight, bias), gradient) for y in (joined, other)]
    for mine, theirs in zip(*grads, strict=True):
        close(mine, theirs)
