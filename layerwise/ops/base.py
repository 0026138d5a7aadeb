"""What an operator must say about itself: shapes, what its boxes need, its parameters, its work.

An operator computes over an *iteration space*: the dimensions of its output, then its reductions (`k`). A
configuration cuts that space into cells; `needs` maps a cell to the box of each input and of each parameter. The
transfers, the gradient synchronisation, the memory and the run time of the operator all follow from it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import lcm
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from layerwise.errors import LayerwiseError
from layerwise.geometry import AxisMap, identity, needed, whole
from layerwise.tensor import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from layerwise.ops.local import Local

Extents = NDArray[np.int64]  # (..., dimensions of the iteration space): extents of boxes
Counts = NDArray[np.float64]  # (...): one number a box
Maps = tuple[AxisMap, ...]  # one a dimension of a tensor


@dataclass(frozen=True, slots=True)
class Dim:
    """A dimension of an iteration space; label None: this operator cannot be split along it."""

    label: str | None
    extent: int
    unit: int = 1

    @property
    def room(self) -> int:
        """The largest degree that leaves no cell empty."""
        return self.extent // self.unit if self.label else 1


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter or buffer of an operator, and the box of it that a cell needs.

    `late`: used after the reduction over k (a bias, a fused batch norm), so its box follows the box that a device
    owns of the output, not the one it computes partial sums of. Buffers are not `trainable`: nothing to synchronise.
    `initial`: how PyTorch fills it where nobody gives a value: uniform in [-scale, scale), normal of deviation `scale`,
    or `scale` everywhere.
    """

    name: str
    shape: tuple[int, ...]
    maps: Maps
    trainable: bool = True
    late: bool = False
    initial: Literal["uniform", "normal", "constant"] = "constant"
    scale: float = 0.0


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
    """An all-reduce inside an operator over the cells that differ only along `over` (batch norm in training).

    `per_key` elements for each index of the `keys` dimensions, divided by `block` (channels a group in group norm).
    """

    over: tuple[int, ...]
    keys: tuple[int, ...]
    per_key: int
    block: int = 1


@dataclass(frozen=True, slots=True)
class Kept:
    """What a kernel keeps in memory for its backward pass, and what it takes besides for a while.

    inputs, output: whether its backward pass reads them again. through: whether the gradients of its inputs are views
    of its output's. extra: bytes that it keeps besides, such as a mask; there: bytes that the forward pass takes while
    it runs. back: of a backward pass in two parts, what the second one reads, such as the gradient of a padded copy.
    Arrays over boxes, or one number.
    """

    inputs: bool = True
    output: bool = True
    through: bool = False
    extra: Counts | float = 0.0
    there: Counts | float = 0.0
    back: Counts | float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Space:
    """The iteration space of an operator at given shapes, and all that its cells need. `space` makes one of each."""

    out: TensorSpec
    dims: tuple[Dim, ...]
    needs: tuple[Maps, ...]
    parameters: tuple[Parameter, ...]
    late_inputs: tuple[bool, ...]

    @property
    def reductions(self) -> range:
        """Indices of the reduction dimensions."""
        return range(len(self.out.shape), len(self.dims))

    def index(self, label: str) -> int | None:
        """Which dimension can be split under `label`."""
        return next((i for i, d in enumerate(self.dims) if d.label == label), None)


