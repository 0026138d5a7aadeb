"""Cells: an input that every device reads its own cell of, so that what else its layers need of it is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from layerwise.ops.facts import Local, Maps
from layerwise.ops.specs import same
from layerwise.ops.tensor.view import View
from layerwise.tensor import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Cells(View):
    """Its input as it is. It stands between an input and the layers that read that (`graph.cells`)."""

    kind: ClassVar[str] = "cells"

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        return inputs[0]

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        return (same(inputs[0]),)

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        return inputs[0]
