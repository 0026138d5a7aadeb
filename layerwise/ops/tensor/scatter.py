"""What is written at positions of one dimension. https://pytorch.org/docs/stable/generated/torch.Tensor.scatter_.html"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from layerwise.errors import LayerwiseError
from layerwise.geometry import identity, whole
from layerwise.ops.base import Op
from layerwise.ops.facts import Extents, Kept, Local, Maps
from layerwise.ops.specs import check_positions, dim_index, merge_labels
from layerwise.tensor import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class OneHot(Op):
    """`on` at the position that the index says, of `count` along `dim`, where it has extent 1; 0 at the others.

    It can be split along the classes, too: each device compares the index with those that it has.
    """

    kind: ClassVar[str] = "one_hot"
    dim: int
    count: int
    dtype: str
    on: float = 1.0

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        (index,) = inputs
        dim = dim_index(self.dim, index)
        if index.shape[dim] != 1 or index.differentiable or index.dtype == "bool":
            raise LayerwiseError(f"one number for each of {self.count} classes: {index.describe()} are no positions")
        shape = tuple(self.count if i == dim else extent for i, extent in enumerate(index.shape))
        return replace(index, shape=shape, dtype=self.dtype)

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        dim = dim_index(self.dim, out)
        return (tuple(whole(1) if i == dim else identity(e, i) for i, e in enumerate(inputs[0].shape)),)

    def kept(self, inputs: Sequence[TensorSpec], lo: Extents, hi: Extents) -> Kept:
        return Kept(inputs=False, output=False)

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        import torch

        (index,) = inputs
        dim, out = dim_index(self.dim, local.specs[0]), local.out
        check_positions(index, self.count)
        classes = torch.arange(out.lo[dim], out.hi[dim], device=index.device, dtype=index.dtype)
        here = index == classes.view(*(-1 if i == dim else 1 for i in range(index.dim())))
        made = here.to(getattr(torch, self.dtype))
        return made if self.on == 1 else made * self.on


# As PyTorch's scatter_reduce names them.
REDUCED = {"mul": "prod", "max": "amax", "min": "amin"}


@dataclass(frozen=True, slots=True)
class Scatter(Op):
    """x with `value`, or with elements of a third input, written at positions of `dim`.

    mode: "write", or what is made of what is there and what comes: their sum, product, largest, smallest.
    The index has x's extents in all other dimensions. All of `dim` is written by one device.
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
                    f"what is written along dimension {dim} of {x.describe()} must have its extents elsewhere, not "
                    f"{other.describe()}"
                )
        return merge_labels(x.shape, (x, index), x.dtype)

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        dim = dim_index(self.dim, out)
        return tuple(
            tuple(whole(e) if i == dim else identity(e, i) for i, e in enumerate(spec.shape)) for spec in inputs
        )

    def unsplit(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> frozenset[int]:
        return frozenset({dim_index(self.dim, out)})

    def kept(self, inputs: Sequence[TensorSpec], lo: Extents, hi: Extents) -> Kept:
        return Kept(output=self.mode in REDUCED)

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
