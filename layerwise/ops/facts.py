"""The facts that an operator states: dimensions, parameters, work, statistics and memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
AllReduce = Callable[["Tensor"], "Tensor"]
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
    trainable: bool = True  # False: a buffer, or frozen: no gradient to synchronize
    # used after the reduction over k (a bias): its box follows the box that a device owns of the output
    epilogue: bool = False
    # PyTorch's default initial values: uniform in [-scale, scale), normal with deviation `scale`, or `scale`
    # everywhere.
    initial: Literal["uniform", "normal", "constant"] = "constant"
    scale: float = 0.0

    def __hash__(self) -> int:
        return hash((self.name, self.shape))  # hashing the rest is slow, and few parameters differ only in it


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
    """An all-reduce inside an operator, such as a batch norm's in training."""

    over: tuple[int, ...]  # it is among the cells that differ only along these dimensions
    keys: tuple[int, ...]  # `per_key` elements for each index of these
    per_key: int
    block: int = 1  # a divisor of the last key: channels in a group, for group norm
    exact: bool = True  # whether forward sums are in float64: a variance is a small difference of two large sums

    def item_bytes(self, of_output: int) -> tuple[int, int]:
        """Bytes of an element, forward and backward, by those of an output element; 16-bit types sum in 32 bits."""
        wide = max(of_output, 4)
        return 8 if self.exact else wide, wide


@dataclass(frozen=True, slots=True)
class Saved:
    """A kernel's memory: saved for the backward pass, and temporary.

    Bytes are arrays over boxes, or one number.
    """

    inputs: Mask | bool = True  # whether the backward pass reads them (not, for example, a padded copy), by box
    output: bool = True  # whether the backward pass reads the output
    through: bool = False  # whether gradients of the inputs are views of the output's gradient
    extra: Counts | float = 0.0  # other saved bytes, such as a mask
    # the part of `extra` that is a padded copy of the input, which is not made if the input arrives padded
    padded: Counts | float = 0.0
    forward: Counts | float = 0.0  # temporary bytes of the forward pass
    between: Counts | float = 0.0  # bytes between the two parts of a backward pass: the gradient of a padded copy


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Inputs that an operator's evaluation can read a piece at a time, along one dimension that all of them have."""

    # By input, from the iteration space and, after its dimensions, the dimension of the pieces.
    maps: Mapping[int, Maps]
    extent: int  # of that dimension
    unit: int  # pieces end at its multiples
    temporary: Callable[[Extents, int], Counts]  # bytes of the kernel, for boxes of these extents and a piece


@dataclass(frozen=True, slots=True, eq=False)
class Space:
    """The iteration space of an operator at given shapes, with everything that its cells need; see `space`."""

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
        """The dimension that can be split under `label`, or None."""
        return next((i for i, d in enumerate(self.dims) if d.label == label), None)

    def max_degree(self, label: str) -> int:
        """The largest degree of the dimension `label`; 1 if there is none."""
        return next((d.max_degree for d in self.dims if d.label == label), 1)


@dataclass(frozen=True, slots=True)
class Local:
    """A cell of an operator on its device: what a kernel knows beside its tensors."""

    space: Space  # of the full operator
    specs: tuple[TensorSpec, ...]  # of its full inputs
    cell: Box  # the cell, in output dimensions and reductions
    needs: tuple[Box, ...]  # the box of each input that the kernel gets
    training: bool = True
    # Sums a tensor over the devices that share the operator's statistics. It has no gradient of its own, and may
    # overwrite the tensor. None if this device has all that it needs.
    all_reduce: AllReduce | None = field(default=None, compare=False)
    seed: Seed = 0  # for the random numbers of this step, equal on all devices
    device: torch.device | None = None  # the computing device, for kernels without input tensors; None: the CPU
    padded: bool = False  # whether its first input includes the operator's `margins`
    memo: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def once(self, key: str, make: Callable[[], T]) -> T:
        """A value that a kernel computes only once, such as its windows' positions: no tensors."""
        if key not in self.memo:
            self.memo[key] = make()
        found: T = self.memo[key]
        return found

    @property
    def out(self) -> Box:
        """The box of the output that it computes."""
        rank = len(self.space.out.shape)
        return Box(self.cell.lo[:rank], self.cell.hi[:rank])

    def spans(self, *dims: int) -> bool:
        """True if the output box spans these dimensions fully."""
        shape = self.space.out.shape
        return all(self.cell.lo[i] == 0 and self.cell.hi[i] == shape[i] for i in dims)