class Op(ABC):
    """An operator: a frozen dataclass of its attributes (never of shapes, except where the network names them).

    A subclass says what it computes in `output` and `needs`; the rest has defaults that hold for element-wise work.
    `inputs` are the TensorSpecs of its activations, in order. Parameters are not inputs.
    """

    kind: ClassVar[str]
    view: ClassVar[bool] = False  # moves no data by itself: fused into its consumer's `needs`
    pointwise: ClassVar[bool] = False  # every output element depends on its own index of the first input only

    @property
    def remembers(self) -> bool:
        """Whether training changes its buffers, also where nobody reads its output."""
        return False

    @abstractmethod
    def output(self, *inputs: TensorSpec) -> TensorSpec:
        """The output's shape, labels and type. Raises LayerwiseError where the shapes do not fit."""

    @abstractmethod
    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        """For every input, one AxisMap a dimension, from the iteration space."""

    def parameters(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Parameter, ...]:
        """Parameters and buffers, in a fixed order."""
        return ()

    def reductions(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Dim, ...]:
        """Dimensions that are summed over and can be split (`k`)."""
        return ()

    def unsplit(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> frozenset[int]:
        """Output dimensions that this operator cannot be split along, though they carry a label."""
        return frozenset()

    def late_inputs(self, inputs: Sequence[TensorSpec]) -> tuple[bool, ...]:
        """Inputs that are used after the reduction over k (see Parameter.late)."""
        return (False,) * len(inputs)

    def flops(self, inputs: Sequence[TensorSpec], extents: Extents) -> Counts:
        """Forward FLOPs of boxes of the given extents, of shape (...). Default: one an output element."""
        volumes: Counts = np.prod(extents, axis=-1, dtype=np.float64)
        return volumes

    def gemms(self, inputs: Sequence[TensorSpec], extents: Extents) -> tuple[Gemm, ...]:
        """The forward pass as matrix products, where it is (then `flops` is theirs)."""
        return ()

    def stages(self, inputs: Sequence[TensorSpec]) -> tuple[tuple[Op, tuple[TensorSpec, ...]], ...]:
        """The operators that run one after the other, each with its input specs. All share the output's dimensions."""
        return ((self, tuple(inputs)),)

    def statistics(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> Statistics | None:
        """What it all-reduces among its own cells, forward; the backward pass does the same again."""
        return None

    def kept(self, inputs: Sequence[TensorSpec], lo: Extents, hi: Extents) -> Kept:
        """What the kernel keeps and takes for boxes [lo, hi) of the iteration space; default: it reads all again."""
        return Kept()

    def rebatch(self, inputs: Sequence[TensorSpec], out: TensorSpec, new_inputs: Sequence[TensorSpec]) -> Op:
        """The same operator at another batch; only those that name sizes (reshape, expand) change."""
        return self

    def at_batch(self, batch: int) -> Op:
        """The same operator for `batch` samples, where its inputs do not tell (Expand of a class token)."""
        return self

    def run(self, at: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        """The kernel: the box `at.out` of the output, from the boxes `at.needs` of the inputs.

        `parameters` by the operator's names, each the box that the cell needs. Where a reduction is split they lack
        the late ones, the result is a partial sum, and `finish` adds what is late once it is complete.
        """
        raise LayerwiseError(f"layerwise can plan {self.kind} but has no kernel to run it")

    def finish(self, total: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        """What comes after the reduction (a bias): `total` is a box of the sum, `parameters` the late ones."""
        return total

    def rows(self) -> dict[str, object]:
        """Attributes for the graph digest and for people: JSON types only."""
        return {"kind": self.kind} | {
            f: getattr(self, f) for f in getattr(self, "__dataclass_fields__", {}) if f != "kind"
        }


@lru_cache(maxsize=65536)
def space(op: Op, inputs: tuple[TensorSpec, ...]) -> Space:
    """The iteration space of `op` on `inputs`. Cached: repeated blocks of a network share one Space."""
    out = op.output(*inputs)
    barred = op.unsplit(inputs, out)
    dims = tuple(
        Dim(None if i in barred else label, extent, unit)
        for i, (label, extent, unit) in enumerate(zip(out.dims, out.shape, out.units, strict=True))
    )
    needs = op.needs(inputs, out)
    assert len(needs) == len(inputs), f"{op} maps {len(needs)} of {len(inputs)} inputs"
    assert all(len(m) == len(i.shape) for m, i in zip(needs, inputs, strict=True)), f"{op} maps wrong ranks"
    return Space(out, dims + op.reductions(inputs, out), needs, op.parameters(inputs, out), op.late_inputs(inputs))


def volumes(maps: Maps, lo: Extents, hi: Extents) -> Counts:
    """Elements of the boxes of a tensor that `maps` need for boxes [lo, hi) of the iteration space, (..., D) arrays."""
    first, last = needed(maps, lo, hi)
    total: Counts = np.prod(last - first, axis=-1, dtype=np.float64) * (hi > lo).all(-1)  # an empty box needs nothing
    return total


def same(spec: TensorSpec) -> Maps:
    """Every dimension needs its own interval."""
    return tuple(identity(extent, i) for i, extent in enumerate(spec.shape))


def broadcast(spec: TensorSpec | tuple[int, ...], out: TensorSpec) -> Maps:
    """Maps of an operand that broadcasts to `out` by numpy's rule."""
    shape = spec.shape if isinstance(spec, TensorSpec) else spec
    skip = len(out.shape) - len(shape)
    return tuple(
        identity(extent, i + skip) if extent == out.shape[i + skip] else whole(extent) for i, extent in enumerate(shape)
    )


def merge_labels(shape: tuple[int, ...], candidates: Sequence[TensorSpec], dtype: str) -> TensorSpec:
    """A spec of `shape`, each dimension labelled by the first candidate (aligned right) that spans it."""
    dims: list[str | None] = []
    units: list[int] = []
    for i, extent in enumerate(shape):
        label: str | None = None
        unit = 1
        for spec in candidates:
            j = i - (len(shape) - len(spec.shape))
            if j >= 0 and spec.shape[j] == extent:
                label = label or spec.dims[j]
                unit = lcm(unit, spec.units[j])  # also of a dimension without a label: a view may bind it
        if label in dims:
            label = None
        dims.append(label)
        units.append(unit)
    return TensorSpec(shape, tuple(dims), dtype, tuple(units))


def resized(spec: TensorSpec, extents: tuple[int, ...]) -> TensorSpec:
    """`spec` with other extents of its last dimensions, of which positions need windows.

    A merged dimension among them is not split any more: windows do not end at multiples of its unit.
    """
    lead = len(spec.shape) - len(extents)
    labels = (None if unit > 1 else d for d, unit in zip(spec.dims[lead:], spec.units[lead:], strict=True))
    ones = (1,) * len(extents)
    return TensorSpec(
        (*spec.shape[:lead], *extents), (*spec.dims[:lead], *labels), spec.dtype, (*spec.units[:lead], *ones)
    )


def dim_index(dim: int, spec: TensorSpec) -> int:
    """`dim`, which may count from the end, as an index."""
    rank = len(spec.shape)
    if not -rank <= dim < rank:
        raise LayerwiseError(f"dimension {dim} of {spec.describe()}: there are only {rank}")
    return dim % rank


def only(spec: TensorSpec, dims: Sequence[int]) -> TensorSpec:
    """`spec` with only these of its dimensions, in this order."""
    shape, units = (tuple(row[i] for i in dims) for row in (spec.shape, spec.units))
    return TensorSpec(shape, tuple(spec.dims[i] for i in dims), spec.dtype, units)
