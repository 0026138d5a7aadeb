"""Operators along one dimension: cumulative sums, softmax, elements read or written by position.

https://pytorch.org/docs/stable/generated/torch.cumsum.html, torch.gather.html, torch.Tensor.scatter_.html
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import lcm
from typing import TYPE_CHECKING, ClassVar, Literal

from layerwise.errors import LayerwiseError
from layerwise.geometry import identity, whole, window
from layerwise.ops.base import Op
from layerwise.ops.facts import Counts, Extents, Local, Maps, Saved
from layerwise.ops.specs import POSITIONS, check_positions, dim_index, merge_labels, only, same
from layerwise.ops.tensor.pointwise import promoted
from layerwise.tensor import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


class Along(Op):
    """An operator that needs one dimension, `dim`, in full, and is element-wise in all others."""

    dim: int

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        (x,) = inputs
        dim_index(self.dim, x)
        return x

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        return (same(out, self.unsplit(inputs, out)),)

    def unsplit(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> frozenset[int]:
        return frozenset({dim_index(self.dim, out)})


@dataclass(frozen=True, slots=True)
class Cumsum(Along):
    """The sum of all elements up to each, along `dim`; int64 for integers."""

    kind: ClassVar[str] = "cumsum"
    saves: ClassVar[Saved] = Saved(inputs=False, output=False)
    dim: int

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        x = Along.output(self, *inputs)
        return x if x.differentiable else replace(x, dtype="int64")

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        return inputs[0].cumsum(self.dim)


@dataclass(frozen=True, slots=True)
class Gather(Op):
    """out[i, j, k] = x[i, index[i, j, k], k] for dim 1; x and index have equal extents in all other dimensions.

    The elements that are read depend on the index, so x is needed in full along `dim`; the output is split anywhere.
    `wraps`: negative positions count from the end.
    """

    kind: ClassVar[str] = "gather"
    added: ClassVar[frozenset[str]] = frozenset({"wraps"})
    saves: ClassVar[Saved] = Saved(output=False)
    dim: int
    wraps: bool = False

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        x, index = inputs
        dim = dim_index(self.dim, x)
        if len(index.shape) != len(x.shape) or any(
            a != b for i, (a, b) in enumerate(zip(x.shape, index.shape, strict=True)) if i != dim
        ):
            raise LayerwiseError(
                f"gather along dimension {dim} of {x.describe()}: positions {index.describe()} must have the same "
                "sizes in all other dimensions"
            )
        others = replace(x, dims=tuple(None if i == dim else d for i, d in enumerate(x.dims)))
        others = replace(others, units=tuple(1 if i == dim else u for i, u in enumerate(x.units)))
        return merge_labels(index.shape, (others, index), x.dtype)

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        x, index = inputs
        return same(x, (dim_index(self.dim, x),)), same(index)

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        x, index = inputs
        places = index.long()
        return x.gather(self.dim, _from_front(places, x.shape[self.dim]) if self.wraps else places)


@dataclass(frozen=True, slots=True)
class Take(Op):
    """x at the positions `index` of dimension `dim`; the index's dimensions replace that one (numpy.take).

    x is needed in full along `dim`; the output is split anywhere. Negative positions count from the end.
    """

    kind: ClassVar[str] = "take"
    saves: ClassVar[Saved] = Saved(output=False)
    arithmetic: ClassVar[bool] = False
    dim: int

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        x, index = inputs
        dim = dim_index(self.dim, x)
        if index.differentiable or index.dtype == "bool":
            raise LayerwiseError(f"positions must be integers, not {index.dtype}")
        known = {label for i, label in enumerate(x.dims) if i != dim}
        labels = tuple(None if label in known else label for label in index.dims)
        shape, dims, units = (
            (*a[:dim], *b, *a[dim + 1 :]) for a, b in ((x.shape, index.shape), (x.dims, labels), (x.units, index.units))
        )
        return TensorSpec(shape, dims, x.dtype, units)

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        x, index = inputs
        dim, more = dim_index(self.dim, x), len(index.shape) - 1
        maps = [identity(extent, i if i < dim else i + more) for i, extent in enumerate(x.shape)]
        maps[dim] = whole(x.shape[dim])
        return tuple(maps), tuple(identity(extent, dim + i) for i, extent in enumerate(index.shape))

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        x, index = inputs
        dim = dim_index(self.dim, local.specs[0])
        places = _from_front(index.reshape(-1).long(), x.shape[dim])
        return x.index_select(dim, places).reshape(*x.shape[:dim], *index.shape, *x.shape[dim + 1 :])


@dataclass(frozen=True, slots=True)
class Positions(Op):
    """Positions (..., k) in k dimensions of these extents, as positions in the merged dimension, row by row.

    Negative ones count from the end. Raises LayerwiseError for a position out of range.
    """

    kind: ClassVar[str] = "positions"
    saves: ClassVar[Saved] = Saved(inputs=False, output=False)
    arithmetic: ClassVar[bool] = False
    extents: tuple[int, ...]

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        (index,) = inputs
        if index.shape[-1] != len(self.extents) or index.differentiable or index.dtype == "bool":
            raise LayerwiseError(f"{index.describe()} is not a tensor of positions in {len(self.extents)} dimensions")
        return TensorSpec(index.shape[:-1], index.dims[:-1], index.dtype, index.units[:-1])

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        return ((*same(out), whole(len(self.extents))),)

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        (index,) = inputs
        total = index.new_zeros(index.shape[:-1])
        for one, extent in zip(index.unbind(-1), self.extents, strict=True):
            place = _from_front(one, extent)
            check_positions(place, extent)
            total = total * extent + place
        return total


def _from_front(places: Tensor, extent: int) -> Tensor:
    """Positions counted from the front; negative ones count from the end."""
    return places.where(places >= 0, places + extent)


@dataclass(frozen=True, slots=True)
class Softmax(Along):
    """exp(x) over its sum along `dim`. FLOPs 5 an element: maximum, subtract, exp, add, divide."""

    kind: ClassVar[str] = "softmax"
    saves: ClassVar[Saved] = Saved(inputs=False)
    dim: int = -1
    log: bool = False

    def flops(self, inputs: Sequence[TensorSpec], extents: Extents) -> Counts:
        return Op.flops(self, inputs, extents) * 5

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        import torch

        return (torch.log_softmax if self.log else torch.softmax)(inputs[0], self.dim)


@dataclass(frozen=True, slots=True)
class OneHot(Op):
    """`on` at the position that the index says, among `count` along `dim`, where the index has size 1; 0 elsewhere.

    It can be split along the classes too: each device compares the index with its own.
    """

    kind: ClassVar[str] = "one_hot"
    saves: ClassVar[Saved] = Saved(inputs=False, output=False)
    dim: int
    count: int
    dtype: str
    on: float = 1.0

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        (index,) = inputs
        dim = dim_index(self.dim, index)
        if index.shape[dim] != 1 or index.differentiable or index.dtype == "bool":
            raise LayerwiseError(
                f"one_hot over {self.count} classes needs a tensor of positions, not {index.describe()}"
            )
        shape = tuple(self.count if i == dim else extent for i, extent in enumerate(index.shape))
        return replace(index, shape=shape, dtype=self.dtype)

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        return (same(inputs[0], (dim_index(self.dim, out),)),)

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        import torch

        (index,) = inputs
        dim, out = dim_index(self.dim, local.specs[0]), local.out
        check_positions(index, self.count)
        classes = torch.arange(out.lo[dim], out.hi[dim], device=index.device, dtype=index.dtype)
        here = index == classes.view(*(-1 if i == dim else 1 for i in range(index.dim())))
        made = here.to(getattr(torch, self.dtype))
        return made if self.on == 1 else made * self.on


# The names in PyTorch's scatter_reduce.
REDUCED = {"mul": "prod", "max": "amax", "min": "amin"}


@dataclass(frozen=True, slots=True)
class Scatter(Along):
    """x with `value`, or with elements of a third input, written at positions of `dim`.

    mode: "write", or how the old and new values are combined: sum, product, maximum, minimum. The index has x's extents
    in all other dimensions. One device writes all of `dim`.
    """

    kind: ClassVar[str] = "scatter"
    arithmetic: ClassVar[bool] = False
    dim: int
    mode: Literal["write", "add", "mul", "max", "min"] = "write"
    value: float | None = None

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        x, index, *source = inputs
        dim = dim_index(self.dim, x)
        for other in (index, *source):
            if len(other.shape) != len(x.shape) or self._elsewhere(other, dim) != self._elsewhere(x, dim):
                raise LayerwiseError(
                    f"what is written along dimension {dim} of {x.describe()} must have the same sizes in all other "
                    f"dimensions, not {other.describe()}"
                )
        return merge_labels(x.shape, (x, index), x.dtype)

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        return tuple(same(spec, self.unsplit(inputs, out)) for spec in inputs)

    def saved(self, inputs: Sequence[TensorSpec], lo: Extents, hi: Extents) -> Saved:
        return Saved(output=self.mode in REDUCED)

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        x, index, *source = inputs
        index = index.long()
        if self.mode in REDUCED:
            return x.scatter_reduce(self.dim, index, source[0], REDUCED[self.mode])
        if self.value is not None:
            return x.scatter(self.dim, index, self.value)
        return x.scatter_add(self.dim, index, *source) if self.mode == "add" else x.scatter(self.dim, index, *source)

    def _elsewhere(self, spec: TensorSpec, dim: int) -> tuple[int, ...]:
        return (*spec.shape[:dim], *spec.shape[dim + 1 :])


@dataclass(frozen=True, slots=True)
class Concat(Op):
    """Any number of inputs one after the other along `dim`. No FLOPs: it copies."""

    kind: ClassVar[str] = "concat"
    saves: ClassVar[Saved] = Saved(inputs=False, output=False, through=True)
    arithmetic: ClassVar[bool] = False
    dim: int

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        if not inputs:
            raise LayerwiseError("a concatenation needs at least one input")
        dim = dim_index(self.dim, inputs[0])
        rest = [i for i in range(len(inputs[0].shape)) if i != dim]
        if any(
            len(x.shape) != len(inputs[0].shape) or any(x.shape[i] != inputs[0].shape[i] for i in rest) for x in inputs
        ):
            shapes = ", ".join(x.describe() for x in inputs)
            raise LayerwiseError(
                f"inputs of a concatenation along dimension {dim} differ in other dimensions: {shapes}"
            )
        others = merge_labels(
            tuple(inputs[0].shape[i] for i in rest),
            [only(x, rest) for x in inputs],
            promoted(*(x.dtype for x in inputs)),
        )
        dims, units, shape = list(others.dims), list(others.units), list(others.shape)
        label = next((x.dims[dim] for x in inputs if x.dims[dim]), None)
        # Every input is split at multiples of its own unit, wherever it begins, or read beyond it.
        unit = lcm(*(x.units[dim] for x in inputs))
        if any(x.shape[dim] % unit for x in inputs):
            label, unit = label if label in POSITIONS else None, 1
        if label in dims:
            label, unit = None, 1
        dims.insert(dim, label)
        units.insert(dim, unit)
        shape.insert(dim, sum(x.shape[dim] for x in inputs))
        return TensorSpec(tuple(shape), tuple(dims), others.dtype, tuple(units))

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        dim = dim_index(self.dim, out)
        starts = accumulate((x.shape[dim] for x in inputs), initial=0)
        return tuple(
            tuple(
                window(out.shape[dim], extent, dim, first=-start, last=-start) if i == dim else identity(extent, i)
                for i, extent in enumerate(x.shape)
            )
            for x, start in zip(inputs, starts, strict=False)
        )

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        """Concatenates the parts; an input without a part in the cell is empty."""
        import torch

        return torch.cat(tuple(inputs), self.dim)
