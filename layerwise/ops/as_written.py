"""A whole model that is run as its author wrote it: nothing is known of it but its inputs and its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from layerwise.errors import LayerwiseError
from layerwise.geometry import identity, whole
from layerwise.ops.base import Op
from layerwise.ops.facts import Counts, Extents, Maps, Parameter
from layerwise.tensor import TensorSpec


@dataclass(frozen=True, slots=True)
class AsWritten(Op):
    """All of a model, as one layer of samples. It has no kernel: the module itself is called.

    held: shape of each parameter and buffer, and whether it is a parameter. by_row: every output has a row a sample.
    """

    kind: ClassVar[str] = "as_written"
    weights: ClassVar[bool] = True
    held: tuple[tuple[tuple[int, ...], bool], ...]
    dtype: str
    by_row: bool = False

    @property
    def loss(self) -> Literal["mean", "sum"] | None:
        """What it returns is taken for a mean over samples where it is not a row of each."""
        return None if self.by_row else "mean"

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        batch = next((x.shape[0] for x in inputs if x.index("n") == 0), None)
        if batch is None:
            raise LayerwiseError("no input has a sample dimension")
        return TensorSpec((batch,), ("n",), self.dtype)

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        def along(spec: TensorSpec) -> Maps:
            rows = zip(spec.dims, spec.shape, strict=True)
            return tuple(identity(extent, 0) if label == "n" else whole(extent) for label, extent in rows)

        return tuple(map(along, inputs))

    def parameters(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Parameter, ...]:
        rows = enumerate(self.held)
        return tuple(Parameter(str(i), shape, tuple(map(whole, shape)), trainable) for i, (shape, trainable) in rows)

    def flops(self, inputs: Sequence[TensorSpec], extents: Extents) -> Counts:
        """Not known."""
        return np.full(extents.shape[:-1], np.nan)
