"""Work: what one rank computes of one layer, compiled from the same geometry that priced it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from layerwise.comm.base import Comm, Group
from layerwise.geometry import Box
from layerwise.graph.layer import Layer
from layerwise.ops.base import Maps, Op, space
from layerwise.ops.fused import Fused
from layerwise.ops.local import Local
from layerwise.ops.random import combine
from layerwise.run.place import Boxes, Place, needed
from layerwise.tensor import TensorSpec

Chain = tuple[tuple[Op, Local], ...]  # views of one input, first applied first


@dataclass(frozen=True, slots=True)
class Stage:
    """One operator of a layer: the main one, or a follower whose input `slot` is the running result.

    views: of each input that comes from outside. parameters: the operator's name of each, and its place among the
    layer's. statistics: the ranks that share the operator's, () where this rank has all that it needs.
    """

    op: Op
    local: Local
    views: tuple[Chain, ...]
    slot: int | None
    parameters: Mapping[str, int]
    statistics: Group


@dataclass(frozen=True, slots=True)
class Reduction:
    """The reduce-scatter of partial sums over k: all members have sums of `cell`; each (rank, box) keeps its box."""

    cell: Box
    owned: tuple[tuple[int, Box], ...]


@dataclass(frozen=True, slots=True)
class Work:
    """A rank's part of a layer."""

    name: str
    number: int
    stages: tuple[Stage, ...]
    reduction: Reduction | None

    def run(
        self, comm: Comm, inputs: Sequence[Tensor], parameters: Sequence[Tensor], *, training: bool, seed: int
    ) -> Tensor:
        """The rank's box of the output. Every rank of the layer calls it at the same point of the plan."""
        given = list(inputs)
        result: Tensor | None = None
        for number, stage in enumerate(self.stages):
            values = [_viewed(given.pop(0), chain) for chain in stage.views]
            if stage.slot is not None:
                assert result is not None
                values.insert(stage.slot, result)
            named = {name: parameters[i] for name, i in stage.parameters.items()}
            local = replace(
                stage.local,
                training=training,
                seed=combine(seed, self.number, number),
                all_reduce=_summing(comm, stage.statistics, self.name) if stage.statistics else None,
            )
            if number == 0 and self.reduction is not None:
                late = {p.name for p in local.space.parameters if p.late}
                early = {name: value for name, value in named.items() if name not in late}
                total = _reduce_scatter(stage.op.run(local, values, early), comm, self.reduction, self.name)
                result = stage.op.finish(total, {name: value for name, value in named.items() if name in late})
            else:
                result = stage.op.run(local, values, named)
        assert result is not None
        return result


def work(layer: Layer, number: int, place: Place, rank: int, *, local_batch_norm: bool) -> Work | None:
    """A rank's part of a layer, None where it has none. `number` is the layer's in the graph."""
    if place.cells[rank] is None:
        return None
    op = layer.op if isinstance(layer.op, Fused) else Fused(layer.op, ((),) * len(layer.specs))
    at = {p.name: i for i, p in enumerate(layer.space.parameters)}
    taken = len(layer.specs) - sum(f.extras for f in op.followers)
    stages = [_stage(op.main, layer.specs[:taken], op.views[:taken], None, place.cells, rank, at, "")]
    for i, follower in enumerate(op.followers):
        rows = slice(taken, taken + follower.extras)
        taken += follower.extras
        running = stages[-1].local.space.out
        inner = (follower.slot, running)
        stages.append(_stage(follower.op, layer.specs[rows], op.views[rows], inner, place.owned, rank, at, f"{i}."))
    if local_batch_norm:
        stages = [replace(s, statistics=()) if s.op.kind == "batch_norm" else s for s in stages]
    return Work(layer.name, number, tuple(stages), _reduction(layer, place, rank))


def _stage(
    op: Op,
    outside: Sequence[TensorSpec],
    views: Sequence[Sequence[Op]],
    inner: tuple[int, TensorSpec] | None,
    boxes: Boxes,
    rank: int,
    at: Mapping[str, int],
    prefix: str,
) -> Stage:
    specs = [_seen(spec, chain) for spec, chain in zip(outside, views, strict=True)]
    slot = None
    if inner is not None:
        slot = inner[0]
        specs.insert(slot, inner[1])
    where = space(op, tuple(specs))
    box = boxes[rank]
    assert box is not None
    needs = [_needed(maps, box) for maps in where.needs]
    outer = [need for i, need in enumerate(needs) if i != slot]
    chains = tuple(_chain(c, spec, need) for c, spec, need in zip(views, outside, outer, strict=True))
    statistics = op.statistics(tuple(specs), where.out)
    group = () if statistics is None else _sharing(boxes, rank, statistics.over)
    own = {p.name: at[prefix + p.name] for p in where.parameters}
    return Stage(op, Local(where, tuple(specs), box, tuple(needs)), chains, slot, own, group if len(group) > 1 else ())


