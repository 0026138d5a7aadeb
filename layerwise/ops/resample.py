"""Padding and interpolation: the same values, more or fewer of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

import numpy as np

from layerwise.errors import LayerwiseError
from layerwise.geometry import AxisMap, identity, whole, window
from layerwise.ops.base import Counts, Extents, Maps, Op, resized
from layerwise.tensor import TensorSpec


@dataclass(frozen=True, slots=True)
class Pad(Op):
    """More positions before and after (fewer, where negative); `pads` has one pair a dimension of the input.

    https://pytorch.org/docs/stable/generated/torch.nn.functional.pad.html. FLOPs: none.
    """

    kind: ClassVar[str] = "pad"
    pads: tuple[tuple[int, int], ...]
    mode: Literal["constant", "reflect", "replicate", "circular"] = "constant"
    value: float = 0.0

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        (x,) = inputs
        if len(self.pads) != len(x.shape):
            raise LayerwiseError(f"{len(self.pads)} pairs of pads for an input of {x.describe()}")
        shape, dims, units = list(x.shape), list(x.dims), list(x.units)
        for i, (low, high) in enumerate(self.pads):
            if low or high:
                # Padded samples are no samples; and a merged dimension would be cut off its unit.
                dims[i] = None if dims[i] == "n" or units[i] > 1 else dims[i]
                shape[i], units[i] = shape[i] + low + high, 1
                self._check(x.shape[i], low, high)
        return TensorSpec(tuple(shape), tuple(dims), x.dtype, tuple(units))

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        return (tuple(self._map(i, extent, out.shape[i]) for i, extent in enumerate(inputs[0].shape)),)

    def flops(self, inputs: Sequence[TensorSpec], extents: Extents) -> Counts:
        return np.zeros(extents.shape[:-1])

    def _map(self, dim: int, extent: int, padded: int) -> AxisMap:
        """Output x is input x - low, where there is such a one.

        Else it is its mirror image, at most twice the padding away, or the border, at most the padding away: a window
        that has them all is more than is read, but far less than the whole dimension.
        """
        low, high = self.pads[dim]
        if not low and not high:
            return identity(extent, dim)
        if self.mode == "circular":
            return whole(extent)
        reach = {"constant": 0, "replicate": 1, "reflect": 2}[self.mode]
        return window(padded, extent, dim, first=-low - reach * max(high, 0), last=-low + reach * max(low, 0))

    def _check(self, extent: int, low: int, high: int) -> None:
        if extent + low + high < 1:
            raise LayerwiseError(f"pads {low}, {high} leave nothing of an extent of {extent}")
        room = {"reflect": extent - 1, "circular": extent}.get(self.mode)
        if room is not None and max(low, high) > room:
            raise LayerwiseError(f"{self.mode} pads of an extent of {extent} are at most {room}, not {low}, {high}")


@dataclass(frozen=True, slots=True)
class Interpolate(Op):
    """The last dimensions resampled to `size`, position x at x·extent/size (nearest), (x + ½)·extent/size - ½ (others).

    https://pytorch.org/docs/stable/generated/torch.nn.functional.interpolate.html. `scales`: the factors, where the
    network gives them and they are not size/extent (then x/scale replaces x·extent/size). FLOPs: two a tap.
    """

    kind: ClassVar[str] = "interpolate"
    size: tuple[int, ...]
    mode: Literal["nearest", "nearest_exact", "linear", "cubic"] = "nearest"
    align_corners: bool = False
    scales: tuple[float, ...] = ()

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        (x,) = inputs
        if len(x.shape) <= len(self.size):
            raise LayerwiseError(f"cannot resample {len(self.size)} dimensions of {x.describe()}")
        return resized(x, self.size)

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        (x,) = inputs
        lead = len(x.shape) - len(self.size)
        return (tuple(identity(e, i) if i < lead else self._map(i, e, i - lead) for i, e in enumerate(x.shape)),)

    def flops(self, inputs: Sequence[TensorSpec], extents: Extents) -> Counts:
        taps = {"linear": 2, "cubic": 4}.get(self.mode)
        return Op.flops(self, inputs, extents) * (2 * taps ** len(self.size) if taps else 0)

    def _map(self, dim: int, extent: int, axis: int) -> AxisMap:
        """In integers: the position of x is (x*stride + first)/over."""
        size = self.size[axis]
        if size == extent and not self.scales:
            return identity(extent, dim)
        # Position x of the output lies at x*step/over.
        ratio = 1 / Fraction(self.scales[axis]).limit_denominator(1 << 16) if self.scales else Fraction(extent, size)
        step, over = ratio.numerator, ratio.denominator
        if self.mode in ("nearest", "nearest_exact"):
            half = self.mode == "nearest_exact"
            below, above = _rounding(size, step, over, half)
            if size == extent and not half:
                above += 1  # some kernels copy then, whatever the scale: x is less than 1 above x/scale
            first = step if half else 0
            step, over = 2 * step, 2 * over
            return window(
                size, extent, dim, stride=step, first=first + below * over, last=first + above * over, over=over
            )
        first = step - over
        step, over = 2 * step, 2 * over
        if self.align_corners:
            step, over, first = (extent - 1, size - 1, 0) if size > 1 else (0, 1, 0)
        if self.mode == "linear":  # the positions on both sides, or the one that is hit
            return window(size, extent, dim, stride=step, first=first, last=first + over - 1, over=over)
        return window(size, extent, dim, stride=step, first=first - over, last=first + 2 * over, over=over)


def _rounding(size: int, step: int, over: int, half: bool) -> tuple[int, int]:
    """How far below and above floor((x + half/2)*step/over) the float32 arithmetic of PyTorch comes out.

    It multiplies by float32(step/over): one less at x = 41 of 2 -> 82. aten/src/ATen/native/UpSample.h
    """
    x = np.arange(size)
    rounded = np.floor((x + 0.5 * half).astype(np.float32) * np.float32(step / over)).astype(np.int64)
    error = rounded - (2 * x + half) * step // (2 * over)
    return min(0, int(error.min())), max(0, int(error.max()))
