"""The base class of operators: shapes, needed boxes, parameters and work.

An operator computes over an *iteration space*: the dimensions of its output, then its reductions (`k`). A configuration
cuts that space into cells; `needs` maps a cell to the box of each input and parameter. Transfers, gradient
synchronization, memory and run time of the operator all follow from it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum, auto
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

import numpy as np

from layerwise.errors import LayerwiseError
from layerwise.geometry import needed
from layerwise.ops.facts import Counts, Dim, Extents, Gemm, Local, Maps, Parameter, Pieces, Saved, Space, Statistics
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
    """An operator: a frozen dataclass of its attributes (not of shapes, unless the network names them).

    A subclass defines at least `output` and `needs`; the defaults of the rest hold for element-wise work. `inputs` are
    the TensorSpecs of its activations, in order; parameters are not inputs. How to write one:
    docs/how-to/add_an_operator.md.

    Examples:
        >>> from layerwise.ops.nn.linear import Linear
        >>> from layerwise.tensor import TensorSpec
        >>> Linear(10).output(TensorSpec((32, 84), ("n", "c"))).describe()
        '(n=32, c=10)'
    """

    kind: ClassVar[str]
    view: ClassVar[bool] = False  # moves no data itself: fused into its consumer's `needs`
    role: ClassVar[Role] = Role.COMPUTE
    draws: ClassVar[bool] = False  # draws random numbers, in training
    draws_always: ClassVar[bool] = False  # also in evaluation
    ids: ClassVar[bool] = False  # its input is integers that look up rows
    weights: ClassVar[bool] = False  # has weights whose element type is the model's
    local_statistics: ClassVar[bool] = False  # on request it uses statistics of a device's own samples, like DDP
    arithmetic: ClassVar[bool] = True  # False: it only moves numbers, without FLOPs
    added: ClassVar[frozenset[str]] = frozenset()  # attributes that older plans' digests lack: left out if unset
    saves: ClassVar[Saved] = Saved()  # for backward: the inputs and output, unless a count depends on the boxes
    pointwise: ClassVar[bool] = False  # every output element depends only on its own index of the first input

    @property
    def remembers(self) -> bool:
        """True if training updates its buffers, even if nobody reads its output."""
        return False

    @property
    def random(self) -> bool:
        """True if it draws random numbers in training."""
        return False

    @property
    def detaches(self) -> bool:
        """True if no gradient flows back through it."""
        return False

    @property
    def loss(self) -> Literal["mean", "sum"] | None:
        """PyTorch's reduction over the batch, if the result is a loss with one number a sample; otherwise None."""
        return None

    @property
    def elementwise(self) -> bool:
        """True if it maps every element of its single input to one output element, in a tensor of any shape."""
        return False

    def unchanged(self, inputs: Sequence[TensorSpec]) -> bool:
        """True if its result is its first input, or a view of it."""
        return self.view

    @abstractmethod
    def output(self, *inputs: TensorSpec) -> TensorSpec:
        """The output's shape, labels and type. Raises LayerwiseError if the shapes do not fit."""

    @abstractmethod
    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        """For every input, one AxisMap a dimension from the iteration space."""

    def parameters(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Parameter, ...]:
        """Parameters and buffers, in a fixed order."""
        return ()

    def reductions(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Dim, ...]:
        """Dimensions that are summed over and can be split (`k`)."""
        return ()

    def unsplit(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> frozenset[int]:
        """Output dimensions that this operator cannot be split along, though they have a label."""
        return frozenset()

    def epilogue_inputs(self, inputs: Sequence[TensorSpec]) -> tuple[bool, ...]:
        """Inputs that are used after the reduction over k (see Parameter.epilogue)."""
        return (False,) * len(inputs)

    def flops(self, inputs: Sequence[TensorSpec], extents: Extents) -> Counts:
        """Forward FLOPs for boxes of these extents, of shape (...). Default: one an output element."""
        volumes: Counts = np.prod(extents, axis=-1, dtype=np.float64)
        return volumes if self.arithmetic else np.zeros_like(volumes)

    def gemms(self, inputs: Sequence[TensorSpec], extents: Extents) -> tuple[Gemm, ...]:
        """The forward pass as matrix products, if it consists of them (they then define `flops`)."""
        return ()

    def stages(self, inputs: Sequence[TensorSpec]) -> tuple[Stage, ...]:
        """The operators that run one after the other. All share the output's dimensions."""
        where = space(self, tuple(inputs))
        views = ((),) * len(inputs)
        return (Stage(self, tuple(inputs), where, views, slice(len(inputs)), slice(len(where.parameters))),)

    def statistics(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> Statistics | None:
        """What it all-reduces among its own cells in the forward pass; the backward pass does the same."""
        return None

    def saved(self, inputs: Sequence[TensorSpec], lo: Extents, hi: Extents) -> Saved:
        """The kernel's memory saved for backward and temporary memory, for boxes [lo, hi) of the iteration space."""
        return self.saves

    def pieces(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> Pieces | None:
        """The inputs that `run_pieces` reads a piece at a time, where nothing is differentiated; None: it needs all."""
        return None

    def margins(self, local: Local) -> Mapping[int, tuple[int, int]]:
        """Zeros (low, high) by dimension that the kernel pads its first input with, unless that arrives padded."""
        return {}

    def rebatch(self, inputs: Sequence[TensorSpec], out: TensorSpec, new_inputs: Sequence[TensorSpec]) -> Op:
        """The operator at another batch size; only those that name sizes (reshape, expand) change."""
        return self

    def at_batch(self, old: int, new: int) -> Op:
        """The operator for `new` instead of `old` samples, if its inputs do not tell (Expand of a class token)."""
        return self

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        """The kernel: computes the box `local.out` of the output from the boxes `local.needs` of the inputs.

        `parameters` are by the operator's names, each the box that the cell needs. If a reduction is split, they lack
        those of the epilogue, the result is a partial sum, and `finish` adds those once it is complete.
        """
        raise LayerwiseError(f"layerwise can plan {self.kind}, but has no kernel to run it")

    def run_pieces(
        self, local: Local, inputs: Sequence[Tensor], pieces: Iterator[tuple[int, int, Sequence[Tensor]]]
    ) -> Tensor:
        """The kernel without a backward pass. inputs: all but those in `pieces`, which has bounds and boxes."""
        raise LayerwiseError(f"{self.kind} has no kernel that reads pieces")

    def finish(self, total: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        """Applies what follows the reduction, a bias: `total` is a box of the sum, `parameters` the epilogue's."""
        return total

    def rows(self) -> dict[str, object]:
        """Attributes for the graph digest and for display: JSON types only."""
        rows: dict[str, object] = {"kind": self.kind}
        if self.pointwise:  # digests have always included it
            rows["pointwise"] = True
        if is_dataclass(self):
            rows |= {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in rows.items() if value or name not in self.added}


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """One operator of a layer at given shapes: the main one, or one of the epilogue."""

    op: Op
    specs: tuple[TensorSpec, ...]  # of all its inputs, after their views
    space: Space  # of `op` on `specs`
    views: tuple[tuple[Op, ...], ...]  # the chain of views before each input that comes from outside the layer
    inputs: slice  # the layer's inputs that it uses
    parameters: slice  # the layer's parameters that it uses
    slot: int | None = None  # the input that is the running result; None: it is the main operator

    @property
    def epilogue(self) -> bool:
        """True if it follows the reduction over k, so it works on the box that a device owns."""
        return self.slot is not None

    @property
    def view(self) -> bool:
        """True if its result is its first input, or a view of it."""
        return self.op.unchanged(self.specs)

    @property
    def label(self) -> str:
        """Its operator's function or kind for display, such as `relu`."""
        return str(getattr(self.op, "fn", "") or self.op.kind)

    def outside(self, row: Sequence[T]) -> list[T]:
        """The entries for inputs from outside the layer, from a list with an entry for each input."""
        return [entry for i, entry in enumerate(row) if i != self.slot]

    def statistics(self, *, local_batch_norm: bool = False) -> Statistics | None:
        """What it all-reduces; None also if batch norms use statistics of each device's own samples."""
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
