"""The facts that an operator states: its dimensions, parameters, work, statistics and what it keeps in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from layerwise.geometry import AxisMap, Box
from layerwise.ops.random import Seed
from layerwise.tensor import TensorSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Extents = NDArray[np.int64]  # (..., dimensions of the iteration space): extents of boxes
Counts = NDArray[np.float64]  # (...): one number a box
Mask = NDArray[np.bool_]  # (...): one truth value a box
Maps = tuple[AxisMap, ...]  # one a dimension of a tensor
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Dim:
    """A dimension of an iteration space; label None: this operator cannot be split along it."""

    label: str | None
    extent: int
    unit: int = 1

    @property
    def max_degree(self) -> int:
        """The largest degree that leaves no cell empty."""
        return self.extent // self.unit if self.label else 1


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter or buffer of an operator, and the box of it that a cell needs."""

    name: str
    shape: tuple[int, ...]
    maps: Maps
    trainable: bool = True  # else a buffer, or frozen: no gradient, nothing to synchronise
    epilogue: bool = False  # used after the reduction over k (a bias): its box follows what a device owns of the output
    # How PyTorch fills it where nobody gives a value: uniform in [-scale, scale), normal of deviation `scale`, or
    # `scale` everywhere.
    initial: Literal["uniform", "normal", "constant"] = "constant"
    scale: float = 0.0

    def __hash__(self) -> int:
        return hash((self.name, self.shape))  # the rest is long to hash, and few differ in it alone


@dataclass(frozen=True, slots=True)
class Gemm:
    """`count` matrix products (rows x depth) @ (depth x columns), each an array over boxes. FLOPs: 2 a multiply-add."""

    rows: Counts
    columns: Counts
    depth: Counts
    count: Counts

    @property
    def flops(self) -> Counts:
        return 2.0 * self.rows * self.columns * self.depth * self.count


@dataclass(frozen=True, slots=True)
class Statistics:
    """An all-reduce inside an operator, such as a batch norm in training."""

    over: tuple[int, ...]  # among the cells that differ only along these dimensions
    keys: tuple[int, ...]  # of `per_key` elements for each index of these
    per_key: int
    block: int = 1  # divided by this: channels a group, in a group norm
    exact: bool = True  # whether float64 adds them up forward: a variance is what is left of two large sums

    def item_bytes(self, of_output: int) -> tuple[int, int]:
        """Bytes of an element, forward and back. of_output: bytes of one of the output; 16 bits add up in 32."""
        wide = max(of_output, 4)
        return 8 if self.exact else wide, wide


@dataclass(frozen=True, slots=True)
class Saved:
    """Memory that a kernel saves for its backward pass, and that it takes besides for a while.

    Bytes are arrays over boxes, or one number.
    """

    inputs: Mask | bool = True  # whether the backward pass reads them again, not a padded copy for example; over boxes
    output: bool = True  # whether it reads the output again
    through: bool = False  # whether the gradients of the inputs are views of the output's
    extra: Counts | float = 0.0  # bytes that are kept besides, such as a mask
    padded: Counts | float = 0.0  # of these, of a padded copy of its input, which is none where that arrives padded
    forward: Counts | float = 0.0  # bytes that the forward pass takes while it runs
    between: Counts | float = 0.0  # of a backward pass in two parts, what the second reads: a padded copy's gradient


@dataclass(frozen=True, slots=True, eq=False)
class Space:
    """The iteration space of an operator at given shapes, and all that its cells need. `space` makes one of each."""

    out: TensorSpec
    dims: tuple[Dim, ...]
    needs: tuple[Maps, ...]
    parameters: tuple[Parameter, ...]
    epilogue_inputs: tuple[bool, ...]

    @property
    def reductions(self) -> range:
        """Indices of the reduction dimensions."""
        return range(len(self.out.shape), len(self.dims))

    def index(self, label: str) -> int | None:
        """The dimension that can be split under `label`."""
        return next((i for i, d in enumerate(self.dims) if d.label == label), None)

    def max_degree(self, label: str) -> int:
        """The largest degree of the dimension `label`; 1 where there is none."""
        return next((d.max_degree for d in self.dims if d.label == label), 1)


@dataclass(frozen=True, slots=True)
class Local:
    """A cell of an operator on the device that computes it: what a kernel knows beside its tensors."""

    space: Space  # of the whole operator
    specs: tuple[TensorSpec, ...]  # of its whole inputs
    cell: Box  # of output dimensions and reductions, which is computed
    needs: tuple[Box, ...]  # of each input, what the kernel is given
    training: bool = True
    # Sums a tensor over the devices that share the operator's statistics; it has no gradient of its own, and may
    # overwrite the tensor. None where this device has all that it needs.
    all_reduce: Callable[[Tensor], Tensor] | None = field(default=None, compare=False)
    seed: Seed = 0  # of the random numbers of this step, equal on all devices
    device: torch.device | None = None  # that computes, where the kernel is given no tensor; None: the CPU
    padded: bool = False  # whether its first input has come with the operator's `margins`
    memo: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def once(self, key: str, make: Callable[[], T]) -> T:
        """Numbers that a kernel need compute only once, such as how its windows lie: no tensors."""
        if key not in self.memo:
            self.memo[key] = make()
        found: T = self.memo[key]
        return found

    @property
    def out(self) -> Box:
        """The box of the output that is computed."""
        rank = len(self.space.out.shape)
        return Box(self.cell.lo[:rank], self.cell.hi[:rank])

    def spans(self, *dims: int) -> bool:
        """True if the output box is whole in these dimensions."""
        shape = self.space.out.shape
        return all(self.cell.lo[i] == 0 and self.cell.hi[i] == shape[i] for i in dims)
