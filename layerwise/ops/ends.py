"""The ends of a network: inputs, constants, shared parameters and the single sink."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from layerwise.geometry import scaled, whole
from layerwise.ops.base import Op, Role
from layerwise.ops.facts import Maps
from layerwise.ops.specs import at_batch
from layerwise.tensor import TensorSpec


@dataclass(frozen=True, slots=True)
class _Source(Op):
    arithmetic: ClassVar[bool] = False
    spec: TensorSpec

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        return self.spec

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        return ()

    def at_batch(self, old: int, new: int) -> Op:
        return replace(self, spec=at_batch(self.spec, old, new))


@dataclass(frozen=True, slots=True)
class Input(_Source):
    """A tensor that the data loader feeds."""

    kind: ClassVar[str] = "input"
    role: ClassVar[Role] = Role.INPUT


@dataclass(frozen=True, slots=True)
class Tied(_Source):
    """A parameter that several layers use: a source whose uses are edges."""

    kind: ClassVar[str] = "tied"
    role: ClassVar[Role] = Role.TIED
    weights: ClassVar[bool] = True

    def at_batch(self, old: int, new: int) -> Op:
        return self


@dataclass(frozen=True, slots=True)
class Constant(_Source):
    """A tensor that is neither fed nor trained (a mask, position ids): every device makes its own."""

    kind: ClassVar[str] = "constant"
    role: ClassVar[Role] = Role.CONSTANT


@dataclass(frozen=True, slots=True)
class Sink(Op):
    """The layer at which all outputs meet: each cell needs its samples of every output."""

    kind: ClassVar[str] = "sink"
    arithmetic: ClassVar[bool] = False
    role: ClassVar[Role] = Role.SINK
    batch: int

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        return TensorSpec((self.batch,), ("n",))

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        return tuple(
            tuple(
                scaled(self.batch, extent, 0, scale=unit)
                if label == "n" and extent == self.batch * unit
                else whole(extent)
                for label, extent, unit in zip(spec.dims, spec.shape, spec.units, strict=True)
            )
            for spec in inputs
        )

    def at_batch(self, old: int, new: int) -> Op:
        return Sink(new)
