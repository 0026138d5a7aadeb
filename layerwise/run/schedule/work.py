"""Work: what one rank computes of one layer, from the same geometry that prices it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from layerwise.comm.base import Comm, Group
from layerwise.graph.layer import Layer
from layerwise.ops.fused import InPieces, LocalStage, local_stages, run_stages
from layerwise.ops.random import combine
from layerwise.partition.groups import Reduction, reduction, statistics
from layerwise.partition.place import Place


@dataclass(frozen=True, slots=True)
class LayerWork:
    """A rank's part of a layer."""

    name: str  # the layer's name
    number: int  # the layer's number in the graph, which its random numbers depend on
    stages: tuple[LocalStage, ...]
    statistics: tuple[Group, ...]  # for each stage, the ranks that share its statistics; (): none
    reduction: Reduction | None  # of partial sums, if the contraction dimension is split

    @property
    def communicates(self) -> bool:
        """True if the layer's ranks communicate while they compute it."""
        return self.reduction is not None or any(self.statistics)

    @property
    def margins(self) -> Mapping[int, tuple[int, int]]:
        """Returns the zeros (low, high), by dimension, with which the main operator pads its first input."""
        main = self.stages[0]
        return main.stage.op.margins(main.training) if main.views and not main.views[0] else {}

    def padded(self) -> LayerWork:
        """Returns the same work for a first input that includes its margins."""
        return replace(self, stages=(self.stages[0].padded(), *self.stages[1:]))

    def run(
        self,
        comm: Comm,
        inputs: Sequence[Tensor],
        parameters: Sequence[Tensor],
        *,
        training: bool,
        seed: int,
        pieces: InPieces | None = None,
    ) -> Tensor:
        """Returns the rank's box of the output. Every rank of the layer must call it at the same point of the plan."""
        reduction = self.reduction
        return run_stages(
            self.stages,
            inputs,
            parameters,
            training=training,
            seed=lambda stage: combine(seed, self.number, stage),
            reduce=None if reduction is None else lambda partial: _reduce_scatter(partial, comm, reduction, self.name),
            pieces=pieces,
        )


def work(layer: Layer, number: int, place: Place, comm: Comm, *, local_batch_norm: bool) -> LayerWork | None:
    """Returns a rank's part of a layer, or None. `number` is the layer's in the graph."""
    rank = comm.rank
    cell, owned = place.computed.each[rank], place.owned.each[rank]
    if cell is None or owned is None:
        return None
    summed = statistics(layer, place, rank, local_batch_norm=local_batch_norm)
    stages = local_stages(
        layer.stages, layer.specs, cell, owned, lambda stage: summing(comm, summed[stage], layer.name), comm.device
    )
    return LayerWork(layer.name, number, stages, summed, reduction(layer, place, rank))


def summing(comm: Comm, group: Group, what: str) -> Callable[[Tensor], Tensor] | None:
    """Returns a function that sums a tensor over a group; None for no group. `what`: for error messages."""
    if not group:
        return None

    def all_reduce(tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        comm.all_reduce(tensor, group, "statistics", what).wait()
        return tensor

    return all_reduce


def _reduce_scatter(partial: Tensor, comm: Comm, reduction: Reduction, what: str) -> Tensor:
    """Returns this rank's shard of the sum of all ranks' partial sums (reduce-scatter); its
    backward is an all-gather.
    """
    ways = (lambda x: _summed(x, comm, reduction, what)), (lambda x: _gathered(x, comm, reduction, what))
    total: Tensor = _Linear.apply(partial, *ways)  # type: ignore[no-untyped-call]
    return total


class _Linear(torch.autograd.Function):
    """A linear function of a tensor and its adjoint `back`; each is the other's backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.ways = back, there
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Linear.apply(grad, *ctx.ways), None, None  # type: ignore[no-untyped-call]


def _summed(partial: Tensor, comm: Comm, reduction: Reduction, what: str) -> Tensor:
    """Returns this rank's shard of the sum, added up in the order of the ranks."""
    parts = {rank: partial[box.slices(reduction.cell)].contiguous() for rank, box in reduction.owned}
    own_part = parts.pop(comm.rank)
    received = [(rank, torch.empty_like(own_part)) for rank in parts]
    comm.exchange(list(parts.items()), received, "transfers", what).wait()
    in_order = sorted([*received, (comm.rank, own_part)], key=lambda pair: pair[0])
    total = in_order[0][1].clone()
    for _, part in in_order[1:]:
        total += part
    return total


def _gathered(own_part: Tensor, comm: Comm, reduction: Reduction, what: str) -> Tensor:
    """Returns the parts of all ranks, in their box."""
    own_part = own_part.contiguous()
    others = [(rank, box) for rank, box in reduction.owned if rank != comm.rank]
    received = [(rank, own_part.new_empty(box.shape)) for rank, box in others]
    comm.exchange([(rank, own_part) for rank, _ in others], received, "transfers", what).wait()
    full = own_part.new_empty(reduction.cell.shape)
    full[dict(reduction.owned)[comm.rank].slices(reduction.cell)] = own_part
    for (_, part), (_, box) in zip(received, others, strict=True):
        full[box.slices(reduction.cell)] = part
    return full
