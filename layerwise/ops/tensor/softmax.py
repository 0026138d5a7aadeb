"""Softmax and log-softmax. https://pytorch.org/docs/stable/generated/torch.nn.Softmax.html"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from layerwise.ops.base import Op
from layerwise.ops.facts import Counts, Extents, Kept, Local
from layerwise.ops.tensor.along import Along
from layerwise.tensor import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Softmax(Along):
    """exp(x) over its sum along `dim`. FLOPs 5 an element: maximum, subtract, exp, add, divide."""

    kind: ClassVar[str] = "softmax"
    dim: int = -1
    log: bool = False

    def flops(self, inputs: Sequence[TensorSpec], extents: Extents) -> Counts:
        return Op.flops(self, inputs, extents) * 5

    def kept(self, inputs: Sequence[TensorSpec], lo: Extents, hi: Extents) -> Kept:
        return Kept(inputs=False)

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        import torch

        return (torch.log_softmax if self.log else torch.softmax)(inputs[0], self.dim)
