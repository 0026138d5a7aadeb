"""Whole: a module of the model that is not taken apart into layers, but called as it is, on a device's samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from layerwise.errors import LayerwiseError
from layerwise.geometry import identity, whole
from layerwise.ops.base import Op
from layerwise.ops.facts import Counts, Extents, Local, Maps, Parameter, Saved
from layerwise.tensor import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

# Of inputs, parameters and buffers by their names in the module, and the mode: the output of these samples.
Function: TypeAlias = "Callable[[Sequence[Tensor], Mapping[str, Tensor], bool], Tensor]"


@dataclass(frozen=True, slots=True)
class Whole(Op):
    """What a module makes of its samples, each by itself; backward it is autograd's.

    follows: which inputs have a row a sample, as the output has; the others are needed full. held: name in the module
    and shape of each parameter and buffer, and whether it is a parameter. flops, saved, forward, backward: operations,
    and bytes as `Made` has them, of a sample. make: a function for one rank, which no other may call meanwhile.
    """

    kind: ClassVar[str] = "whole"
    weights: ClassVar[bool] = True
    path: str
    follows: tuple[bool, ...]
    shape: tuple[int, ...]  # of a sample of the output
    labels: tuple[str | None, ...]
    dtype: str
    held: tuple[tuple[str, tuple[int, ...], bool], ...]
    differentiable: bool
    flops_a_sample: float
    saved_bytes: tuple[float, float, float]  # a sample: saved for backward, taken forward, and back
    make: Callable[[], Function] = field(compare=False, repr=False)
    why: str = field(compare=False)  # it is not taken apart

    @property
    def note(self) -> str:
        """A sentence for whoever plans the model."""
        return f"module {self.path!r} is called as it is written, each rank with its own samples, because {self.why}"

    @property
    def detaches(self) -> bool:
        return not self.differentiable

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        return TensorSpec((self._samples(inputs), *self.shape), ("n", *self.labels), self.dtype)

    def _samples(self, inputs: Sequence[TensorSpec]) -> int:
        first = [x for x, follows in zip(inputs, self.follows, strict=True) if follows]
        if any(x.index("n") != 0 or x.shape[0] != first[0].shape[0] for x in first):
            raise LayerwiseError(f"module {self.path!r} is whole, so its inputs need their samples along dimension 0")
        return first[0].shape[0]

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        def along(spec: TensorSpec, follows: bool) -> Maps:
            full = tuple(map(whole, spec.shape))
            return (identity(spec.shape[0], 0), *full[1:]) if follows else full

        return tuple(map(along, inputs, self.follows))

    def unsplit(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> frozenset[int]:
        return frozenset(range(1, len(out.shape)))

    def parameters(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Parameter, ...]:
        return tuple(Parameter(name, shape, tuple(map(whole, shape)), trained) for name, shape, trained in self.held)

    def flops(self, inputs: Sequence[TensorSpec], extents: Extents) -> Counts:
        """Of its matrix products, as torch counted them on the example, and one an element that it makes."""
        samples: Counts = extents[..., 0].astype("float64")
        return samples * self.flops_a_sample

    def saved(self, inputs: Sequence[TensorSpec], lo: Extents, hi: Extents) -> Saved:
        """As it was seen on the example."""
        samples = (hi - lo)[..., 0].astype("float64")
        extra, forward, backward = (samples * count for count in self.saved_bytes)
        return Saved(extra=extra, forward=forward, between=backward)

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        return local.once("whole module", self.make)(inputs, parameters, local.training)

    def rows(self) -> dict[str, object]:
        """Without what the example's values may decide."""
        names = ("kind", "path", "follows", "shape", "labels", "dtype", "held", "differentiable")
        return {name: getattr(self, name) for name in names}
