"""Pooling, 1-D to 3-D, and adaptive pooling. https://pytorch.org/docs/stable/nn.html#pooling-layers"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, inf, prod
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from layerwise.errors import LayerwiseError
from layerwise.geometry import identity, window
from layerwise.geometry.arrays import Mask
from layerwise.ops.base import Op, volumes
from layerwise.ops.facts import Counts, Extents, Local, Maps, Saved
from layerwise.ops.nn.windows import (
    Interval,
    Windowed,
    along,
    constant,
    given,
    interval,
    margins,
    padded,
)
from layerwise.ops.specs import resized
from layerwise.tensor import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

# what a mean divides by: the window's positions with padding, those without, or the kernel's size
Divide = Literal["padded", "inside", "kernel"] | None


@dataclass(frozen=True, slots=True)
class Pool(Windowed):
    """Maximum, average or p-norm of a window. FLOPs: one for each element of the window.

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
        rows = self.windows(len(x.shape) - len(self.kernel))
        spatial = tuple(_windows(x.shape[i], k, s, pads, d, self.ceil_mode) for i, k, s, d, pads in rows)
        if min(spatial) < 1:
            raise LayerwiseError(f"a window of {self.kernel} is larger than an input of {x.describe()}")
        return resized(x, dict(enumerate(spatial, len(x.shape) - len(spatial))))

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        (x,) = inputs
        lead = len(x.shape) - len(self.kernel)
        spatial = tuple(
            window(out.shape[i], x.shape[i], i, stride=s, first=-low, last=(k - 1) * d - low)
            for i, k, s, d, (low, _) in self.windows(lead)
        )
        return (_leading(x, lead) + spatial,)

    def flops(self, inputs: Sequence[TensorSpec], extents: Extents) -> Counts:
        return Op.flops(self, inputs, extents) * prod(self.kernel)

    def saved(self, inputs: Sequence[TensorSpec], lo: Extents, hi: Extents) -> Saved:
        """Memory: 64-bit positions of maxima; padded inputs of border cells that torch's padding cannot serve."""
        (x,) = inputs
        made = (hi - lo).astype(np.float64).prod(-1)
        read = volumes(self.needs(inputs, self.output(x))[0], lo, hi) * x.item_bytes
        padded_bytes = np.where(self._native_at(x, lo, hi) | (made == 0), 0.0, read)
        several = 2 * read if self.mode == "lp" else 0.0
        extra = padded_bytes + several + (8 * made if self.mode == "max" else 0.0)
        between = padded_bytes + several
        return Saved(inputs=padded_bytes == 0, output=self.mode == "lp", extra=extra, between=between)

    def _native_at(self, x: TensorSpec, lo: Extents, hi: Extents) -> Mask:
        """The cells whose windows torch's own padding produces: full dimensions, and those that `_fit` accepts."""
        out, native = self.output(x), np.full(lo.shape[:-1], not self._spread)
        maps, lead = self.needs((x,), out)[0], len(x.shape) - len(self.kernel)
        for i, k, s, d, (low, _) in self.windows(lead):
            first, last = maps[i](lo[..., i], hi[..., i])
            before, after = first - (lo[..., i] * s - low), (hi[..., i] - 1) * s + (k - 1) * d - low + 1 - last
            padless = (before == 0) & (after == 0)
            # If padding by `before` on both sides adds no window, and a mean divides by the same.
            fits = padless if self.mode == "average" else (after >= 0) & (after <= before) & (before < after + s)
            fits &= (last > first) & (before <= k // 2)
            native &= fits | ((lo[..., i] == 0) & (hi[..., i] == out.shape[i]))
        return native

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        (x,) = inputs
        if self.mode == "max":
            return self._windows(local, x, None)
        if self.mode == "average":
            if self.divisor is None:
                return self._windows(local, x, "padded" if self.count_include_pad else "inside")
            if len(self.kernel) > 1:
                return self._windows(local, x, None)
            return self._windows(local, x, "kernel") * (prod(self.kernel) / self.divisor)  # torch has no divisor in 1-D
        total = self._windows(local, x * x if self.power == 2 else x.abs() ** self.power, "kernel") * prod(self.kernel)
        some = total > 0  # the root has no slope at 0: the norm of zeros passes no gradient
        return total.where(some, 1.0) ** (1 / self.power) * some

    def _windows(self, local: Local, x: Tensor, divide: Divide) -> Tensor:
        """Maxima or means, by torch's own padding and rounding if these give the cell's windows."""
        lead = x.dim() - len(self.kernel)
        if lead not in (1, 2):  # torch pools (c, *spatial) and (n, c, *spatial)
            x = x.reshape(1, -1, *x.shape[lead:])
        first, extents = x.dim() - len(self.kernel), local.specs[0].shape
        small = self.mode == "max" or len(self.kernel) < 3  # avg_pool3d refuses an input smaller than its window
        fits = local.once(
            "fits",
            lambda: [
                _fit(interval(local, i), given(local, i), divide, small, extents[i], k, s, pads, d)
                for i, k, s, d, pads in self.windows(lead)
            ],
        )
        for ceil in (False, True):
            if not self._spread and all(f.alike[int(ceil)] for f in fits):  # PyTorch 2.11 cannot compile a bool index
                return self._native(x, [f.before for f in fits], ceil, divide != "inside").reshape(local.out.shape)
        native = [f.before if f.floor and not self._spread else None for f in fits]  # padding that torch adds itself
        pads = {i + first: (0, 0) if p is not None else (fits[i].before, fits[i].after) for i, p in enumerate(native)}
        x = padded(x, pads, -inf if self.mode == "max" else 0.0)
        out = self._spread_means(x) if self._spread else self._native(x, [p or 0 for p in native], False, True)
        for i, f in enumerate(fits, start=first):
            if f.factor is not None:
                out = out * along(constant(f.factor, out.dtype, out.device), i, out.dim())
        return out.reshape(local.out.shape)

    @property
    def _spread(self) -> bool:
        """True for dilated means, which ONNX has and PyTorch has not."""
        return self.mode != "max" and max(self.dilation) > 1

    def _spread_means(self, x: Tensor) -> Tensor:
        """Dilated means, over windows of the padded positions."""
        rank = len(self.kernel)
        for i, k, s, d, _ in self.windows(x.dim() - rank):
            x = x.unfold(i, (k - 1) * d + 1, s)[..., ::d]
        total = x.sum(tuple(range(-rank, 0)))
        return total / (prod(self.kernel) if self.divisor is None or rank == 1 or self.mode == "lp" else self.divisor)

    def _native(self, x: Tensor, padding: list[int], ceil: bool, include: bool) -> Tensor:
        from torch.nn import functional as f

        rank = len(self.kernel)
        if self.mode == "max":
            pool = (f.max_pool1d, f.max_pool2d, f.max_pool3d)[rank - 1]
            return pool(x, self.kernel, self.stride, padding, self.dilation, ceil)
        average = (f.avg_pool1d, f.avg_pool2d, f.avg_pool3d)[rank - 1]
        divisor = (self.divisor,) if rank > 1 and self.mode == "average" else ()
        return average(x, self.kernel, self.stride, padding, ceil, include, *divisor)


@dataclass(frozen=True, slots=True)
class AdaptivePool(Op):
    """Pooling to `size`: position i of m covers [i*extent//m, ceil((i+1)*extent/m)). Global pooling has a size of ones.

    FLOPs: one for each element of the window, whose mean extent is (extent + m - gcd(extent, m))/m.
    """

    kind: ClassVar[str] = "adaptive_pool"
    mode: Literal["max", "average"]
    size: tuple[int, ...]

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        (x,) = inputs
        _check(x, len(self.size))
        return resized(x, dict(enumerate(self.size, len(x.shape) - len(self.size))))

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

    def saved(self, inputs: Sequence[TensorSpec], lo: Extents, hi: Extents) -> Saved:
        made = (hi - lo).astype(np.float64).prod(-1)
        return Saved(output=False, extra=8 * made if self.mode == "max" else 0.0)

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        """Pools by torch if the cell's windows are those of its own part, else dimension by dimension."""
        from torch.nn import functional as f

        (x,) = inputs
        lead = x.dim() - len(self.size)
        windows = local.once(
            "windows",
            lambda: [
                _adaptive(interval(local, i), given(local, i), m, local.specs[0].shape[i])
                for i, m in enumerate(self.size, lead)
            ],
        )
        if all(w.alike for w in windows):
            x = x if lead in (1, 2) else x.reshape(1, -1, *x.shape[lead:])
            pools: dict[str, tuple[Callable[..., Tensor], ...]] = {
                "max": (f.adaptive_max_pool1d, f.adaptive_max_pool2d, f.adaptive_max_pool3d),
                "average": (f.adaptive_avg_pool1d, f.adaptive_avg_pool2d, f.adaptive_avg_pool3d),
            }
            out = pools[self.mode][len(self.size) - 1](x, local.out.shape[lead:])
            return out.reshape(local.out.shape)
        for i in reversed(range(lead, x.dim())):  # so that the first of equal maxima is taken, as torch does
            x = windows[i - lead].pool(x, i, self.mode)
        return x


def _check(x: TensorSpec, rank: int) -> None:
    if len(x.shape) <= rank:
        raise LayerwiseError(f"{rank}-D pooling needs an input (n, c, {rank} spatial), not {x.describe()}")


def _windows(extent: int, kernel: int, stride: int, padding: tuple[int, int], dilation: int, ceil: bool) -> int:
    """The number of windows; torch/aten/src/ATen/native/Pool.h, pooling_output_shape_pad_lr."""
    low, high = padding
    room = extent + low + high - dilation * (kernel - 1) - 1
    count = (room + (stride - 1 if ceil else 0)) // stride + 1
    # With ceil_mode the last window must start inside the input or the low padding, or it is dropped.
    return count - 1 if ceil and (count - 1) * stride >= extent + low else count


@dataclass(frozen=True, slots=True)
class _Adaptive:
    """The windows of a cell's dimension; short ones repeat their last position."""

    alike: bool  # whether adaptive pooling of the received positions gives these windows
    length: int  # positions in each window
    index: tuple[int, ...]  # the positions of all windows
    weights: tuple[float, ...]  # weights of the mean

    def pool(self, x: Tensor, dim: int, mode: str) -> Tensor:
        import torch

        if self.index == tuple(range(x.shape[dim])) and self.length == 1:  # every position is its own window
            return x
        parts = x.index_select(dim, constant(self.index, torch.int64, x.device))
        parts = parts.view(*x.shape[:dim], -1, self.length, *x.shape[dim + 1 :])
        if mode == "max":
            return torch.max(parts, dim + 1).values
        weights = constant(self.weights, x.dtype, x.device).view(-1, self.length, *(1,) * (x.dim() - dim - 1))
        return torch.sum(parts * weights, dim + 1)


@lru_cache(maxsize=4096)
def _adaptive(cell: Interval, need: Interval, size: int, extent: int) -> _Adaptive:
    def ends(x: NDArray[np.int64], size: int, extent: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return x * extent // size, -(-(x + 1) * extent // size)

    start, stop = ends(np.arange(*cell), size, extent)
    start, stop = start - need[0], stop - need[0]
    count, length = len(start), int((stop - start).max())
    alike = np.array_equal((start, stop), ends(np.arange(count), count, need[1] - need[0]))
    index = start[:, None] + np.arange(length)
    weights = (index < stop[:, None]) / (stop - start)[:, None]
    index = np.minimum(index, stop[:, None] - 1)
    return _Adaptive(alike, length, tuple(index.ravel().tolist()), tuple(weights.ravel().tolist()))


@dataclass(frozen=True, slots=True)
class _Fit:
    """How the windows of a cell's dimension are computed."""

    before: int  # positions of padding that the cell lacks
    after: int
    floor: bool  # whether torch gives these windows with `before` positions of padding on both sides
    alike: tuple[bool, bool]  # whether it then also divides correctly, without and with ceil_mode
    factor: tuple[float, ...] | None  # factor for a mean over the full kernel; None: ones


@lru_cache(maxsize=4096)
def _fit(
    cell: Interval,
    need: Interval,
    divide: Divide,
    small: bool,
    extent: int,
    kernel: int,
    stride: int,
    padding: tuple[int, int],
    dilation: int,
) -> _Fit:
    count, held, reach = cell[1] - cell[0], need[1] - need[0], (kernel - 1) * dilation
    before, after = margins(cell, need, stride, -padding[0], reach - padding[0])
    legal = held > (0 if small else reach) and 0 <= before <= kernel // 2
    both = (before, before)
    made = [legal and _windows(held, kernel, stride, both, dilation, c) == count for c in (False, True)]
    wanted = _counts(np.arange(*cell) * stride - padding[0], kernel, dilation, extent, padding[1], divide)
    how: Divide = "inside" if divide == "inside" else "padded"  # what torch is asked for
    local = _counts(np.arange(count) * stride - before, kernel, dilation, held, before, how)
    same = divide is None or bool((wanted == local).all())
    factor = None
    if divide is not None and (wanted != kernel).any():
        factor = tuple((kernel / np.where(wanted > 0, wanted, np.inf)).tolist())  # a window of padding only: 0
    return _Fit(before, after, made[0], (made[0] and same, made[1] and same), factor)


def _counts(
    starts: NDArray[np.int64], kernel: int, dilation: int, extent: int, high: int, divide: Divide
) -> NDArray[np.int64]:
    """The divisors that torch uses for windows that begin at `starts`: aten/src/ATen/native/AvgPoolKernel.cpp."""
    taps = starts[:, None] + dilation * np.arange(kernel)
    if divide == "padded":
        return np.asarray((taps < extent + high).sum(1), np.int64)
    if divide == "inside":
        return np.asarray(((taps >= 0) & (taps < extent)).sum(1), np.int64)
    return np.full_like(starts, kernel)


def _leading(x: TensorSpec, lead: int) -> Maps:
    """Maps of samples and channels: each index needs its own."""
    return tuple(identity(extent, i) for i, extent in enumerate(x.shape[:lead]))
