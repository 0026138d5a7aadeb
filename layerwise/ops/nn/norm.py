"""Normalizations. https://pytorch.org/docs/stable/nn.html#normalization-layers

Batch, group and instance norm are element-wise once their statistics are known. These are all-reduced among the
operator's own cells (the geometry gives the count, so there are two numbers a key: sum and sum of squares), which is
why space and batch may be split. Layer and RMS norm instead keep their dimensions, which are short, unsplit.

FLOPs an element: mean 1, variance 3 (subtract, square, add), normalize 2, scale and shift 1 each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm, prod
from typing import TYPE_CHECKING, ClassVar

from layerwise.errors import LayerwiseError
from layerwise.geometry import identity, whole, window
from layerwise.ops.base import Op, volumes
from layerwise.ops.facts import Counts, Extents, Local, Maps, Parameter, Saved, Statistics
from layerwise.ops.nn.statistics import Samples, normalised, update
from layerwise.ops.specs import same
from layerwise.tensor import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


class _Norm(Op):
    """A normalization, whose backward pass reads its input and a few numbers of statistics."""

    saves: ClassVar[Saved] = Saved(output=False)


class _ChannelNorm(_Norm):
    """Normalizes channels (dimension 1), each with its own weight, bias, running mean and variance."""

    pointwise: ClassVar[bool] = True
    affine: bool = True
    track: bool = False

    @property
    def remembers(self) -> bool:
        return self.track

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        return _channelled(self, inputs[0])

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        return (same(inputs[0]),)

    def parameters(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Parameter, ...]:
        names = (*_NAMES[:2],) * self.affine + (*_NAMES[2:],) * self.track
        maps = (identity(out.shape[1], 1),)
        return tuple(
            Parameter(name, out.shape[1:2], maps, name in _NAMES[:2], epilogue=True, scale=_initial(name))
            for name in names
        )

    def flops(self, inputs: Sequence[TensorSpec], extents: Extents) -> Counts:
        return Op.flops(self, inputs, extents) * (8 if self.affine else 6)


class _TrailingNorm(_Norm):
    """Normalizes over the last `rank` dimensions, which are therefore not split."""

    rank: int

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        (x,) = inputs
        if not 1 <= self.rank <= len(x.shape):
            raise LayerwiseError(f"cannot normalize over the last {self.rank} dimensions of {x.describe()}")
        return x

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        return (same(out, self.unsplit(inputs, out)),)

    def unsplit(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> frozenset[int]:
        return frozenset(range(len(out.shape) - self.rank, len(out.shape)))


@dataclass(frozen=True, slots=True)
class BatchNorm(_ChannelNorm):
    """Normalizes every channel (dimension 1) over all else. `track`: updates running statistics, with `momentum`.

    Evaluation uses these; training updates them in place.
    """

    kind: ClassVar[str] = "batch_norm"
    local_statistics: ClassVar[bool] = True
    affine: bool = True
    eps: float = 1e-5
    momentum: float | None = 0.1
    track: bool = True

    def statistics(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> Statistics | None:
        return _statistics(out, keys=(1,))

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        import torch.nn.functional as F

        (x,) = inputs
        weight, bias, *running = (parameters.get(name) for name in _NAMES)
        mean, var = running
        if self.track and not local.training:
            return F.batch_norm(x, mean, var, weight, bias, False, 0.0, self.eps)
        if self.track and self.momentum is None:
            raise LayerwiseError(
                "batch norm with momentum=None (cumulative averages) cannot be trained: set a momentum"
            )
        momentum = self.momentum or 0.0
        if local.all_reduce is None:
            return F.batch_norm(x, mean, var, weight, bias, True, momentum, self.eps)
        count = local.space.out.volume // local.space.out.shape[1]
        result = normalised(x, weight, bias, count=count, eps=self.eps, all_reduce=local.all_reduce, shift=mean)
        if mean is not None and var is not None:
            update((mean, var), *result[1:], count=count, momentum=momentum)
        return result[0]


@dataclass(frozen=True, slots=True)
class GroupNorm(_ChannelNorm):
    """Normalizes every group of channels of every sample. Channels are split only between groups."""

    kind: ClassVar[str] = "group_norm"
    groups: int
    affine: bool = True
    eps: float = 1e-5

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        x = _channelled(self, inputs[0])
        if x.shape[1] % self.groups:
            raise LayerwiseError(f"{x.shape[1]} channels do not divide into {self.groups} groups")
        units = list(x.units)
        units[1] = lcm(units[1], x.shape[1] // self.groups)
        return replace(x, units=tuple(units))

    def statistics(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> Statistics | None:
        return _statistics(out, keys=(0, 1), block=out.shape[1] // self.groups)

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        import torch

        (x,) = inputs
        shape = local.space.out.shape
        block = shape[1] // self.groups
        weight, bias = parameters.get("weight"), parameters.get("bias")
        if local.all_reduce is None:
            # torch.nn's group_norm refuses one number a group. It has accepted the full tensor when traced, and a cell
            # may be that small.
            return torch.group_norm(x, x.shape[1] // block, weight, bias, self.eps)
        channels = x.reshape(1, x.shape[0] * x.shape[1] // block, -1)  # one for every sample and group
        count = block * prod(shape[2:])
        y, *_ = normalised(channels, None, None, count=count, eps=self.eps, all_reduce=local.all_reduce)
        if weight is None or bias is None:
            return y.view(x.shape)
        along, y = (-1, *(1,) * (len(shape) - 2)), y.view(x.shape)
        into = None if torch.is_grad_enabled() else y  # nobody else holds it
        return torch.addcmul(bias.view(along), y, weight.view(along), out=into).to(x.dtype)


@dataclass(frozen=True, slots=True)
class InstanceNorm(_ChannelNorm):
    """Normalizes every channel of every sample.

    With `track` the running statistics are means over all samples of the batch, which every device then needs.
    """

    kind: ClassVar[str] = "instance_norm"
    affine: bool = False
    eps: float = 1e-5
    track: bool = False
    momentum: float = 0.1

    def statistics(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> Statistics | None:
        return _statistics(out, keys=(1,), samples=out.shape[0]) if self.track else _statistics(out, keys=(0, 1))

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        import torch.nn.functional as F

        (x,) = inputs
        weight, bias, *running = (parameters.get(name) for name in _NAMES)
        mean, var = running
        if local.all_reduce is None or (self.track and not local.training):
            own = local.training or not self.track
            return F.instance_norm(x, mean, var, weight, bias, own, self.momentum, self.eps)
        samples, channels = x.shape[:2]
        weight, bias, shift = (t if t is None else t.repeat(samples) for t in (weight, bias, mean))
        each = x.reshape(1, samples * channels, *x.shape[2:])
        count = prod(local.space.out.shape[2:])
        if mean is None or var is None:
            y, *_ = normalised(each, weight, bias, count=count, eps=self.eps, all_reduce=local.all_reduce)
            return y.view(x.shape)
        samples_of_all = Samples(local.all_reduce, local.space.out.shape[0], slice(local.out.lo[0], local.out.hi[0]))
        y, *_ = normalised(each, weight, bias, count=count, eps=self.eps, all_reduce=samples_of_all, shift=shift)
        update((mean, var), *samples_of_all.averages(mean, count), count=count, momentum=self.momentum)
        return y.view(x.shape)


@dataclass(frozen=True, slots=True)
class LayerNorm(_TrailingNorm):
    """Subtracts the mean and divides by the standard deviation, over the last `rank` dimensions."""

    kind: ClassVar[str] = "layer_norm"
    rank: int
    weight: bool = True
    bias: bool = True
    eps: float = 1e-5

    def parameters(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Parameter, ...]:
        names = [name for name, given in (("weight", self.weight), ("bias", self.bias)) if given]
        return tuple(_trailing(name, out, self.rank) for name in names)

    def flops(self, inputs: Sequence[TensorSpec], extents: Extents) -> Counts:
        return Op.flops(self, inputs, extents) * (6 + self.weight + self.bias)

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        import torch.nn.functional as F

        (x,) = inputs
        return F.layer_norm(x, x.shape[-self.rank :], parameters.get("weight"), parameters.get("bias"), self.eps)


@dataclass(frozen=True, slots=True)
class RMSNorm(_TrailingNorm):
    """Divides by the root mean square over the last `rank` dimensions. `eps` None: the element type's."""

    kind: ClassVar[str] = "rms_norm"
    rank: int
    weight: bool = True
    eps: float | None = None

    def parameters(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Parameter, ...]:
        return (_trailing("weight", out, self.rank),) if self.weight else ()

    def flops(self, inputs: Sequence[TensorSpec], extents: Extents) -> Counts:
        """Square, add, divide; scale."""
        return Op.flops(self, inputs, extents) * (3 + self.weight)

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        import torch.nn.functional as F

        (x,) = inputs
        return F.rms_norm(x, x.shape[-self.rank :], parameters.get("weight"), self.eps)


