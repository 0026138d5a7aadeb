"""Work: what one rank computes of one layer, from the same geometry that prices it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from layerwise.comm.base import Comm, Group
from layerwise.geometry import Box
from layerwise.graph.layer import Layer
from layerwise.ops.fused import InPieces, LocalStage, local_stages, run_stages
from layerwise.ops.random import combine
from layerwise.partition.groups import sharing, statistics
from layerwise.partition.moved import transfer
from layerwise.partition.place import Place
from layerwise.run.schedule.redistribute import Redistribution


@dataclass(frozen=True, slots=True)
class LayerWork:
    """A rank's part of a layer."""

    number: int  # the layer's number in the graph, which its random numbers depend on
    stages: tuple[LocalStage, ...]
    statistics: tuple[Group, ...]  # for each stage, the ranks that share its statistics; (): none
    reduction: Redistribution | None  # its adjoint sums partial sums, if the contraction dimension is split

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
            reduce=None if reduction is None else lambda partial: _Summed.apply(partial, reduction, False),  # type: ignore[no-untyped-call]
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
    return LayerWork(number, stages, summed, _reduction(layer, place, comm))


def summing(comm: Comm, group: Group, what: str) -> Callable[[Tensor], Tensor] | None:
    """Returns a function that sums a tensor over a group; None for no group. `what`: for error messages."""
    if not group:
        return None

    def all_reduce(tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        comm.all_reduce(tensor, group, "statistics", what).wait()
        return tensor

    return all_reduce


def _reduction(layer: Layer, place: Place, comm: Comm) -> Redistribution | None:
    """Returns the gather of shards of sums over k, whose adjoint sums partial sums; None if k is not split."""
    cells, outputs = place.computed.each, len(layer.out.shape)
    cell, ks = cells[comm.rank], range(outputs, len(layer.space.dims))
    assert cell is not None
    if all(cell.lo[k] == 0 and cell.hi[k] == layer.space.dims[k].extent for k in ks):
        return None
    members, summed = sharing(cells, comm.rank, ks), Box(cell.lo[:outputs], cell.hi[:outputs])
    need = tuple(summed if rank in members else None for rank in range(comm.size))
    owned = tuple(box if rank in members else None for rank, box in enumerate(place.owned.each))
    return Redistribution(transfer(owned, need, comm.rank, by_messages=True), comm, layer.name)


class _Summed(torch.autograd.Function):
    """This rank's shard of the sum of all ranks' partial sums, or (`back`) all ranks' shards: each other's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: Redistribution, back: bool) -> Tensor:
        ctx.shards, ctx.back = shards, back
        result = (shards.begin if back else shards.begin_adjoint)(x, x).finish()
        assert result is not None
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _Summed.apply(gradient, ctx.shards, not ctx.back), None, None  # type: ignore[no-untyped-call]
