"""Learned: a parameter that is a part of every sample, such as the class token of a vision transformer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from layerwise.ops.base import Op
from layerwise.ops.facts import Extents, Kept, Local, Maps, Parameter
from layerwise.ops.specs import broadcast
from layerwise.tensor import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Learned(Op):
    """A parameter of shape `parameter`, expanded to `shape`, whose dimension 0 is the samples; it has no inputs.

    Every device that has samples has the parameter, as with a bias: only its gradient is added up. No FLOPs.
    """

    kind: ClassVar[str] = "learned"
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

    def kept(self, inputs: Sequence[TensorSpec], lo: Extents, hi: Extents) -> Kept:
        return Kept(inputs=False, output=False)

    def at_batch(self, old: int, new: int) -> Op:
        return replace(self, shape=(new, *self.shape[1:]))

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        return parameters["value"].expand(local.out.shape)
