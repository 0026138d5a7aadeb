"""What goes along one dimension: running sums, and elements picked by position.

https://pytorch.org/docs/stable/generated/torch.cumsum.html and torch.gather.html
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from layerwise.errors import LayerwiseError
from layerwise.geometry import identity, whole
from layerwise.ops.base import Op
from layerwise.ops.facts import Extents, Kept, Local, Maps
from layerwise.ops.specs import check_positions, dim_index, merge_labels, same
from layerwise.tensor import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


class Along(Op):
    """What reads all of one dimension, `dim`, which is not split, and everything else element by element."""

    dim: int

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        (x,) = inputs
        dim_index(self.dim, x)
        return x

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        dim = dim_index(self.dim, out)
        return (tuple(whole(extent) if i == dim else identity(extent, i) for i, extent in enumerate(out.shape)),)

    def unsplit(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> frozenset[int]:
        return frozenset({dim_index(self.dim, out)})


@dataclass(frozen=True, slots=True)
class Cumsum(Along):
    """The sum of all elements up to each along `dim`; of integers, 64 bits wide."""

    kind: ClassVar[str] = "cumsum"
    dim: int

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        x = Along.output(self, *inputs)
        return x if x.differentiable else replace(x, dtype="int64")

    def kept(self, inputs: Sequence[TensorSpec], lo: Extents, hi: Extents) -> Kept:
        return Kept(inputs=False, output=False)

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        return inputs[0].cumsum(self.dim)


@dataclass(frozen=True, slots=True)
class Gather(Op):
    """out[i, j, k] = x[i, index[i, j, k], k] for dim 1: x and index are of equal extents in all others.

    Which elements of `dim` are read depends on the index, so x is needed whole there; the output is cut anywhere.
    `wraps`: negative positions count from the end.
    """

    kind: ClassVar[str] = "gather"
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
                "extents elsewhere"
            )
        others = replace(x, dims=tuple(None if i == dim else d for i, d in enumerate(x.dims)))
        others = replace(others, units=tuple(1 if i == dim else u for i, u in enumerate(x.units)))
        return merge_labels(index.shape, (others, index), x.dtype)

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        x, index = inputs
        dim = dim_index(self.dim, x)
        maps = tuple(whole(extent) if i == dim else identity(extent, i) for i, extent in enumerate(x.shape))
        return maps, same(index)

    def kept(self, inputs: Sequence[TensorSpec], lo: Extents, hi: Extents) -> Kept:
        return Kept(output=False)

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        x, index = inputs
        places = index.long()
        return x.gather(self.dim, _from_front(places, x.shape[self.dim]) if self.wraps else places)

    def rows(self) -> dict[str, object]:
        """As it was before positions could wrap, where they do not: digests of older plans hold."""
        return {name: value for name, value in Op.rows(self).items() if value or name != "wraps"}


@dataclass(frozen=True, slots=True)
class Take(Op):
    """x at the positions `index` of dimension `dim`; the index's dimensions take the place of that one (numpy.take).

    x is needed whole along `dim`; the output is cut anywhere. Positions count from the end where they are negative.
    """

    kind: ClassVar[str] = "take"
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

    def kept(self, inputs: Sequence[TensorSpec], lo: Extents, hi: Extents) -> Kept:
        return Kept(output=False)

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        x, index = inputs
        dim = dim_index(self.dim, local.specs[0])
        places = _from_front(index.reshape(-1).long(), x.shape[dim])
        return x.index_select(dim, places).reshape(*x.shape[:dim], *index.shape, *x.shape[dim + 1 :])


@dataclass(frozen=True, slots=True)
class Positions(Op):
    """Positions (..., k) in k dimensions of these extents, as those in the one that they make, row by row.

    Negative ones count from the end. LayerwiseError where a dimension has no such position.
    """

    kind: ClassVar[str] = "positions"
    arithmetic: ClassVar[bool] = False
    extents: tuple[int, ...]

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        (index,) = inputs
        if index.shape[-1] != len(self.extents) or index.differentiable or index.dtype == "bool":
            raise LayerwiseError(f"{index.describe()} are no positions in {len(self.extents)} dimensions")
        return TensorSpec(index.shape[:-1], index.dims[:-1], index.dtype, index.units[:-1])

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        return ((*same(out), whole(len(self.extents))),)

    def kept(self, inputs: Sequence[TensorSpec], lo: Extents, hi: Extents) -> Kept:
        return Kept(inputs=False, output=False)

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        (index,) = inputs
        total = index.new_zeros(index.shape[:-1])
        for one, extent in zip(index.unbind(-1), self.extents, strict=True):
            place = _from_front(one, extent)
            check_positions(place, extent)
            total = total * extent + place
        return total


def _from_front(places: Tensor, extent: int) -> Tensor:
    """Positions of which those below 0 count from the end."""
    return places.where(places >= 0, places + extent)
