"""Convolution and transposed convolution, 1-D to 3-D. https://pytorch.org/docs/stable/generated/torch.nn.Conv2d.html"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from layerwise.errors import LayerwiseError
from layerwise.geometry import AxisMap, identity, scaled, whole, window
from layerwise.ops.base import volumes
from layerwise.ops.facts import Counts, Dim, Extents, Gemm, Local, Maps, Parameter, Saved
from layerwise.ops.nn.windows import Windowed, given, interval, margins, padded
from layerwise.ops.specs import bound, resized
from layerwise.tensor import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

Pads = tuple[tuple[int, int], ...]  # (low, high) a spatial dimension
LARGE = 1 << 22  # multiply-adds of a convolution in 3-D; oneDNN is no faster below
SPATIAL = {1: ("l",), 2: ("h", "w"), 3: ("d", "h", "w")}  # usual labels, by how many there are


class _Convolution(Windowed):
    """The base of a convolution and a transposed one: groups of channels, and a bias after the reduction."""

    weights: ClassVar[bool] = True
    out_channels: int
    groups: int
    bias: bool

    def reductions(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Dim, ...]:
        (x,) = inputs
        return (Dim("k", x.shape[1], x.units[1]),) if self.groups == 1 else ()

    def finish(self, total: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        return _plus_bias(total, parameters.get("bias"))

    def check(self, x: TensorSpec) -> None:
        """Raises LayerwiseError if it cannot take such an input."""
        rank = len(self.kernel)
        if len(x.shape) != rank + 2:
            raise LayerwiseError(f"a {rank}-D convolution needs an input (n, c, {rank} spatial), not {x.describe()}")
        if x.shape[1] % self.groups or self.out_channels % self.groups:
            raise LayerwiseError(
                f"{x.shape[1]} -> {self.out_channels} channels do not divide into {self.groups} groups"
            )

    def made(self, x: TensorSpec, spatial: tuple[int, ...], unit: int = 1) -> TensorSpec:
        """The output spec with these spatial extents.

        Output channels are new: they can be split whether or not the input's could (unless their label is used
        elsewhere). So can positions that a view of the input binds: they get the labels of images and volumes.
        """
        out = resized(x, dict(enumerate(spatial, 2)))
        labels = [
            usual if bound(x, i) and usual not in x.dims else out.dims[i]
            for i, usual in enumerate(SPATIAL[len(spatial)], 2)
        ]
        dims = (x.dims[0], None if "c" in (x.dims[0], *labels) else "c", *labels)
        units = (x.units[0], unit, *(1 for _ in spatial))
        return TensorSpec((x.shape[0], self.out_channels, *spatial), dims, x.dtype, units)

    def channels(self, x: TensorSpec, out: TensorSpec) -> AxisMap:
        """The input channels of a box: those of its groups, or of its part of the reduction."""
        if self.groups == 1:
            return identity(x.shape[1], len(out.shape))
        per_group = self.out_channels // self.groups
        return scaled(self.out_channels, x.shape[1], 1, over=per_group, scale=x.shape[1] // self.groups)

    def weight_and_bias(self, shape: tuple[int, ...], maps: Maps) -> tuple[Parameter, ...]:
        """Weight and bias, initially uniform within 1/sqrt(fan in); torch.nn's _ConvNd takes fan in from weight[0]."""
        bound = prod(shape[1:]) ** -0.5
        weight = Parameter("weight", shape, maps, initial="uniform", scale=bound)
        channels = (identity(self.out_channels, 1),)
        bias = Parameter("bias", (self.out_channels,), channels, epilogue=True, initial="uniform", scale=bound)
        return (weight, bias) if self.bias else (weight,)

    def matrix(self, x: TensorSpec, e: Counts) -> tuple[Counts, Counts, Counts]:
        """Columns, depth and count of the implicit matrix product for boxes of extents `e`."""
        patch = prod(self.kernel)
        if self.groups == 1:
            return e[..., 1], e[..., -1] * patch, np.ones_like(e[..., 1])
        count = np.ceil(e[..., 1] / (self.out_channels // self.groups))
        return e[..., 1] / count, np.full_like(count, x.shape[1] // self.groups * patch), count


@dataclass(frozen=True, slots=True)
class Conv(_Convolution):
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
        self.check(x)
        spatial = tuple(
            (x.shape[i] + low + high - d * (k - 1) - 1) // s + 1 for i, k, s, d, (low, high) in self.windows(2)
        )
        if min(spatial) < 1:
            raise LayerwiseError(f"a kernel of {self.kernel} is larger than an input of {x.describe()}")
        return self.made(x, spatial)

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        (x,) = inputs
        spatial = tuple(
            window(out.shape[i], x.shape[i], i, stride=s, first=-low, last=(k - 1) * d - low)
            for i, k, s, d, (low, _) in self.windows(2)
        )
        return ((identity(x.shape[0], 0), self.channels(x, out), *spatial),)

    def parameters(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Parameter, ...]:
        per_group = inputs[0].shape[1] // self.groups
        depth = identity(per_group, len(out.shape)) if self.groups == 1 else whole(per_group)
        maps = (identity(self.out_channels, 1), depth, *map(whole, self.kernel))
        return self.weight_and_bias((self.out_channels, per_group, *self.kernel), maps)

    def gemms(self, inputs: Sequence[TensorSpec], extents: Extents) -> tuple[Gemm, ...]:
        """The implicit matrix product: rows are output positions, columns output channels, depth the input patch."""
        e = extents.astype(np.float64)
        columns, depth, count = self.matrix(inputs[0], e)
        return (Gemm(e[..., 0] * e[..., 2 : 2 + len(self.kernel)].prod(-1), columns, depth, count),)

    def saved(self, inputs: Sequence[TensorSpec], lo: Extents, hi: Extents) -> Saved:
        """Memory: border cells that symmetric padding cannot serve save a padded copy of their input."""
        (x,), more, around = inputs, np.ones(lo.shape[:-1]), np.ones(lo.shape[:-1], np.bool_)
        maps = self.needs(inputs, self.output(x))[0]
        for i, k, s, d, (low, _) in self.windows(2):
            first, last = maps[i](lo[..., i], hi[..., i])
            before = first - (lo[..., i] * s - low)
            after = (hi[..., i] - 1) * s + (k - 1) * d - low + 1 - last
            alike = (after <= before) & (before < after + s)
            more = more * np.where(alike, 1.0, (last - first + before + after) / np.maximum(last - first, 1))
            around &= alike | ((before >= 0) & (after >= 0))
        size = np.where(more > 1, volumes(maps, lo, hi) * more * x.item_bytes, 0.0)
        return Saved(inputs=size == 0, output=False, extra=size, between=size, padded=np.where(around, size, 0.0))

    def margins(self, local: Local) -> Mapping[int, tuple[int, int]]:
        _, explicit = local.once("padding", lambda: self._padding(local))
        return explicit if all(pad >= 0 for pair in explicit.values() for pad in pair) else {}

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        import torch
        from torch.nn import functional

        (x,), weight, bias, rank = inputs, parameters["weight"], parameters.get("bias"), len(self.kernel)
        native, explicit = local.once("padding", lambda: self._padding(local))
        x = padded(x, explicit) if explicit and not local.padded else x
        conv = (functional.conv1d, functional.conv2d, _onednn if _is_large(x, weight) else functional.conv3d)[rank - 1]
        runs = (
            ((1, weight.shape[0]),)
            if self.groups == 1
            else local.once("runs", lambda: _runs(*interval(local, 1), self.out_channels // self.groups))
        )
        if len(runs) == 1:
            return conv(x, weight, bias, self.stride, native, self.dilation, runs[0][0])
        per_group, rows = weight.shape[1], [groups * channels for groups, channels in runs]
        parts = zip(
            torch.split(x, [groups * per_group for groups, _ in runs], 1),
            torch.split(weight, rows),
            [None] * len(runs) if bias is None else torch.split(bias, rows),
            runs,
            strict=True,
        )
        return torch.cat([conv(p, w, b, self.stride, native, self.dilation, n) for p, w, b, (n, _) in parts], 1)

    def _padding(self, local: Local) -> tuple[list[int], dict[int, tuple[int, int]]]:
        """The padding that PyTorch adds on both sides, by dimension, and (low, high) padding to add before."""
        native, explicit = [], {}
        for i, k, s, d, (low, _) in self.windows(2):
            lo, hi = given(local, i)
            before, after = margins(interval(local, i), (lo, hi), s, -low, (k - 1) * d - low)
            # If padding by `before` on both sides adds no window, nothing needs to be copied.
            alike = hi > lo and after <= before < after + s
            native.append(before if alike else 0)
            if not alike:
                explicit[i] = (before, after)
        return native, explicit


def _is_large(x: Tensor, weight: Tensor) -> bool:
    """True for a convolution in 3-D on a CPU that is worth oneDNN's kernel.

    PyTorch has its own kernel, half as fast, where n * c * d * h is at most 20480, however wide the input is: boxes are
    often so small where the full input is not (aten/src/ATen/native/Convolution.cpp, `use_mkldnn`).
    """
    import torch

    if x.dim() != 5 or x.device.type != "cpu" or x.dtype != torch.float32 or max(weight.shape[2:]) == 1:
        return False
    mkldnn: Any = torch.backends.mkldnn
    if not (mkldnn.is_available() and mkldnn.enabled) or torch.compiler.is_compiling():
        return False
    return not torch.is_autocast_enabled("cpu") and x.numel() * weight.shape[0] * prod(weight.shape[2:]) > LARGE


def _onednn(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    import torch

    mkldnn: Any = torch.mkldnn_convolution
    result: Tensor = mkldnn(x, weight, bias, padding, stride, dilation, groups)
    return result


@dataclass(frozen=True, slots=True)
class ConvTranspose(_Convolution):
    """The adjoint of a convolution: (n, c, *spatial) with (c, out_channels/groups, *kernel)."""

    kind: ClassVar[str] = "conv_transpose"
    saves: ClassVar[Saved] = Saved(output=False)
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
        self.check(x)
        spatial = tuple(
            (x.shape[i] - 1) * s - low - high + d * (k - 1) + extra + 1
            for (i, k, s, d, (low, high)), extra in zip(self.windows(2), self.output_padding, strict=True)
        )
        # weight[:, j] serves channel j of every group, so groups stay whole, or devices would share parts of weights.
        unit = 1 if self.groups == 1 else self.out_channels // self.groups
        return self.made(x, spatial, unit)

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        (x,) = inputs
        # Output y is reached from x where y = x*stride - low + tap*dilation:
        # ceil((y + low - reach)/stride) .. (y + low)//stride.
        spatial = tuple(
            window(out.shape[i], x.shape[i], i, first=low - (k - 1) * d + s - 1, last=low, over=s)
            for i, k, s, d, (low, _) in self.windows(2)
        )
        return ((identity(x.shape[0], 0), self.channels(x, out), *spatial),)

    def parameters(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Parameter, ...]:
        channels, per_group = inputs[0].shape[1], self.out_channels // self.groups
        if self.groups == 1:
            maps: Maps = (identity(channels, len(out.shape)), identity(per_group, 1))
        else:  # weight[:, j] serves output channel g*per_group + j of every group g: inputs by group, outputs in full
            maps = (self.channels(inputs[0], out), whole(per_group))
        return self.weight_and_bias((channels, per_group, *self.kernel), (*maps, *map(whole, self.kernel)))

    def gemms(self, inputs: Sequence[TensorSpec], extents: Extents) -> tuple[Gemm, ...]:
        """Every input position is multiplied into a patch of the output, then the patches are added."""
        e = extents.astype(np.float64)
        columns, depth, count = self.matrix(inputs[0], e)
        # Each output element sums kernel/stride taps of every input channel (on average).
        taps = prod(self.kernel) / prod(self.stride)
        rows = e[..., 0] * e[..., 2 : 2 + len(self.kernel)].prod(-1)
        return (Gemm(rows, columns, depth / prod(self.kernel) * taps, count),)

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        """Tap t of input x reaches output x*stride - low + t*dilation; positions outside the cell are cropped."""
        from torch.nn import functional

        (x,), weight, bias = inputs, parameters["weight"], parameters.get("bias")
        crop, extra, rest = [], [], {}
        for i, k, s, d, (low, _) in self.windows(2):
            (lo, hi), start = interval(local, i), given(local, i)[0] * s - low
            if x.shape[i] == 0:  # no input reaches these outputs: use a zero
                x, start = padded(x, {i: (0, 1)}), lo
            before, after = lo - start, start + (x.shape[i] - 1) * s + (k - 1) * d + 1 - hi  # positions too many
            # PyTorch crops both ends equally, then adds less than a stride (or dilation) at the high end.
            both = before if 0 <= before - after < max(s, d) else min(before, after)
            crop.append(max(both, 0))
            extra.append(before - after if both == before > after else 0)
            rest[i] = (crop[-1] - before, crop[-1] - after - extra[-1])
        convs = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)
        groups = 1 if self.groups == 1 else (interval(local, 1)[1] - interval(local, 1)[0]) // weight.shape[1]
        late = any(pad > 0 for pair in rest.values() for pad in pair)  # the bias also belongs where zeros are added
        out = convs[len(self.kernel) - 1](
            x, weight, None if late else bias, self.stride, crop, extra, groups, self.dilation
        )
        return _plus_bias(padded(out, rest), bias if late else None)


@lru_cache(maxsize=4096)
def _runs(lo: int, hi: int, per_group: int) -> tuple[tuple[int, int], ...]:
    """Output channels lo .. hi as runs of (groups, channels of each): one grouped convolution computes a run."""
    counts = [min(hi, g + per_group) - max(lo, g) for g in range(lo // per_group * per_group, hi, per_group)]
    return tuple((len(list(run)), channels) for channels, run in groupby(counts))


def _plus_bias(total: Tensor, bias: Tensor | None) -> Tensor:
    return total if bias is None else total + bias.view(-1, *(1,) * (total.dim() - 2)).to(total.dtype)
