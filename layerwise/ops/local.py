"""Local: one cell of an operator on the device that computes it. What a kernel is told beside its tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from layerwise.geometry import Box
from layerwise.ops.base import Space
from layerwise.tensor import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Local:
    """A cell of an operator's iteration space.

    space: the whole operator's; specs: of its whole inputs; cell: the box of output dimensions and reductions that is
    computed; needs: the box of each input that the kernel is given. peers: how many devices share the operator's
    statistics; all_reduce sums a tensor over them (no gradient of its own; the tensor may be overwritten), None where
    this device has all that it needs. seed: of the random numbers at this step, equal on all devices.
    """

    space: Space
    specs: tuple[TensorSpec, ...]
    cell: Box
    needs: tuple[Box, ...]
    training: bool = True
    all_reduce: Callable[[Tensor], Tensor] | None = field(default=None, compare=False)
    seed: int = 0

    @property
    def out(self) -> Box:
        """The box of the output that is computed."""
        rank = len(self.space.out.shape)
        return Box(self.cell.lo[:rank], self.cell.hi[:rank])

    def spans(self, *dims: int) -> bool:
        """Whether the output box is whole in these dimensions."""
        shape = self.space.out.shape
        return all(self.cell.lo[i] == 0 and self.cell.hi[i] == shape[i] for i in dims)
