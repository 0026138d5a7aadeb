"""Instructions: the vocabulary of a program. Each names layers and tensors; consumers know their sizes and times.

What autograd saves for the backward pass is not an instruction, but a fact of a layer's kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from layerwise.geometry.arrays import Mask
from layerwise.graph.layer import Layer
from layerwise.graph.layer_graph import LayerGraph
from layerwise.ops.base import Role
from layerwise.partition.ahead import EdgeEnd
from layerwise.partition.buckets import BUCKET_BYTES

StepKind = Literal["training", "inference"]
Direction = Literal["forward", "recompute", "backward"]  # in which a tensor travels, or which of a layer's work


class AllGather(NamedTuple):
    """Starts gathering sharded parameters: those of a layer, by its name, or those of a bucket, by its number."""

    what: str | int


class Arrive(NamedTuple):
    """A layer that is about to compute waits for its gathered parameters."""

    layer: str
    what: str | int


class Release(NamedTuple):
    """After a layer has computed, the full parameters that were gathered for it alone are freed."""

    layer: str


class Begin(NamedTuple):
    """A transfer of a layer's input, or of its gradient, is issued; other layers compute meanwhile."""

    layer: str
    slot: int
    way: Direction


class End(NamedTuple):
    """An issued transfer is awaited."""

    layer: str
    slot: int
    way: Direction


class Move(NamedTuple):
    """A layer receives an input, or returns its gradient, at once. Nothing may need to be sent."""

    layer: str
    slot: int
    way: Direction


class Keep(NamedTuple):
    """The inputs of a block with recomputed layers are saved."""

    layer: str
    block: str  # the name of the block's last layer


class Compute(NamedTuple):
    """A layer's kernels run. saves: whether they save what the backward pass reads."""

    layer: str
    part: Direction
    saves: bool = False


class Output(NamedTuple):
    """The sink's outputs leave the network; in training the gradients of their losses return."""

    layer: str


class Fill(NamedTuple):
    """A layer's gradients are ready and these buckets are flushed: their sums are issued."""

    layer: str
    buckets: tuple[int, ...]


class Free(NamedTuple):
    """The last reader of a layer's output has read it."""

    value: str


class Forget(NamedTuple):
    """A block is recomputed: the inputs that were saved for it are freed."""

    block: str


class Update(NamedTuple):
    """All sums are awaited, and the optimizer steps."""


Instruction = (
    AllGather | Arrive | Release | Begin | End | Move | Keep | Compute | Output | Fill | Free | Forget | Update
)
# What a consumer does with each kind of instruction; None: nothing.
Effects = Mapping[type[Instruction], Callable[..., None] | None]


class Bucket(NamedTuple):
    """Gradients that are summed together, or parameters that are gathered together."""

    gradients: tuple[int, ...]  # indices in `StrategyFacts.gradients`
    states: str
    layer: str  # the layer of the first gradient
    first: str  # the first layer of the forward pass with parameters in it


class Program(NamedTuple):
    """The instructions of a step, in order, and the buckets that they refer to by number."""

    instructions: Sequence[Instruction]
    buckets: Sequence[Bucket]

    def forward(self) -> list[tuple[str, list[Instruction]]]:
        """The instructions of the forward pass, grouped by their layer, in order."""
        groups, group = list[tuple[str, list[Instruction]]](), list[Instruction]()
        computed: Compute | Output | None = None
        for one in (*self.instructions, Update()):
            if computed is not None and not isinstance(one, Release | Free):
                groups.append((computed.layer, group))
                if isinstance(computed, Output):
                    break
                group, computed = [], None
            group.append(one)
            if isinstance(one, Compute | Output):
                computed = one
        return groups

    def recomputed(self) -> dict[str, list[Instruction]]:
        """The instructions that recompute each block, by the name of its last layer."""
        groups, group = dict[str, list[Instruction]](), list[Instruction]()
        for one in self.instructions:
            if group or (isinstance(one, Move) and one.way == "recompute"):
                group.append(one)
            if isinstance(one, Forget):
                groups[one.block], group = group, []
        return groups


def fold(program: Program, *consumers: Effects) -> None:
    """Goes through a program, and passes each instruction to each consumer's function for its kind.

    Raises KeyError if a consumer has no entry for a kind, even one that does not occur in the program.
    """
    does = {
        kind: [act for effects in consumers if (act := effects[kind]) is not None] for kind in get_args(Instruction)
    }
    for one in program.instructions:
        for act in does[type(one)]:
            act(one)


class Gradient(NamedTuple):
    """Gradients of a layer's parameters that the same groups of devices sum."""

    layer: str
    group: Hashable  # equal for equal groups
    members: Mask  # (N,) the devices in any of the groups
    size_bytes: float
    states: str  # of the parameters: replicated, sharded or gathered


@dataclass(frozen=True, slots=True)
class StrategyFacts:
    """The facts of a strategy that its program depends on."""

    travels: Collection[EdgeEnd]  # inputs of layers that are not where they are needed
    recomputed: Collection[str]
    gathered: Sequence[str]  # layers whose parameters are gathered for them alone, in the graph's order
    gradients: Sequence[Gradient]  # in the order of `gradient_order`
    bucket_bytes: float = BUCKET_BYTES  # at which a bucket of gradients is full


def gradient_order(graph: LayerGraph) -> list[Layer]:
    """The layers in the order in which their gradients become complete.

    That is from last to first; parameters that several layers use come last of all.
    """
    tied = [layer for layer in reversed(graph.layers) if layer.role is Role.TIED]
    return [*(layer for layer in reversed(graph.layers) if layer.role is not Role.TIED), *tied]
