"""Table lookups (https://pytorch.org/docs/stable/generated/torch.nn.Embedding.html), and parameters in every sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from layerwise.errors import LayerwiseError
from layerwise.geometry import identity
from layerwise.ops.base import Op
from layerwise.ops.facts import Dim, Local, Maps, Parameter, Saved
from layerwise.ops.specs import broadcast, check_positions, same
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
    saves: ClassVar[Saved] = Saved(output=False)
    arithmetic: ClassVar[bool] = False
    added: ClassVar[frozenset[str]] = frozenset({"wraps"})
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


@dataclass(frozen=True, slots=True)
class Learned(Op):
    """A parameter of shape `parameter`, expanded to `shape`, whose dimension 0 is the samples; it has no inputs.

    Every device that has samples has the parameter, as with a bias: only its gradient is added up. No FLOPs.
    """

    kind: ClassVar[str] = "learned"
    saves: ClassVar[Saved] = Saved(inputs=False, output=False)
    arithmetic: ClassVar[bool] = False
    parameter: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str = "float32"

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        inner = (*(None,) * (len(self.shape) - 2), "c")[: len(self.shape) - 1]
        return TensorSpec(self.shape, ("n", *inner), self.dtype)

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        return ()

    def parameters(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Parameter, ...]:
        return (Parameter("value", self.parameter, broadcast(self.parameter, out)),)

    def at_batch(self, old: int, new: int) -> Op:
        return replace(self, shape=(new, *self.shape[1:]))

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        return parameters["value"].expand(local.out.shape)
