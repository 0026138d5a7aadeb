"""Convolutions: needs are what the real ones touch, and cells of any configuration make the whole, both ways."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

from layerwise.ops.base import space
from layerwise.ops.nn.conv import Conv, ConvTranspose
from layerwise.tensor import TensorSpec
from tests.ops.harness import IMAGES, each, flat, pairs, sample, whole
from tests.ops.harness import parameters as random_parameters
from tests.ops.kernels import check_kernel, check_split

CONV = (F.conv1d, F.conv2d, F.conv3d)


CONV_TRANSPOSE = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[Conv, TensorSpec]:
    rank = draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 1, 2, 3, 4]))
    per_in, per_out = draw(st.integers(1, 5 if groups == 1 else 2)), draw(st.integers(1, 4))
    kernel, dilation = each(draw, rank, 1, 5 - rank), each(draw, rank, 1, 3)
    padding = pairs(draw, rank, 0, 4, symmetric=draw(st.booleans()))
    fits = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    spatial = tuple(max(draw(st.integers(1, 11 - 2 * rank)), f - sum(p)) for f, p in zip(fits, padding, strict=True))
    op = Conv(groups * per_out, kernel, each(draw, rank, 1, 4), padding, dilation, groups, draw(st.booleans()))
    return op, TensorSpec((draw(st.integers(1, 3)), groups * per_in, *spatial), IMAGES[rank])


def convolved(op: Conv, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    padded = F.pad(x, flat(op.padding))
    return CONV[len(op.kernel) - 1](padded, weight, bias, op.stride, 0, op.dilation, op.groups)


@given(st.data())
def test_convolution(data: st.DataObject) -> None:
    op, x = data.draw(convolutions())
    # Where taps skip positions (dilation) or windows fall into the padding, the hull of what is read may be smaller.
    tight = max(op.dilation) == 1 and all(k > max(pad) for k, pad in zip(op.kernel, op.padding, strict=True))
    check_split(data, op, [x], lambda *a, **k: convolved(op, *a, **k), tight=tight)


def conv(out: int, kernel: int, stride: int = 1, padding: int = 0, dilation: int = 1, groups: int = 1) -> Conv:
    return Conv(out, (kernel,) * 2, (stride,) * 2, ((padding, padding),) * 2, (dilation,) * 2, groups)


@pytest.mark.parametrize(
    ("op", "shape", "cuts"),
    [
        (conv(6, 11, 4, 2), (2, 3, 67, 61), (1, 1, 5, 3, 1)),  # AlexNet
        (conv(6, 7, 2, 3), (2, 3, 33, 32), (2, 2, 4, 3, 1)),  # ResNet's stem
        (conv(4, 3, 1, 1), (1, 5, 14, 14), (1, 2, 7, 2, 3)),
        (conv(4, 1, 2), (2, 3, 9, 9), (1, 1, 5, 1, 3)),  # a shortcut
        (conv(4, 3, 1, 6, 6), (1, 2, 9, 9), (1, 1, 3, 3, 1)),  # atrous, cells that see little but padding
        (conv(8, 3, 1, 1, 1, 8), (2, 8, 7, 7), (1, 3, 2, 2)),  # depthwise
        (conv(16, 3, 1, 1, 1, 4), (2, 8, 5, 5), (1, 5, 1, 1)),  # cells of 3 and 4 channels, groups of 4
        (conv(12, 3, 1, 1, 1, 2), (2, 4, 5, 5), (1, 5, 2, 1)),
        (conv(4, 1, 3, 2), (1, 2, 5, 5), (1, 1, 3, 3, 1)),  # a cell of padding alone, smaller than a stride
    ],
)
def test_known_convolutions(op: Conv, shape: tuple[int, ...], cuts: tuple[int, ...]) -> None:
    check_kernel(op, [TensorSpec(shape, IMAGES[2])], cuts, lambda *a, **k: convolved(op, *a, **k))


def test_merged_channels_are_reduced_by_units() -> None:
    x = TensorSpec((2, 6, 5), IMAGES[1], units=(1, 3, 1))
    op = Conv(4, (3,), (1,), ((1, 1),), (1,))
    check_kernel(op, [x], (2, 2, 2, 2), lambda *a, **k: convolved(op, *a, **k))


@st.composite
def transposed(draw: st.DrawFn) -> tuple[ConvTranspose, TensorSpec]:
    rank, groups = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2, 3]))
    kernel, dilation, stride = each(draw, rank, 1, 5 - rank), each(draw, rank, 1, 2), each(draw, rank, 1, 4)
    extra = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
    padding = pairs(draw, rank, 0, 3, symmetric=draw(st.booleans()))
    spatial = tuple(  # such that something is left
        max(draw(st.integers(1, 6 - rank)), -(-(sum(p) - d * (k - 1) - e) // s) + 1)
        for p, k, d, e, s in zip(padding, kernel, dilation, extra, stride, strict=True)
    )
    x = TensorSpec((draw(st.integers(1, 2)), groups * draw(st.integers(1, 3)), *spatial), IMAGES[rank])
    out = groups * draw(st.integers(1, 3))
    return ConvTranspose(out, kernel, stride, padding, extra, dilation, groups, draw(st.booleans())), x


def deconvolved(op: ConvTranspose, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """All that the inputs reach, then cropped by the padding, then with some zeros, then with the bias."""
    full = CONV_TRANSPOSE[len(op.kernel) - 1](x, weight, None, op.stride, 0, 0, op.groups, op.dilation)
    room = F.pad(full, flat(tuple((0, extra) for extra in op.output_padding)))
    out = room[(..., *(slice(low, e - high) for (low, high), e in zip(op.padding, room.shape[2:], strict=True)))]
    return out if bias is None else out + bias.reshape(-1, *(1 for _ in op.kernel))


@given(st.data())
def test_transposed_convolution(data: st.DataObject) -> None:
    op, x = data.draw(transposed())
    within = all(max(pad) <= (k - 1) // 2 for k, pad in zip(op.kernel, op.padding, strict=True))
    covered = all(
        k >= s > e for k, s, e in zip(op.kernel, op.stride, op.output_padding, strict=True)
    )  # else a place may be reached by nothing
    tight = op.groups == 1 and max(op.dilation) == 1 and within and covered
    check_split(data, op, [x], lambda *a, **k: deconvolved(op, *a, **k), tight=tight)


@pytest.mark.parametrize("module", [nn.Conv1d(6, 4, 3), nn.Conv2d(6, 4, (3, 5), groups=2), nn.ConvTranspose2d(6, 4, 5)])
def test_initial_values(module: nn.Conv2d) -> None:
    """As torch.nn draws them: uniform, and as wide."""
    transpose = isinstance(module, nn.ConvTranspose2d)
    rank = len(module.kernel_size)
    kind = (Conv, ConvTranspose)[transpose]
    extra = ((0,) * rank,) if transpose else ()
    op = kind(4, module.kernel_size, (1,) * rank, ((0, 0),) * rank, *extra, (1,) * rank, module.groups)
    where = space(op, (TensorSpec((1, 6, *(9,) * rank), IMAGES[rank]),))
    torch.manual_seed(0)
    drawn = []
    for _ in range(200):
        module.reset_parameters()
        drawn.append({k: t.detach().clone() for k, t in module.named_parameters()})
    for p in where.parameters:
        real = torch.cat([d[p.name].flatten() for d in drawn])
        assert tuple(drawn[0][p.name].shape) == p.shape
        assert p.initial == "uniform"
        assert real.abs().max().item() == pytest.approx(p.scale, rel=0.02)
        assert real.abs().max().item() <= p.scale
        assert real.std().item() == pytest.approx(p.scale / 3**0.5, rel=0.1)


@given(st.data())
def test_one_device_runs_plain_torch(data: st.DataObject) -> None:
    """Bit by bit, in float32: the same call on the same tensors."""
    op, x = data.draw(convolutions().filter(lambda pair: all(a == b for a, b in pair[0].padding)))
    at = whole(op, [x])
    t = sample(x)
    assume(at.needs[0].shape == tuple(t.shape))  # else PyTorch reads further than any stride comes, by another kernel
    held = {k: v.float() for k, v in random_parameters(at.space).items()}
    low = [a for a, _ in op.padding]
    wanted = CONV[len(op.kernel) - 1](t, held["weight"], held.get("bias"), op.stride, low, op.dilation, op.groups)
    assert torch.equal(op.run(at, [t[at.needs[0].slices()]], held), wanted)
