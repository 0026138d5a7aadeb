"""Views: reshape, permute, slice, select, expand. They move nothing; fuse.py folds them into their consumers.

Whoever reads a view gathers a box of the tensor behind it. So a dimension of a view is split only if that leaves a box
behind it, as `unit` says: for (n=4, c=6, 5, 5) flattened to (n=4, c=150), c is split at multiples of 25. A dimension
that cannot be split has no label and a unit of its extent ("bound"); one without a label and with unit 1 is merely
unnamed, and a consumer may reduce over parts of it. Consumers whose cells end elsewhere read more than their part:
windows over merged positions, convolutions and sums over bound dimensions (`specs`).
https://pytorch.org/docs/stable/tensor_view.html
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from layerwise.errors import LayerwiseError
from layerwise.geometry import AxisMap, fixed, identity, whole, window
from layerwise.geometry.axis import IntervalMap
from layerwise.ops.base import Op
from layerwise.ops.facts import Local, Maps, Saved
from layerwise.ops.specs import POSITIONS, broadcast, dim_index, only
from layerwise.ops.tensor.merge import heads, ones, reshaped, starts
from layerwise.tensor import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


class View(Op):
    """An operator that only renames positions: no parameters, no FLOPs."""

    saves: ClassVar[Saved] = Saved(inputs=False, output=False, through=True)
    view: ClassVar[bool] = True
    arithmetic: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Reshape(View):
    """A view of the elements, in row-major order, in another shape (flatten, view, squeeze, unsqueeze, unflatten).

    If a dimension of the input and one of the output start at the same stride, their outer parts match and share the
    label. Inner parts are split only together with their outer part. Dimensions of size 1 come and go.
    """

    kind: ClassVar[str] = "reshape"
    shape: tuple[int, ...]

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        (x,) = inputs
        if prod(self.shape) != x.volume:
            raise LayerwiseError(f"{x.describe()} has {x.volume} elements, which do not reshape to {self.shape}")
        dims: list[str | None] = [None] * len(self.shape)
        units = list(self.shape)
        for i, j, inner, out_inner in heads(x.shape, self.shape):
            cut = inner * x.units[i]  # elements from one legal split of the input to the next
            units[j] = cut // gcd(cut, out_inner)
            if units[j] < self.shape[j] or x.dims[i] == "n":  # n also if there is one unit: `rebatch` follows it
                dims[j] = x.dims[i]
        # The samples last: a batch of 1 keeps its label before all others.
        for i, j in sorted(ones(x, self.shape).items(), key=lambda pair: x.dims[pair[0]] == "n"):
            dims[j] = x.dims[i]
        return TensorSpec(self.shape, tuple(dims), x.dtype, tuple(units))

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        (x,) = inputs
        maps = [whole(extent) for extent in x.shape]
        for i, j, inner, out_inner in heads(x.shape, self.shape):
            common = gcd(inner, out_inner)
            over, stride = inner // common, out_inner // common
            if over == stride:
                maps[i] = identity(x.shape[i], j)
            else:
                maps[i] = window(self.shape[j], x.shape[i], j, stride=stride, last=stride - 1, over=over)
        for i, j in ones(x, self.shape).items():
            # So that an empty cell needs nothing (concat). One dimension drives at most one.
            if all(m.source != j for other, m in enumerate(maps) if other != i):
                maps[i] = identity(1, j)
        return (tuple(maps),)

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        return reshaped(inputs[0], local.specs[0].shape, local.needs[0], self.shape, local.out)

    def rebatch(self, inputs: Sequence[TensorSpec], out: TensorSpec, new_inputs: Sequence[TensorSpec]) -> Op:
        (x,), (y,) = inputs, new_inputs
        grown = [i for i, (old, new) in enumerate(zip(x.shape, y.shape, strict=True)) if old != new]
        if not grown:
            return self
        if len(grown) > 1:
            raise LayerwiseError(f"a reshape of {x.describe()} to {self.shape} cannot be adapted to {y.describe()}")
        (i,) = grown
        j = _samples(x, y, i, out)
        extent, rest = divmod(self.shape[j] * y.shape[i], x.shape[i])
        if rest:
            raise LayerwiseError(f"a reshape of {x.describe()} to {self.shape} cannot be adapted to {y.describe()}")
        return Reshape((*self.shape[:j], extent, *self.shape[j + 1 :]))


@dataclass(frozen=True, slots=True)
class Permute(View):
    """Output dimension i is input dimension order[i] (numpy's and ONNX's transpose)."""

    kind: ClassVar[str] = "permute"
    order: tuple[int, ...]

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        (x,) = inputs
        return only(x, self._order(x))

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        order = self._order(inputs[0])
        return (tuple(identity(extent, order.index(i)) for i, extent in enumerate(inputs[0].shape)),)

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        return inputs[0].permute(self._order(local.specs[0]))

    def _order(self, x: TensorSpec) -> tuple[int, ...]:
        order = tuple(dim_index(i, x) for i in self.order)
        if sorted(order) != list(range(len(x.shape))):
            raise LayerwiseError(f"{self.order} is not a permutation of the dimensions of {x.describe()}")
        return order


@dataclass(frozen=True, slots=True)
class Slice(View):
    """x[start:stop:step] of one dimension, by Python's rules (negative counts from the end, too far is clipped)."""

    kind: ClassVar[str] = "slice"
    dim: int
    start: int
    stop: int
    step: int = 1

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        (x,) = inputs
        dim, taken = self._taken(x)
        unit = gcd(x.units[dim], taken.start, len(taken))
        label = x.dims[dim]
        amid = unit < x.units[dim]  # a cell can end within a unit of the input
        if taken.step < 0 or (x.units[dim] > 1 and taken.step > 1) or (amid and label not in POSITIONS):
            label, unit = None, len(taken)
        return _changed(x, dim, len(taken), label, unit)

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        (x,) = inputs
        dim, taken = self._taken(x)
        maps = [identity(extent, i) for i, extent in enumerate(x.shape)]
        if taken.step < 0:
            maps[dim] = AxisMap(1, None, (IntervalMap(x.shape[dim], first=taken[-1], last=taken[0]),))
        elif len(taken) < x.shape[dim]:
            maps[dim] = window(len(taken), x.shape[dim], dim, stride=taken.step, first=taken.start, last=taken.start)
        return (tuple(maps),)

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        (x,) = inputs
        dim, taken = self._taken(local.specs[0])
        mine = taken[local.cell.lo[dim] : local.cell.hi[dim]]
        if not mine:
            return x.narrow(dim, 0, 0)
        first = min(mine[0], mine[-1]) - local.needs[0].lo[dim]
        x = x[(slice(None),) * dim + (slice(first, first + abs(mine[-1] - mine[0]) + 1, abs(taken.step)),)]
        return x if taken.step > 0 else x.flip(dim)

    def rebatch(self, inputs: Sequence[TensorSpec], out: TensorSpec, new_inputs: Sequence[TensorSpec]) -> Op:
        """A part of the samples (a chunk of the batch, all in reverse) stays that part; other slices do not change."""
        (x,), (y,) = inputs, new_inputs
        dim, taken = self._taken(x)
        old, new = x.shape[dim], y.shape[dim]
        if old == new:
            return self
        if self.step == -1 and len(taken) == old:
            return replace(self, start=new - 1, stop=-new - 1)
        ends = [divmod(end * new, old) for end in (taken.start, min(taken.stop, old))]
        if self.step < 0 or any(rest for _, rest in ends):
            named = f"a slice {self.start}:{self.stop} of {x.describe()}"
            raise LayerwiseError(f"{named} cannot be adapted to {y.describe()}")
        return replace(self, start=ends[0][0], stop=ends[1][0])

    def _taken(self, x: TensorSpec) -> tuple[int, range]:
        dim = dim_index(self.dim, x)
        if self.step == 0:
            raise LayerwiseError("the step of a slice cannot be 0")
        taken = range(*slice(self.start, self.stop, self.step).indices(x.shape[dim]))
        if not taken:
            raise LayerwiseError(f"a slice {self.start}:{self.stop} of dimension {dim} of {x.describe()} is empty")
        return dim, taken


