"""Padding and interpolation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache, partial
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from layerwise.errors import LayerwiseError
from layerwise.geometry import AxisMap, identity, whole, window
from layerwise.ops.base import Op
from layerwise.ops.facts import Counts, Extents, Local, Maps, Saved
from layerwise.ops.nn.windows import Interval, Taps, given, interval, margins, padded, taps_of, weighted
from layerwise.ops.specs import resized
from layerwise.tensor import TensorSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Border = Literal["reflect", "replicate", "circular"]
Resampling = Literal["nearest", "nearest_exact", "linear", "cubic"]


@dataclass(frozen=True, slots=True)
class Pad(Op):
    """More positions before and after (fewer if negative); `pads` has one pair for each dimension of the input.

    https://pytorch.org/docs/stable/generated/torch.nn.functional.pad.html. FLOPs: none.
    """

    kind: ClassVar[str] = "pad"
    saves: ClassVar[Saved] = Saved(inputs=False, output=False)
    arithmetic: ClassVar[bool] = False
    pads: tuple[tuple[int, int], ...]
    mode: Literal["constant", "reflect", "replicate", "circular"] = "constant"
    value: float = 0.0

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        (x,) = inputs
        if len(self.pads) != len(x.shape):
            raise LayerwiseError(f"{len(self.pads)} pairs of pads do not fit an input of {x.describe()}")
        padded = {i: (low, high) for i, (low, high) in enumerate(self.pads) if low or high}
        for i, (low, high) in padded.items():
            self._check(x.shape[i], low, high)
        out = resized(x, {i: x.shape[i] + low + high for i, (low, high) in padded.items()})
        dims = (None if label == "n" and i in padded else label for i, label in enumerate(out.dims))
        return replace(out, dims=tuple(dims))  # padding is not samples

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        return (tuple(self._map(i, extent, out.shape[i]) for i, extent in enumerate(inputs[0].shape)),)

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:

        (x,) = inputs
        dims = [i for i, pair in enumerate(self.pads) if any(pair)]
        lacking = {i: margins(interval(local, i), given(local, i), 1, -self.pads[i][0], -self.pads[i][0]) for i in dims}
        if self.mode == "constant":
            return padded(x, lacking, self.value)
        extents = local.specs[0].shape
        if self._torch_can(x, extents, lacking):
            return padded(x, lacking, mode=self.mode)
        for i in dims:
            low, extent = self.pads[i][0], extents[i]
            where = interval(local, i), given(local, i), low, extent
            x = weighted(x, i, local.once(f"border {i}", partial(_border, self.mode, *where)))
        return x

    def _torch_can(self, x: Tensor, extents: Sequence[int], lacking: Mapping[int, tuple[int, int]]) -> bool:
        """True if one call of torch.nn.functional.pad adds what is missing."""
        leading = min((i for i, ends in lacking.items() if max(ends) > 0), default=x.dim())
        if not leading or x.dim() - min(leading, 2) > 3 or min(p for pair in self.pads for p in pair) < 0:
            return False
        for i, (low, high) in lacking.items():
            there = x.shape[i] + min(low, 0) + min(high, 0)
            enough = {"replicate": 1, "reflect": max(low, high) + 1, "circular": extents[i]}[self.mode]
            if there < enough:
                return False
        return True

    def _map(self, dim: int, extent: int, padded: int) -> AxisMap:
        """Output x is input x - low, if that exists.

        Otherwise it is the border or a mirrored position, at most twice the padding away: a window with all of these is
        more than is read, but far less than the full dimension.
        """
        low, high = self.pads[dim]
        if not low and not high:
            return identity(extent, dim)
        if self.mode == "circular":
            return whole(extent)
        reach = 2 if self.mode == "reflect" else 0
        first, last = -low - reach * max(high, 0), -low + reach * max(low, 0)
        return window(padded, extent, dim, first=first, last=last, nearest=self.mode == "replicate")

    def _check(self, extent: int, low: int, high: int) -> None:
        if extent + low + high < 1:
            raise LayerwiseError(f"pads {low}, {high} remove all of a dimension of size {extent}")
        room = {"reflect": extent - 1, "circular": extent}.get(self.mode)
        if room is not None and max(low, high) > room:
            raise LayerwiseError(
                f"{self.mode} pads {low}, {high} exceed {room}, the most for a dimension of size {extent}"
            )


@dataclass(frozen=True, slots=True)
class Interpolate(Op):
    """The last dimensions resampled to `size`: position x at x·extent/size (nearest), (x + ½)·extent/size - ½ (others).

    https://pytorch.org/docs/stable/generated/torch.nn.functional.interpolate.html. `scales`: the network's factors, if
    they are not size/extent (then x/scale replaces x·extent/size). FLOPs: two a tap.
    """

    kind: ClassVar[str] = "interpolate"
    saves: ClassVar[Saved] = Saved(inputs=False, output=False)
    size: tuple[int, ...]
    mode: Resampling = "nearest"
    align_corners: bool = False
    scales: tuple[float, ...] = ()

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        (x,) = inputs
        if len(x.shape) <= len(self.size):
            raise LayerwiseError(f"cannot resample {len(self.size)} dimensions of {x.describe()}")
        return resized(x, dict(enumerate(self.size, len(x.shape) - len(self.size))))

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        (x,) = inputs
        lead = len(x.shape) - len(self.size)
        return (tuple(identity(e, i) if i < lead else self._map(i, e, i - lead) for i, e in enumerate(x.shape)),)

    def flops(self, inputs: Sequence[TensorSpec], extents: Extents) -> Counts:
        taps = {"linear": 2, "cubic": 4}.get(self.mode)
        return Op.flops(self, inputs, extents) * (2 * taps ** len(self.size) if taps else 0)

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        """Resamples by torch if it picks the same positions in this box as in the full tensor, else by dimension."""
        (x,) = inputs
        lead, dtype = x.dim() - len(self.size), x.dtype
        dims = list(zip(range(lead, x.dim()), local.specs[0].shape[lead:], self.size, strict=True))
        torch_can = lead == 2 and (len(self.size) == 2 or self.mode != "cubic")
        if torch_can and all(local.spans(i) or self._shifts(extent, size) for i, extent, size in dims):
            # In an unsplit dimension, unread positions count for the scale.
            unread = {i: (given(local, i)[0], extent - given(local, i)[1]) for i, extent, _ in dims if local.spans(i)}
            ratios = {i: size // extent for i, extent, size in dims if i not in unread}
            sizes = [ratios[i] * x.shape[i] if i in ratios else size for i, _, size in dims]
            x = self._native(padded(x, unread), sizes)
            for i, ratio in ratios.items():
                (lo, hi), start = interval(local, i), given(local, i)[0] * ratio
                x = x.narrow(i, lo - start, hi - lo)
            return x
        extents = tuple(extent for _, extent, _ in dims)
        for axis, (i, extent, size) in enumerate(dims):
            if extent != size or self.scales:
                where = extents, axis, interval(local, i), given(local, i), dtype, x.device
                x = weighted(x, i, local.once(f"taps {i} {dtype}", partial(_taps, self, *where)))
        return x.to(dtype)

    def _native(self, x: Tensor, size: Sequence[int]) -> Tensor:
        """torch.nn.functional.interpolate, but `size` and `scales` may both be given."""
        import torch

        names = {"nearest": "upsample_nearest", "nearest_exact": "_upsample_nearest_exact", "cubic": "upsample_bicubic"}
        name = names.get(self.mode) or "upsample_" + ("linear", "bilinear", "trilinear")[len(size) - 1]
        corners = () if self.mode in ("nearest", "nearest_exact") else (self.align_corners,)
        out: Tensor = getattr(torch.ops.aten, f"{name}{len(size)}d")(x, list(size), *corners, *self.scales)
        return out

    def _shifts(self, extent: int, size: int) -> bool:
        """True if shifting the output by `size // extent` shifts the input by one position."""
        if self.scales or self.align_corners or size % extent:
            return False
        ratio = size // extent
        return self.mode in ("linear", "cubic") or ratio & (ratio - 1) == 0  # else float32 rounds differently there

    def _map(self, dim: int, extent: int, axis: int) -> AxisMap:
        """The AxisMap in integers: the position of x is (x*stride + first)/over."""
        size = self.size[axis]
        if size == extent and not self.scales:
            return identity(extent, dim)
        # Position x of the output is at x*step/over.
        ratio = 1 / Fraction(self.scales[axis]).limit_denominator(1 << 16) if self.scales else Fraction(extent, size)
        step, over = ratio.numerator, ratio.denominator
        if self.mode in ("nearest", "nearest_exact"):
            half = self.mode == "nearest_exact"
            below, above = _rounding(size, step, over, half)
            if size == extent and not half:
                above += 1  # some kernels then copy, whatever the scale: x is less than 1 above x/scale
            first = step if half else 0
            step, over = 2 * step, 2 * over
            return window(
                size, extent, dim, stride=step, first=first + below * over, last=first + above * over, over=over
            )
        first = step - over
        step, over = 2 * step, 2 * over
        if self.align_corners:
            step, over, first = (extent - 1, size - 1, 0) if size > 1 else (0, 1, 0)
        if self.mode == "linear":  # the positions on both sides, or the exact one
            return window(size, extent, dim, stride=step, first=first, last=first + over - 1, over=over)
        return window(size, extent, dim, stride=step, first=first - over, last=first + 2 * over, over=over)


def _rounding(size: int, step: int, over: int, half: bool) -> tuple[int, int]:
    """Bounds below and above floor((x + half/2)*step/over) for PyTorch's float32 arithmetic.

    It multiplies by float32(step/over): one less at x = 41 for 2 -> 82. aten/src/ATen/native/UpSample.h
    """
    x = np.arange(size)
    rounded = np.floor((x + 0.5 * half).astype(np.float32) * np.float32(step / over)).astype(np.int64)
    error = rounded - (2 * x + half) * step // (2 * over)
    return min(0, int(error.min())), max(0, int(error.max()))


@lru_cache(maxsize=4096)
def _border(mode: Border, cell: Interval, need: Interval, low: int, extent: int) -> Taps:
    """The received position that each position of a cell repeats."""
    x = np.arange(*cell) - low
    if mode == "replicate":
        x = np.clip(x, 0, extent - 1)
    elif mode == "circular":
        x %= extent
    else:
        x = np.abs(x)
        x = np.where(x < extent, x, 2 * (extent - 1) - x)
    return ((tuple((x - need[0]).tolist()), None),)


@lru_cache(maxsize=256)
def _taps(
    op: Interpolate,
    extents: tuple[int, ...],
    axis: int,
    cell: Interval,
    need: Interval,
    dtype: torch.dtype,
    device: torch.device,
) -> Taps:
    """The received positions that PyTorch itself reads along one dimension, and their weights.

    It resamples numbered positions (nearest) in the full size, as kernels round differently and are selected by size;
    else unit vectors. Gradients are those of these taps: some of PyTorch's own backward kernels round differently from
    the forward ones.
    """
    import torch

    real = dtype if dtype == torch.float64 else torch.float32
    with torch.inference_mode(False), torch.no_grad():
        if op.mode in ("nearest", "nearest_exact"):
            shape = [-1 if i == axis else 1 for i in range(len(extents))]
            ramp = torch.arange(extents[axis], dtype=real, device=device).view(1, 1, *shape)
            taken = op._native(ramp.expand(1, 1, *extents).contiguous(), op.size)[0, 0]
            index = taken.movedim(axis, 0).reshape(op.size[axis], -1)[cell[0] : cell[1], 0].long() - need[0]
            return ((tuple(index.tolist()), None),)
        # The other dimension has one position, doubled if sizes are equal: some kernels copy if no size changes.
        equal = all(extent == size for i, (extent, size) in enumerate(zip(extents, op.size, strict=True)) if i != axis)
        scales = (op.scales[axis], 1.0) if op.scales else ()
        probe = Interpolate((op.size[axis], 1 if equal else 2), op.mode, op.align_corners, scales)
        units = torch.zeros(need[1] - need[0], extents[axis], dtype=real, device=device)
        units[:, need[0] : need[1]].fill_diagonal_(1)
        taken = probe._native(units[None, :, :, None], probe.size)[0, :, cell[0] : cell[1], 0]
    return taps_of(taken.double().cpu().numpy())