@dataclass(frozen=True, slots=True)
class LocalResponseNorm(Op):
    """x / (k + alpha/size * sum of x² over `size` channels)^beta: Krizhevsky et al. 2012, section 3.3.

    The window begins `before` channels earlier: size//2 in PyTorch (the default), (size - 1)//2 in ONNX, which is the
    same for odd sizes.
    """

    kind: ClassVar[str] = "local_response_norm"
    size: int
    alpha: float = 1e-4
    beta: float = 0.75
    k: float = 1.0
    before: int | None = None

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        x = _channelled(self, inputs[0])
        if x.units[1] == 1:
            return x
        # As for convolutions over merged dimensions: windows do not end at multiples of the unit.
        dims, units = list(x.dims), list(x.units)
        dims[1], units[1] = None, 1
        return replace(x, dims=tuple(dims), units=tuple(units))

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        before = self.size // 2 if self.before is None else self.before
        maps = list(same(inputs[0]))
        maps[1] = window(out.shape[1], out.shape[1], 1, first=-before, last=self.size - 1 - before)
        return (tuple(maps),)

    def flops(self, inputs: Sequence[TensorSpec], extents: Extents) -> Counts:
        """Square, sum, scale and shift, power, divide."""
        return Op.flops(self, inputs, extents) * (self.size + 5)

    def saved(self, inputs: Sequence[TensorSpec], lo: Extents, hi: Extents) -> Saved:
        """Memory: padded squares, the divisor and its power, in several kernels."""
        whole = 1.0 * volumes(self.needs(inputs, inputs[0])[0], lo, hi) * inputs[0].item_bytes
        return Saved(output=False, extra=3 * whole, forward=2 * whole, between=3 * whole)

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        import torch.nn.functional as F

        (x,) = inputs
        before = self.size // 2 if self.before is None else self.before
        if before == self.size // 2 and x.dim() > 2:
            y = F.local_response_norm(x, self.size, self.alpha, self.beta, self.k)
        else:
            squares = F.pad(x.square().reshape(*x.shape[:2], -1), (0, 0, before, self.size - 1 - before)).unsqueeze(1)
            means = F.avg_pool2d(squares, (self.size, 1), stride=1).view(x.shape)
            y = x / (means * self.alpha + self.k) ** self.beta
        # without the neighbours' channels
        return y.narrow(1, local.cell.lo[1] - local.needs[0].lo[1], local.out.shape[1])


_NAMES = ("weight", "bias", "running_mean", "running_var")


def _channelled(op: Op, x: TensorSpec) -> TensorSpec:
    if len(x.shape) < 2:
        raise LayerwiseError(f"{op.kind} needs an input (n, c, ...), not {x.describe()}")
    return x


def _trailing(name: str, out: TensorSpec, rank: int) -> Parameter:
    shape = out.shape[len(out.shape) - rank :]
    return Parameter(name, shape, tuple(map(whole, shape)), epilogue=True, scale=_initial(name))


def _initial(name: str) -> float:
    return 1.0 if name in ("weight", "running_var") else 0.0


def _statistics(out: TensorSpec, keys: tuple[int, ...], block: int = 1, samples: int = 1) -> Statistics | None:
    """Sum and sum of squares for every key (and each of `samples`), over all other dimensions that can be split."""
    over = tuple(i for i, label in enumerate(out.dims) if label and i not in keys)
    return Statistics(over, keys, 2 * samples, block) if over else None
