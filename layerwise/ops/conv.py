"""Convolution and transposed convolution, 1-D to 3-D. https://pytorch.org/docs/stable/generated/torch.nn.Conv2d.html"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import numpy as np

from layerwise.errors import LayerwiseError
from layerwise.geometry import AxisMap, identity, scaled, whole, window
from layerwise.ops.base import Dim, Extents, Gemm, Maps, Op, Parameter
from layerwise.tensor import TensorSpec

Pads = tuple[tuple[int, int], ...]  # (low, high) a spatial dimension


@dataclass(frozen=True, slots=True)
class Conv(Op):
    """Cross-correlation of (n, c, *spatial) with (out_channels, c/groups, *kernel)."""

    kind: ClassVar[str] = "conv"
    out_channels: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Pads
    dilation: tuple[int, ...]
    groups: int = 1
    bias: bool = True

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        (x,) = inputs
        _check(self, x)
        spatial = tuple(
            (extent + low + high - d * (k - 1) - 1) // s + 1
            for extent, (low, high), k, s, d in zip(
                x.shape[2:], self.padding, self.kernel, self.stride, self.dilation, strict=True
            )
        )
        if min(spatial) < 1:
            raise LayerwiseError(f"a kernel of {self.kernel} does not fit into an input of {x.describe()}")
        return TensorSpec((x.shape[0], self.out_channels, *spatial), _labels(x), x.dtype, _units(x, spatial))

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        (x,) = inputs
        spatial = tuple(
            window(out.shape[i], x.shape[i], i, stride=s, first=-low, last=(k - 1) * d - low)
            for i, (k, s, d, (low, _)) in enumerate(
                zip(self.kernel, self.stride, self.dilation, self.padding, strict=True), start=2
            )
        )
        return ((identity(x.shape[0], 0), _channels(self, x, out), *spatial),)

    def parameters(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Parameter, ...]:
        per_group = inputs[0].shape[1] // self.groups
        depth = identity(per_group, len(out.shape)) if self.groups == 1 else whole(per_group)
        maps = (identity(self.out_channels, 1), depth, *map(whole, self.kernel))
        weight = Parameter("weight", (self.out_channels, per_group, *self.kernel), maps)
        return (weight, *_bias(self))

    def reductions(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Dim, ...]:
        return _reductions(self, inputs[0])

    def gemms(self, inputs: Sequence[TensorSpec], extents: Extents) -> tuple[Gemm, ...]:
        """Implicit matrix product: rows are output positions, columns output channels, depth input patch."""
        e = extents.astype(np.float64)
        columns, depth, count = _matrix(self, inputs[0], e)
        return (Gemm(e[..., 0] * e[..., 2 : 2 + len(self.kernel)].prod(-1), columns, depth, count),)


@dataclass(frozen=True, slots=True)
class ConvTranspose(Op):
    """The adjoint of a convolution: (n, c, *spatial) with (c, out_channels/groups, *kernel)."""

    kind: ClassVar[str] = "conv_transpose"
    out_channels: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Pads
    output_padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    bias: bool = True

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        (x,) = inputs
        _check(self, x)
        spatial = tuple(
            (extent - 1) * s - low - high + d * (k - 1) + extra + 1
            for extent, (low, high), k, s, d, extra in zip(
                x.shape[2:], self.padding, self.kernel, self.stride, self.dilation, self.output_padding, strict=True
            )
        )
        # weight[:, j] serves channel j of every group: groups stay whole, or devices would share parts of weights.
        unit = 1 if self.groups == 1 else self.out_channels // self.groups
        return TensorSpec((x.shape[0], self.out_channels, *spatial), _labels(x), x.dtype, _units(x, spatial, unit))

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        (x,) = inputs
        # Output y is reached from x where y = x*stride - low + tap*dilation:
        # ceil((y + low - reach)/stride) .. (y + low)//stride.
        spatial = tuple(
            window(out.shape[i], x.shape[i], i, first=low - (k - 1) * d + s - 1, last=low, over=s)
            for i, (k, s, d, (low, _)) in enumerate(
                zip(self.kernel, self.stride, self.dilation, self.padding, strict=True), start=2
            )
        )
        return ((identity(x.shape[0], 0), _channels(self, x, out), *spatial),)

    def parameters(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Parameter, ...]:
        channels, per_group = inputs[0].shape[1], self.out_channels // self.groups
        if self.groups == 1:
            maps: Maps = (identity(channels, len(out.shape)), identity(per_group, 1))
        else:  # weight[:, j] serves output channel g*per_group + j of every group g: inputs by group, outputs whole
            maps = (_channels(self, inputs[0], out), whole(per_group))
        weight = Parameter("weight", (channels, per_group, *self.kernel), (*maps, *map(whole, self.kernel)))
        return (weight, *_bias(self))

    def reductions(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Dim, ...]:
        return _reductions(self, inputs[0])

    def gemms(self, inputs: Sequence[TensorSpec], extents: Extents) -> tuple[Gemm, ...]:
        """Every input position is multiplied into a patch of the output, then patches are added."""
        e = extents.astype(np.float64)
        columns, depth, count = _matrix(self, inputs[0], e)
        # Each output element sums kernel/stride taps of every input channel (on average).
        taps = prod(self.kernel) / prod(self.stride)
        rows = e[..., 0] * e[..., 2 : 2 + len(self.kernel)].prod(-1)
        return (Gemm(rows, columns, depth / prod(self.kernel) * taps, count),)


def _check(op: Conv | ConvTranspose, x: TensorSpec) -> None:
    rank = len(op.kernel)
    if len(x.shape) != rank + 2:
        raise LayerwiseError(f"a {rank}-D convolution needs an input (n, c, {rank} spatial), not {x.describe()}")
    if x.shape[1] % op.groups or op.out_channels % op.groups:
        raise LayerwiseError(f"{x.shape[1]} -> {op.out_channels} channels do not divide into {op.groups} groups")


def _labels(x: TensorSpec) -> tuple[str | None, ...]:
    """Output channels are new: they can be split whatever the input's were (unless their label went elsewhere).

    A merged spatial dimension is not split: windows do not end at multiples of its unit.
    """
    spatial = tuple(None if unit > 1 else label for label, unit in zip(x.dims[2:], x.units[2:], strict=True))
    return (x.dims[0], None if "c" in (x.dims[0], *spatial) else "c", *spatial)


def _units(x: TensorSpec, spatial: tuple[int, ...], channel: int = 1) -> tuple[int, ...]:
    return (x.units[0], channel, *(1 for _ in spatial))


def _channels(op: Conv | ConvTranspose, x: TensorSpec, out: TensorSpec) -> AxisMap:
    """Input channels of a box: those of its groups, or of its part of the reduction."""
    if op.groups == 1:
        return identity(x.shape[1], len(out.shape))
    return scaled(op.out_channels, x.shape[1], 1, over=op.out_channels // op.groups, scale=x.shape[1] // op.groups)


def _reductions(op: Conv | ConvTranspose, x: TensorSpec) -> tuple[Dim, ...]:
    return (Dim("k", x.shape[1], x.units[1]),) if op.groups == 1 else ()


def _bias(op: Conv | ConvTranspose) -> tuple[Parameter, ...]:
    channels = (identity(op.out_channels, 1),)
    return (Parameter("bias", (op.out_channels,), channels, late=True),) if op.bias else ()


def _matrix(op: Conv | ConvTranspose, x: TensorSpec, e: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Columns, depth and count of the implicit matrix product of boxes of extents `e`."""
    patch = prod(op.kernel)
    if op.groups == 1:
        return e[..., 1], e[..., -1] * patch, np.ones_like(e[..., 1])
    per_group = op.out_channels // op.groups
    count = np.ceil(e[..., 1] / per_group)
    return e[..., 1] / count, np.full_like(count, x.shape[1] // op.groups * patch), count