@dataclass(frozen=True, slots=True)
class Select(View):
    """x[index] of one dimension, which disappears."""

    kind: ClassVar[str] = "select"
    dim: int
    index: int

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        (x,) = inputs
        dim = dim_index(self.dim, x)
        self._index(x, dim)
        return only(x, [i for i in range(len(x.shape)) if i != dim])

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        (x,) = inputs
        dim = dim_index(self.dim, x)
        maps = [identity(extent, i - (i > dim)) for i, extent in enumerate(x.shape)]
        maps[dim] = fixed(x.shape[dim], self._index(x, dim))
        return (tuple(maps),)

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        dim = dim_index(self.dim, local.specs[0])
        return inputs[0].select(dim, self._index(local.specs[0], dim) - local.needs[0].lo[dim])

    def _index(self, x: TensorSpec, dim: int) -> int:
        extent = x.shape[dim]
        if not -extent <= self.index < extent:
            raise LayerwiseError(f"index {self.index} is out of range for dimension {dim} of {x.describe()}")
        return self.index % extent


@dataclass(frozen=True, slots=True)
class Expand(View):
    """Broadcast to `shape` by numpy's rule (ONNX Expand, torch.expand; -1 keeps an extent, as 1 does).

    `samples`: dimension 0 is repeated for each sample, though the input has no samples (a class token). Such an
    operator follows the batch by `at_batch`; its input does not change.
    """

    kind: ClassVar[str] = "expand"
    shape: tuple[int, ...]
    samples: bool = False

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        (x,) = inputs
        try:
            shape = np.broadcast_shapes(x.shape, tuple(1 if s == -1 else s for s in self.shape))
        except ValueError:
            raise LayerwiseError(f"{x.describe()} cannot be expanded to {self.shape}") from None
        skip = len(shape) - len(x.shape)
        kept = [i >= skip and x.shape[i - skip] == extent for i, extent in enumerate(shape)]
        dims = [x.dims[i - skip] if keep else None for i, keep in enumerate(kept)]
        if self.samples and "n" not in dims:
            dims[0] = "n"
        units = tuple(x.units[i - skip] if keep else 1 for i, keep in enumerate(kept))
        return TensorSpec(shape, tuple(dims), x.dtype, units)

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        return (broadcast(inputs[0], out),)

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        return inputs[0].expand(local.out.shape)

    def rebatch(self, inputs: Sequence[TensorSpec], out: TensorSpec, new_inputs: Sequence[TensorSpec]) -> Op:
        """A named extent that was the input's stays the input's."""
        shape = list(self.shape)
        for old, new, j in zip(
            reversed(inputs[0].shape), reversed(new_inputs[0].shape), reversed(range(len(shape))), strict=False
        ):
            if old != new and shape[j] == old:
                shape[j] = new
        return replace(self, shape=tuple(shape))

    def at_batch(self, old: int, new: int) -> Op:
        return replace(self, shape=(new, *self.shape[1:])) if self.samples else self


