"""Spectral norm of weights. https://pytorch.org/docs/stable/generated/torch.nn.utils.parametrizations.spectral_norm.html"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, ClassVar

from layerwise.geometry import whole
from layerwise.ops.base import Op
from layerwise.ops.facts import Counts, Extents, Local, Maps, Parameter, Saved
from layerwise.tensor import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class SpectralNorm(Op):
    """A weight over its largest singular value, which power iteration estimates (Miyato et al., 2018, eq. 8).

    The weight is seen as a matrix: its dimension `dim` by all others. `u` and `v` are buffers of the lengths of these,
    which every forward pass in training moves by so many `iterations`, u first or v first. It is not split.
    """

    kind: ClassVar[str] = "spectral_norm"
    dim: int
    iterations: int
    eps: float
    u_first: bool

    @property
    def remembers(self) -> bool:
        return True

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        return inputs[0]

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        return (tuple(map(whole, inputs[0].shape)),)

    def unsplit(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> frozenset[int]:
        return frozenset(range(len(out.shape)))

    def parameters(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Parameter, ...]:
        rows = out.shape[self.dim]
        lengths = {"u": rows, "v": prod(out.shape) // rows}
        return tuple(Parameter(name, (n,), (whole(n),), trainable=False) for name, n in lengths.items())

    def flops(self, inputs: Sequence[TensorSpec], extents: Extents) -> Counts:
        """The matrix by a vector twice an iteration and once more, and the division."""
        return Op.flops(self, inputs, extents) * (2 * (2 * self.iterations + 1) + 1)

    def saved(self, inputs: Sequence[TensorSpec], lo: Extents, hi: Extents) -> Saved:
        """The vectors; the matrix where it is no view of the weight. Backward, a gradient by way of each."""
        (x,) = inputs
        rows = x.shape[self.dim]
        vectors = (rows + x.volume // rows) * x.item_bytes
        copied = x.volume * x.item_bytes if self.dim else 0
        volume = x.volume * x.item_bytes
        return Saved(output=False, extra=2.0 * vectors + copied, forward=4.0 * vectors, between=3.0 * volume)

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        import torch
        import torch.nn.functional as F

        (weight,), u, v = inputs, parameters["u"], parameters["v"]
        matrix = weight.movedim(self.dim, 0).flatten(1)
        with torch.no_grad():
            for step in range(2 * self.iterations if local.training else 0):
                of_u = self.u_first == (step % 2 == 0)
                moved, product = (u, torch.mv(matrix, v)) if of_u else (v, torch.mv(matrix.t(), u))
                F.normalize(product, dim=0, eps=self.eps, out=moved)
        return weight / torch.dot(u.clone(), torch.mv(matrix, v.clone()))