def _seen(spec: TensorSpec, chain: Sequence[Op]) -> TensorSpec:
    for view in chain:
        spec = view.output(spec)
    return spec


def _chain(views: Sequence[Op], spec: TensorSpec, wanted: Box) -> Chain:
    """Views with the boxes that they are given and shall give, from what the operator needs backwards."""
    specs = [spec]
    for view in views:
        specs.append(view.output(specs[-1]))
    result: list[tuple[Op, Local]] = []
    for view, before in reversed(list(zip(views, specs, strict=False))):
        where = space(view, (before,))
        given = _needed(where.needs[0], wanted)
        result.insert(0, (view, Local(where, (before,), wanted, (given,))))
        wanted = given
    return tuple(result)


def _viewed(x: Tensor, chain: Chain) -> Tensor:
    for view, local in chain:
        x = view.run(local, [x], {})
    return x


def _needed(maps: Maps, box: Box) -> Box:
    (need,) = needed(maps, (box,))
    assert need is not None
    return need


def _sharing(boxes: Boxes, rank: int, over: Sequence[int]) -> Group:
    """Ranks whose boxes differ from this one's along `over` only."""

    def rest(box: Box) -> list[tuple[int, int]]:
        return [ends for i, ends in enumerate(zip(box.lo, box.hi, strict=True)) if i not in over]

    mine = boxes[rank]
    assert mine is not None
    return tuple(r for r, box in enumerate(boxes) if box is not None and rest(box) == rest(mine))


def _reduction(layer: Layer, place: Place, rank: int) -> Reduction | None:
    cell, outputs = place.cells[rank], len(layer.out.shape)
    assert cell is not None
    ks = range(outputs, len(layer.space.dims))
    if all(cell.lo[k] == 0 and cell.hi[k] == layer.space.dims[k].extent for k in ks):
        return None
    members = _sharing(place.cells, rank, ks)
    owned = tuple((r, box) for r in members if (box := place.owned[r]) is not None)
    return Reduction(Box(cell.lo[:outputs], cell.hi[:outputs]), owned)


def _summing(comm: Comm, group: Group, what: str) -> Callable[[Tensor], Tensor]:
    def all_reduce(tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        comm.all_reduce(tensor, group, "statistics", what).wait()
        return tensor

    return all_reduce


def _reduce_scatter(partial: Tensor, comm: Comm, reduction: Reduction, what: str) -> Tensor:
    total: Tensor = _ReduceScatter.apply(partial, comm, reduction, what)  # type: ignore[no-untyped-call]
    return total


class _ReduceScatter(torch.autograd.Function):
    """Partial sums of a box of the output become sums of the parts of it that the ranks own; back: an all-gather."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, comm: Comm, reduction: Reduction, what: str) -> Tensor:
        ctx.comm, ctx.reduction, ctx.what = comm, reduction, what
        parts = {rank: partial[box.slices(reduction.cell)].contiguous() for rank, box in reduction.owned}
        mine = parts.pop(comm.rank)
        received = [(rank, torch.empty_like(mine)) for rank in parts]
        comm.exchange(list(parts.items()), received, "transfers", what)
        in_order = sorted([*received, (comm.rank, mine)], key=lambda pair: pair[0])
        total = in_order[0][1].clone()
        for _, part in in_order[1:]:
            total += part
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        comm, reduction = ctx.comm, ctx.reduction
        grad = grad.contiguous()
        others = [(rank, box) for rank, box in reduction.owned if rank != comm.rank]
        received = [(rank, grad.new_empty(box.shape)) for rank, box in others]
        comm.exchange([(rank, grad) for rank, _ in others], received, "transfers", ctx.what)
        whole = grad.new_empty(reduction.cell.shape)
        whole[dict(reduction.owned)[comm.rank].slices(reduction.cell)] = grad
        for (_, part), (_, box) in zip(received, others, strict=True):
            whole[box.slices(reduction.cell)] = part
        return whole, None, None, None
