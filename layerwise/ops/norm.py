"""Normalisations. https://pytorch.org/docs/stable/nn.html#normalization-layers

Batch, group and instance norm are element-wise once their statistics are known. These are an all-reduce among the
operator's own cells (a count is known from the geometry, so two numbers a key: sum and sum of squares), which is why
space and batch may be split. Layer and RMS norm keep their dimensions whole instead: these are short.

FLOPs an element: mean 1, variance 3 (subtract, square, add), normalise 2, scale and shift 1 each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import ClassVar

from layerwise.errors import LayerwiseError
from layerwise.geometry import identity, whole, window
from layerwise.ops.base import Counts, Extents, Maps, Op, Parameter, Statistics, same
from layerwise.tensor import TensorSpec


@dataclass(frozen=True, slots=True)
class BatchNorm(Op):
    """Normalises every channel (dimension 1) over all else. `track`: keeps running statistics, of `momentum`."""

    kind: ClassVar[str] = "batch_norm"
    pointwise: ClassVar[bool] = True
    affine: bool = True
    eps: float = 1e-5
    momentum: float | None = 0.1
    track: bool = True

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        return _channelled(self, inputs[0])

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        return (same(inputs[0]),)

    def parameters(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Parameter, ...]:
        return _per_channel(out, self.affine, self.track)

    def statistics(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> Statistics | None:
        return _statistics(out, keys=(1,))

    def flops(self, inputs: Sequence[TensorSpec], extents: Extents) -> Counts:
        return Op.flops(self, inputs, extents) * (8 if self.affine else 6)


@dataclass(frozen=True, slots=True)
class GroupNorm(Op):
    """Normalises every group of channels of every sample. Channels are cut between groups only."""

    kind: ClassVar[str] = "group_norm"
    pointwise: ClassVar[bool] = True
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

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        return (same(inputs[0]),)

    def parameters(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Parameter, ...]:
        return _per_channel(out, self.affine, track=False)

    def statistics(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> Statistics | None:
        return _statistics(out, keys=(0, 1), block=out.shape[1] // self.groups)

    def flops(self, inputs: Sequence[TensorSpec], extents: Extents) -> Counts:
        return Op.flops(self, inputs, extents) * (8 if self.affine else 6)


@dataclass(frozen=True, slots=True)
class InstanceNorm(Op):
    """Normalises every channel of every sample.

    With `track` the running statistics are means over the samples of the batch: of the cells that split n, too, which
    `statistics` does not count (c numbers each).
    """

    kind: ClassVar[str] = "instance_norm"
    pointwise: ClassVar[bool] = True
    affine: bool = False
    eps: float = 1e-5
    track: bool = False

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        return _channelled(self, inputs[0])

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        return (same(inputs[0]),)

    def parameters(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Parameter, ...]:
        return _per_channel(out, self.affine, self.track)

    def statistics(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> Statistics | None:
        return _statistics(out, keys=(0, 1))

    def flops(self, inputs: Sequence[TensorSpec], extents: Extents) -> Counts:
        return Op.flops(self, inputs, extents) * (8 if self.affine else 6)


@dataclass(frozen=True, slots=True)
class LayerNorm(Op):
    """Normalises over the last `rank` dimensions, which are therefore not split."""

    kind: ClassVar[str] = "layer_norm"
    rank: int
    weight: bool = True
    bias: bool = True
    eps: float = 1e-5

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        return _ranked(inputs[0], self.rank)

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        return (_whole_from(out, len(out.shape) - self.rank),)

    def unsplit(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> frozenset[int]:
        return frozenset(range(len(out.shape) - self.rank, len(out.shape)))

    def parameters(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Parameter, ...]:
        names = [name for name, given in (("weight", self.weight), ("bias", self.bias)) if given]
        return tuple(_trailing(name, out, self.rank) for name in names)

    def flops(self, inputs: Sequence[TensorSpec], extents: Extents) -> Counts:
        return Op.flops(self, inputs, extents) * (6 + self.weight + self.bias)


@dataclass(frozen=True, slots=True)
class RMSNorm(Op):
    """Divides by the root of the mean square over the last `rank` dimensions. `eps` None: that of the element type."""

    kind: ClassVar[str] = "rms_norm"
    rank: int
    weight: bool = True
    eps: float | None = None

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        return _ranked(inputs[0], self.rank)

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        return (_whole_from(out, len(out.shape) - self.rank),)

    def unsplit(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> frozenset[int]:
        return frozenset(range(len(out.shape) - self.rank, len(out.shape)))

    def parameters(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Parameter, ...]:
        return (_trailing("weight", out, self.rank),) if self.weight else ()

    def flops(self, inputs: Sequence[TensorSpec], extents: Extents) -> Counts:
        """Square, add, divide; scale."""
        return Op.flops(self, inputs, extents) * (3 + self.weight)


@dataclass(frozen=True, slots=True)
class LocalResponseNorm(Op):
    """x / (k + alpha/size * sum of x² over `size` channels)^beta: Krizhevsky et al. 2012, section 3.3.

    The window begins `before` channels earlier: size//2 in PyTorch (the default), (size - 1)//2 in ONNX, which is
    the same for odd sizes.
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
        # As convolutions over merged dimensions: windows do not end at multiples of the unit.
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


def _channelled(op: Op, x: TensorSpec) -> TensorSpec:
    if len(x.shape) < 2:
        raise LayerwiseError(f"{op.kind} needs an input (n, c, ...), not {x.describe()}")
    return x


def _ranked(x: TensorSpec, rank: int) -> TensorSpec:
    if not 1 <= rank <= len(x.shape):
        raise LayerwiseError(f"cannot normalise over the last {rank} dimensions of {x.describe()}")
    return x


def _per_channel(out: TensorSpec, affine: bool, track: bool) -> tuple[Parameter, ...]:
    """Weight and bias, running mean and variance. Used where the output lies: late."""
    names = [(name, True) for name in ("weight", "bias") if affine]
    names += [(name, False) for name in ("running_mean", "running_var") if track]
    channels = out.shape[1]
    return tuple(Parameter(name, (channels,), (identity(channels, 1),), trained, late=True) for name, trained in names)


def _trailing(name: str, out: TensorSpec, rank: int) -> Parameter:
    shape = out.shape[len(out.shape) - rank :]
    return Parameter(name, shape, tuple(map(whole, shape)), late=True)


def _whole_from(out: TensorSpec, first: int) -> Maps:
    return tuple(m if i < first else whole(out.shape[i]) for i, m in enumerate(same(out)))


def _statistics(out: TensorSpec, keys: tuple[int, ...], block: int = 1) -> Statistics | None:
    """Sum and sum of squares for every key, over all other dimensions that can be split."""
    over = tuple(i for i, label in enumerate(out.dims) if label and i not in keys)
    return Statistics(over, keys, 2, block) if over else None
