"""Embedding. https://pytorch.org/docs/stable/generated/torch.nn.Embedding.html"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from layerwise.errors import LayerwiseError
from layerwise.geometry import identity
from layerwise.ops.base import Op
from layerwise.ops.facts import Dim, Extents, Kept, Local, Maps, Parameter
from layerwise.ops.specs import check_positions, same
from layerwise.tensor import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Embedding(Op):
    """Rows of weight (count, width) by integer ids: (n, s) -> (n, s, c).

    The reduction k is the vocabulary: a device that holds part of the rows adds zeros for all other ids. No FLOPs: a
    lookup is bound by memory. The row of the id `padding` gets no gradient. `wraps`: negative ids count from the end.
    """

    kind: ClassVar[str] = "embedding"
    arithmetic: ClassVar[bool] = False
    weights: ClassVar[bool] = True
    ids: ClassVar[bool] = True
    count: int
    width: int
    dtype: str = "float32"
    padding: int | None = None
    wraps: bool = False

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        (ids,) = inputs
        if ids.differentiable:
            raise LayerwiseError(f"an embedding needs integer ids, not {ids.dtype}")
        label = None if "c" in ids.dims else "c"
        return TensorSpec((*ids.shape, self.width), (*ids.dims, label), self.dtype, (*ids.units, 1))

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        return (same(inputs[0]),)

    def parameters(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Parameter, ...]:
        rank = len(out.shape)
        maps = (identity(self.count, rank), identity(self.width, rank - 1))
        return (Parameter("weight", (self.count, self.width), maps, initial="normal", scale=1.0),)

    def reductions(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Dim, ...]:
        return (Dim("k", self.count),)

    def kept(self, inputs: Sequence[TensorSpec], lo: Extents, hi: Extents) -> Kept:
        return Kept(output=False)

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        import torch.nn.functional as F

        (ids,), weight = inputs, parameters["weight"]
        if self.wraps:
            ids = ids.where(ids >= 0, ids + self.count)
        if weight.shape[0] == self.count:
            return F.embedding(ids, weight, self.padding)
        check_positions(ids, self.count)
        rows, first = ids - local.cell.lo[-1], local.cell.lo[-1]
        elsewhere = (rows < 0) | (rows >= weight.shape[0])
        here = self.padding is not None and first <= self.padding < first + weight.shape[0]
        padding = self.padding - first if here and self.padding is not None else None
        looked_up = F.embedding(rows.masked_fill(elsewhere, 0), weight, padding)
        return looked_up.masked_fill(elsewhere.unsqueeze(-1), 0.0)

    def rows(self) -> dict[str, object]:
        """As it was before ids could wrap, where they do not: digests of older plans hold."""
        return {name: value for name, value in Op.rows(self).items() if value or name != "wraps"}
