"""Pooling, 1-D to 3-D, and adaptive pooling. https://pytorch.org/docs/stable/nn.html#pooling-layers"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import ClassVar, Literal

from layerwise.errors import LayerwiseError
from layerwise.geometry import identity, window
from layerwise.ops.base import Counts, Extents, Maps, Op, resized
from layerwise.tensor import TensorSpec


@dataclass(frozen=True, slots=True)
class Pool(Op):
    """Maximum, average or p-norm of a window. FLOPs: one an element of the window.

    Padding counts as -inf for the maximum, as 0 otherwise; `divisor` replaces the average's number of elements.
    """

    kind: ClassVar[str] = "pool"
    mode: Literal["max", "average", "lp"]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]  # (low, high) a spatial dimension
    dilation: tuple[int, ...]
    ceil_mode: bool = False
    count_include_pad: bool = True
    power: float = 2.0  # of mode "lp"
    divisor: int | None = None

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        (x,) = inputs
        _check(x, len(self.kernel))
        spatial = tuple(
            _windows(*dim, self.ceil_mode)
            for dim in zip(
                x.shape[-len(self.kernel) :], self.kernel, self.stride, self.padding, self.dilation, strict=True
            )
        )
        if min(spatial) < 1:
            raise LayerwiseError(f"a window of {self.kernel} does not fit into an input of {x.describe()}")
        return resized(x, spatial)

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        (x,) = inputs
        lead = len(x.shape) - len(self.kernel)
        spatial = tuple(
            window(out.shape[i], x.shape[i], i, stride=s, first=-low, last=(k - 1) * d - low)
            for i, (k, s, d, (low, _)) in enumerate(
                zip(self.kernel, self.stride, self.dilation, self.padding, strict=True), start=lead
            )
        )
        return (_leading(x, lead) + spatial,)

    def flops(self, inputs: Sequence[TensorSpec], extents: Extents) -> Counts:
        return Op.flops(self, inputs, extents) * prod(self.kernel)


@dataclass(frozen=True, slots=True)
class AdaptivePool(Op):
    """Pooling to `size`: position i of m takes [i*extent//m, ceil((i+1)*extent/m)). Global pooling is a size of ones.

    FLOPs: one an element of the window, whose mean extent is (extent + m - gcd(extent, m))/m.
    """

    kind: ClassVar[str] = "adaptive_pool"
    mode: Literal["max", "average"]
    size: tuple[int, ...]

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        (x,) = inputs
        _check(x, len(self.size))
        return resized(x, self.size)

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        (x,) = inputs
        lead = len(x.shape) - len(self.size)
        spatial = tuple(
            window(m, x.shape[i], i, stride=x.shape[i], last=x.shape[i] - 1, over=m)
            for i, m in enumerate(self.size, start=lead)
        )
        return (_leading(x, lead) + spatial,)

    def flops(self, inputs: Sequence[TensorSpec], extents: Extents) -> Counts:
        sizes = zip(inputs[0].shape[-len(self.size) :], self.size, strict=True)
        return Op.flops(self, inputs, extents) * prod((extent + m - gcd(extent, m)) / m for extent, m in sizes)


def _check(x: TensorSpec, rank: int) -> None:
    if len(x.shape) <= rank:
        raise LayerwiseError(f"{rank}-D pooling needs an input (n, c, {rank} spatial), not {x.describe()}")


def _windows(extent: int, kernel: int, stride: int, padding: tuple[int, int], dilation: int, ceil: bool) -> int:
    """Number of windows; torch/aten/src/ATen/native/Pool.h, pooling_output_shape_pad_lr."""
    low, high = padding
    room = extent + low + high - dilation * (kernel - 1) - 1
    count = (room + (stride - 1 if ceil else 0)) // stride + 1
    # With ceil_mode the last window must start inside the input or the low padding, else it is left out.
    return count - 1 if ceil and (count - 1) * stride >= extent + low else count


def _leading(x: TensorSpec, lead: int) -> Maps:
    """Sample and channel: each for itself."""
    return tuple(identity(extent, i) for i, extent in enumerate(x.shape[:lead]))