def _changed(x: TensorSpec, dim: int, extent: int, label: str | None, unit: int) -> TensorSpec:
    """The spec with another extent, label and unit of dimension `at`."""
    shape, dims, units = list(x.shape), list(x.dims), list(x.units)
    shape[dim], dims[dim], units[dim] = extent, label, unit
    return TensorSpec(tuple(shape), tuple(dims), x.dtype, tuple(units))


def _samples(x: TensorSpec, y: TensorSpec, i: int, out: TensorSpec) -> int:
    """The dimension of `out`, a reshape of x, that grows when dimension i of x grows to that of y.

    The samples are the outer part of dimension i if that is labelled n (before or after: a batch of 1 leaves its label
    to what it was merged with); else they begin inside its unit, which has grown with them.
    """
    named = out.index("n")
    if x.dims[i] == "n" and named is not None:
        return named
    begin = starts(x.shape)[i]
    if "n" not in (x.dims[i], y.dims[i]):
        begin *= x.shape[i] // max(x.units[i], y.units[i] * x.shape[i] // y.shape[i])
    begins = starts(out.shape)
    there = next((j for j, start in enumerate(begins) if start == begin), None)
    if there is not None and not _absorbed(x, i, out.shape[there]):
        return there  # a dimension of size 1 (a batch of 1 written into the network) before all others
    return max(j for j, start in enumerate(begins) if start < begin)


def _absorbed(x: TensorSpec, i: int, follows: int) -> bool:
    """True if a batch of 1 in the middle was merged into what precedes it: (s, n=1, c) -> (s, c).

    No trace of it is left. It stays before what follows if that was split: (s, n=1, c) -> (s, heads, c / heads).
    """
    outside = any(extent > 1 for extent in x.shape[:i])
    after = next((extent for extent in x.shape[i:] if extent > 1), 1)
    return x.shape[i] == 1 and outside and 1 < after <= follows
