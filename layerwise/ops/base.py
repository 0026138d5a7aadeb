"""The base class of operators: shapes, the boxes that one needs, its parameters, its work.

An operator computes over an *iteration space*: the dimensions of its output, then its reductions (`k`). A
configuration cuts that space into cells; `needs` maps a cell to the box of each input and of each parameter. The
transfers, the gradient synchronisation, the memory and the run time of the operator all follow from it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum, auto
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

import numpy as np

from layerwise.errors import LayerwiseError
from layerwise.geometry import needed
from layerwise.ops.facts import Counts, Dim, Extents, Gemm, Local, Maps, Parameter, Saved, Space, Statistics
from layerwise.tensor import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class Role(Enum):
    """The part that an operator plays in a network."""

    COMPUTE = auto()
    INPUT = auto()  # a tensor that the data loader feeds
    CONSTANT = auto()  # a tensor that is neither fed nor trained: every device makes its own
    TIED = auto()  # a parameter that several layers use: each use is an edge
    SINK = auto()  # where all outputs meet


class Op(ABC):
    """An operator: a frozen dataclass of its attributes (never of shapes, except where the network names them).

    A subclass says what it computes in `output` and `needs`; the rest has defaults that hold for element-wise work.
    `inputs` are the TensorSpecs of its activations, in order. Parameters are not inputs. How to write one:
    docs/how-to/add_an_operator.md.

    Examples:
        >>> from layerwise.ops.nn.linear import Linear
        >>> from layerwise.tensor import TensorSpec
        >>> Linear(10).output(TensorSpec((32, 84), ("n", "c"))).describe()
        '(n=32, c=10)'
    """

    kind: ClassVar[str]
    view: ClassVar[bool] = False  # moves no data by itself: fused into its consumer's `needs`
    role: ClassVar[Role] = Role.COMPUTE
    draws: ClassVar[bool] = False  # random numbers, in training
    draws_always: ClassVar[bool] = False  # in evaluation, too
    ids: ClassVar[bool] = False  # its input is of integers that look up rows
    weights: ClassVar[bool] = False  # has weights whose element type is the model's
    local_statistics: ClassVar[bool] = False  # on request it takes statistics of a device's own samples, as DDP does
    arithmetic: ClassVar[bool] = True  # else it only moves numbers: no FLOPs
    added: ClassVar[frozenset[str]] = frozenset()  # attributes that digests of older plans lack: left out where unset
    saves: ClassVar[Saved] = Saved()  # for backward: inputs and output, where no number follows from the boxes
    pointwise: ClassVar[bool] = False  # every output element depends on its own index of the first input only

    @property
    def remembers(self) -> bool:
        """True if training changes its buffers, also where nobody reads its output."""
        return False

    @property
    def random(self) -> bool:
        """True if it draws random numbers in training."""
        return False

    @property
    def detaches(self) -> bool:
        """True if no gradient goes back through it."""
        return False

    @property
    def loss(self) -> Literal["mean", "sum"] | None:
        """The kind of loss where its result is one, a number a sample: what PyTorch's is of them, over the batch."""
        return None

    @property
    def elementwise(self) -> bool:
        """True if it makes every element of its one input into another, in a tensor of any shape."""
        return False

    def unchanged(self, inputs: Sequence[TensorSpec]) -> bool:
        """True if its result is its first input, or a view of it."""
        return self.view

    @abstractmethod
    def output(self, *inputs: TensorSpec) -> TensorSpec:
        """The output's shape, labels and type. Raises LayerwiseError where the shapes do not fit."""

    @abstractmethod
    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        """One AxisMap a dimension for every input, from the iteration space."""

    def parameters(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Parameter, ...]:
        """Parameters and buffers, in a fixed order."""
        return ()

    def reductions(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Dim, ...]:
        """Dimensions that are summed over and can be split (`k`)."""
        return ()

    def unsplit(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> frozenset[int]:
        """Output dimensions that this operator cannot be split along, though they carry a label."""
        return frozenset()

    def epilogue_inputs(self, inputs: Sequence[TensorSpec]) -> tuple[bool, ...]:
        """Inputs that are used after the reduction over k (see Parameter.epilogue)."""
        return (False,) * len(inputs)

    def flops(self, inputs: Sequence[TensorSpec], extents: Extents) -> Counts:
        """Forward FLOPs of boxes of the given extents, of shape (...). Default: one an output element."""
        volumes: Counts = np.prod(extents, axis=-1, dtype=np.float64)
        return volumes if self.arithmetic else np.zeros_like(volumes)

    def gemms(self, inputs: Sequence[TensorSpec], extents: Extents) -> tuple[Gemm, ...]:
        """The forward pass as matrix products, where it is (then `flops` is theirs)."""
        return ()

    def stages(self, inputs: Sequence[TensorSpec]) -> tuple[Stage, ...]:
        """The operators that run one after the other. All share the output's dimensions."""
        where = space(self, tuple(inputs))
        views = ((),) * len(inputs)
        return (Stage(self, tuple(inputs), where, views, slice(len(inputs)), slice(len(where.parameters))),)

    def statistics(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> Statistics | None:
        """Elements that it all-reduces among its own cells, forward; the backward pass does the same again."""
        return None

    def saved(self, inputs: Sequence[TensorSpec], lo: Extents, hi: Extents) -> Saved:
        """Memory that the kernel saves for backward and takes meanwhile, for boxes [lo, hi) of the iteration space."""
        return self.saves

    def margins(self, local: Local) -> Mapping[int, tuple[int, int]]:
        """Zeros (low, high) by dimension that the kernel copies around its first input, unless that comes with them."""
        return {}

    def rebatch(self, inputs: Sequence[TensorSpec], out: TensorSpec, new_inputs: Sequence[TensorSpec]) -> Op:
        """The operator at another batch; only those that name sizes (reshape, expand) change."""
        return self

    def at_batch(self, old: int, new: int) -> Op:
        """The operator for `new` samples, not `old`, where its inputs do not tell (Expand of a class token)."""
        return self

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        """The kernel: the box `local.out` of the output, from the boxes `local.needs` of the inputs.

        `parameters` by the operator's names, each the box that the cell needs. Where a reduction is split they lack
        those of the epilogue, the result is a partial sum, and `finish` adds those once it is complete.
        """
        raise LayerwiseError(f"layerwise can plan {self.kind} but has no kernel to run it")

    def finish(self, total: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        """Adds what follows the reduction (a bias): `total` is a box of the sum, `parameters` those of the epilogue."""
        return total

    def rows(self) -> dict[str, object]:
        """Attributes for the graph digest and for people: JSON types only."""
        rows: dict[str, object] = {"kind": self.kind}
        if self.pointwise:  # digests have had it from the beginning
            rows["pointwise"] = True
        if is_dataclass(self):
            rows |= {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in rows.items() if value or name not in self.added}


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """One operator of a layer at given shapes: the main one, or one of the epilogue."""

    op: Op
    specs: tuple[TensorSpec, ...]  # of all its inputs, behind their views
    space: Space  # of `op` on `specs`
    views: tuple[tuple[Op, ...], ...]  # the chain of views in front of each input that comes from outside the layer
    inputs: slice  # which of the layer's inputs those are
    parameters: slice  # which of the layer's parameters are its
    slot: int | None = None  # which of its inputs is the result so far; None: it is the main operator

    @property
    def epilogue(self) -> bool:
        """True if it comes after the reduction over k, and so works on what a device owns of the output."""
        return self.slot is not None

    @property
    def view(self) -> bool:
        """True if its result is its first input, or a view of it."""
        return self.op.unchanged(self.specs)

    @property
    def label(self) -> str:
        """`relu`: the function or the kind of its operator, for people."""
        return str(getattr(self.op, "fn", "") or self.op.kind)

    def outside(self, row: Sequence[T]) -> list[T]:
        """Entries for inputs from outside the layer, of a row with an entry for each input."""
        return [entry for i, entry in enumerate(row) if i != self.slot]

    def statistics(self, *, local_batch_norm: bool = False) -> Statistics | None:
        """Elements that it all-reduces; None too where batch norms take statistics of each device's own samples."""
        if local_batch_norm and self.op.local_statistics:
            return None
        return self.op.statistics(self.specs, self.space.out)


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
    return Space(
        out,
        dims + op.reductions(inputs, out),
        needs,
        op.parameters(inputs, out),
        op.epilogue_inputs(inputs),
    )


def volumes(maps: Maps, lo: Extents, hi: Extents) -> Counts:
    """Elements of the boxes of a tensor that `maps` need for boxes [lo, hi) of the iteration space, (..., D) arrays."""
    first, last = needed(maps, lo, hi)
    total: Counts = np.prod(last - first, axis=-1, dtype=np.float64) * (hi > lo).all(-1)  # an empty box needs nothing
    return total
