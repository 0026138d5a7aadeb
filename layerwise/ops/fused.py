"""Fused: one operator with the views before its inputs and the element-wise epilogue after it.

A view (flatten, transpose, slice) moves nothing: fused into its consumer, it only changes which box of the producer is
needed. The epilogue (batch norm, relu, dropout, residual add) runs where its producer's output already is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from layerwise.geometry import Box, needed
from layerwise.ops.base import Op, Stage, space
from layerwise.ops.facts import AllReduce, Dim, Local, Maps, Parameter, Space
from layerwise.ops.random import Seed
from layerwise.tensor import TensorSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class EpilogueOp:
    """An element-wise operator whose input `slot` is the running result; its other inputs come from outside."""

    op: Op
    slot: int = 0
    extras: int = 0


@dataclass(frozen=True, slots=True)
class Fused(Op):
    """`main` on its inputs, each through its views, then the epilogue in order.

    Inputs: those of `main`, then the other inputs of each operator of the epilogue.
    """

    kind: ClassVar[str] = "fused"
    main: Op
    views: tuple[tuple[Op, ...], ...]  # of each input, first applied first; usually ()
    epilogue: tuple[EpilogueOp, ...] = ()

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        return self.stages(inputs)[-1].space.out

    def stages(self, inputs: Sequence[TensorSpec]) -> tuple[Stage, ...]:
        viewed = [viewed_spec(spec, chain) for spec, chain in zip(inputs, self.views, strict=True)]
        extras = [f.extras for f in self.epilogue]
        ops = [(self.main, None, len(viewed) - sum(extras)), *((f.op, f.slot, f.extras) for f in self.epilogue)]
        stages: list[Stage] = []
        first, held = 0, 0  # indices of the next stage's first input and parameter
        for op, slot, count in ops:
            rows = slice(first, first + count)
            specs = viewed[rows]
            if slot is not None:
                specs.insert(slot, stages[-1].space.out)
            where = space(op, tuple(specs))
            assert slot is None or where.out.shape == specs[slot].shape, f"{op} changes the shape: it cannot follow"
            parameters = slice(held, held + len(where.parameters))
            stages.append(Stage(op, tuple(specs), where, self.views[rows], rows, parameters, slot))
            first, held = rows.stop, parameters.stop
        return tuple(stages)

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        direct = [maps for stage in self.stages(inputs) for maps in stage.outside(stage.space.needs)]
        return tuple(
            through_views(maps, spec, chain) for maps, spec, chain in zip(direct, inputs, self.views, strict=True)
        )

    def epilogue_inputs(self, inputs: Sequence[TensorSpec]) -> tuple[bool, ...]:
        return tuple(stage.epilogue for stage in self.stages(inputs) for _ in stage.views)

    def parameters(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Parameter, ...]:
        first, *rest = self.stages(inputs)
        epilogue = [
            replace(p, name=f"{i}.{p.name}", epilogue=True) for i, s in enumerate(rest) for p in s.space.parameters
        ]
        return (*first.space.parameters, *epilogue)

    def reductions(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Dim, ...]:
        first = self.stages(inputs)[0].space
        return first.dims[len(first.out.shape) :]

    def unsplit(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> frozenset[int]:
        spaces = (stage.space for stage in self.stages(inputs))
        return frozenset(i for s in spaces for i, d in enumerate(s.dims[: len(out.shape)]) if d.label is None)

    def rebatch(self, inputs: Sequence[TensorSpec], out: TensorSpec, new_inputs: Sequence[TensorSpec]) -> Op:
        chains, after = [], []
        for chain, old, new in zip(self.views, inputs, new_inputs, strict=True):
            views = []
            for view in chain:
                again = view.rebatch((old,), view.output(old), (new,))
                old, new = view.output(old), again.output(new)
                views.append(again)
            chains.append(tuple(views))
            after.append(new)
        first = self.stages(inputs)[0]
        main = self.main.rebatch(first.specs, first.space.out, tuple(after[first.inputs]))
        return replace(self, main=main, views=tuple(chains))

    def at_batch(self, old: int, new: int) -> Op:
        return replace(self, main=self.main.at_batch(old, new))

    def rows(self) -> dict[str, object]:
        return {
            "kind": self.kind,
            "main": self.main.rows(),
            "views": [[v.rows() for v in chain] for chain in self.views],
            "followers": [{"op": f.op.rows(), "slot": f.slot, "extras": f.extras} for f in self.epilogue],
        }


def viewed_spec(spec: TensorSpec, chain: Sequence[Op]) -> TensorSpec:
    """The shape and type of a tensor seen through a chain of views."""
    for view in chain:
        spec = view.output(spec)
    return spec


def through_views(maps: Maps, spec: TensorSpec, chain: Sequence[Op]) -> Maps:
    """Maps to the dimensions of `spec`, given the maps to the dimensions of its view through `chain`."""
    specs = [spec]
    for view in chain:
        specs.append(view.output(specs[-1]))
    for view, before, after in reversed(list(zip(chain, specs, specs[1:], strict=False))):
        (inner,) = view.needs((before,), after)
        maps = tuple(m if m.source is None else maps[m.source].then(m) for m in inner)
    return maps


Chain = tuple[tuple[Op, Local], ...]  # the views of one input, first applied first


@dataclass(frozen=True, slots=True)
class LocalStage:
    """A stage on the device that computes a cell of it."""

    stage: Stage
    training: Local
    evaluation: Local
    views: tuple[Chain, ...]  # of each input from outside
    parameters: Mapping[str, int]  # by the operator's names, their indices in the layer

    def padded(self) -> LocalStage:
        """The same stage for a first input that includes the operator's margins."""
        training, evaluation = (replace(local, padded=True) for local in (self.training, self.evaluation))
        return replace(self, training=training, evaluation=evaluation)


@dataclass(frozen=True, slots=True)
class InPieces:
    """Inputs of a layer's main operator that come a piece at a time: the bounds, and boxes of their sources."""

    maps: Mapping[int, Maps]  # as in `Pieces`
    received: Iterator[tuple[int, int, Sequence[Tensor]]]

    def viewed(self, own: LocalStage) -> Iterator[tuple[int, int, Sequence[Tensor]]]:
        """Yields the pieces as the operator sees them."""
        stage, cell = own.stage, own.evaluation.cell
        for lo, hi, tensors in self.received:
            piece, seen = Box((*cell.lo, lo), (*cell.hi, hi)), []
            for slot, x in zip(self.maps, tensors, strict=True):
                views = stage.views[slot]
                source = own.views[slot][0][1].specs[0] if views else stage.specs[slot]
                seen.append(_viewed(x, _chain(views, source, needed_box(self.maps[slot], piece))))
            yield lo, hi, seen


def local_stages(
    stages: Sequence[Stage],
    inputs: Sequence[TensorSpec],
    cell: Box,
    owned: Box,
    all_reduce: Callable[[int], AllReduce | None] = lambda _: None,
    device: torch.device | None = None,
) -> tuple[LocalStage, ...]:
    """The stages of one cell of a layer: the main operator on `cell`, the epilogue on the box `owned`.

    inputs: the layer's; cell: a box of its iteration space; `owned` differs from it if k is split. all_reduce: for a
    stage's number, the sum over the devices that share its statistics. device: the computing device.
    """
    return tuple(
        _local_stage(stage, inputs[stage.inputs], owned if stage.epilogue else cell, all_reduce(number), device)
        for number, stage in enumerate(stages)
    )


def run_stages(
    stages: Sequence[LocalStage],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    *,
    training: bool,
    seed: Callable[[int], Seed],
    reduce: Callable[[Tensor], Tensor] | None,
    pieces: InPieces | None = None,
) -> Tensor:
    """The box of the output that a device then owns.

    seed: for a stage's number, its random seed. reduce: if k is split, turns this device's partial sums into the owned
    box of the sum. pieces: inputs of the main operator that come a piece at a time; `inputs` has None there.
    """
    given = list(inputs)
    result: Tensor | None = None
    for number, own in enumerate(stages):
        stage = own.stage
        if number == 0 and pieces is not None:
            slots = range(len(given))[stage.inputs]
            beside = [_viewed(given[i], own.views[i]) for i in slots if i not in pieces.maps]
            given = given[len(slots) :]
            result = stage.op.run_pieces(own.evaluation, beside, pieces.viewed(own))
            continue
        values = [_viewed(given.pop(0), chain) for chain in own.views]
        if stage.slot is not None:
            assert result is not None
            values.insert(stage.slot, result)
        named = {name: parameters[i] for name, i in own.parameters.items()}
        local = own.training if training else own.evaluation
        if stage.op.draws and (training or stage.op.draws_always):
            local = replace(local, seed=seed(number))
        if number == 0 and reduce is not None:
            epilogue = {p.name for p in local.space.parameters if p.epilogue}
            total = reduce(stage.op.run(local, values, {name: v for name, v in named.items() if name not in epilogue}))
            result = stage.op.finish(total, {name: v for name, v in named.items() if name in epilogue})
        else:
            result = stage.op.run(local, values, named)
    assert result is not None
    return result


def undivided(where: Space, specs: tuple[TensorSpec, ...], **how: Any) -> Local:
    """The cell that is all of an operator. how: other fields of `Local`."""
    cell = Box.full(dim.extent for dim in where.dims)
    return Local(where, specs, cell, tuple(needed_box(maps, cell) for maps in where.needs), **how)


def needed_box(maps: Maps, box: Box) -> Box:
    """The box of a tensor that `maps` need for a box of the iteration space (or of the output)."""
    lo, hi = needed(maps, np.array(box.lo, np.int64), np.array(box.hi, np.int64))
    return Box(tuple(lo.tolist()), tuple(hi.tolist()))


def _local_stage(
    stage: Stage, inputs: Sequence[TensorSpec], box: Box, all_reduce: AllReduce | None, device: torch.device | None
) -> LocalStage:
    needs = tuple(needed_box(maps, box) for maps in stage.space.needs)
    chains = tuple(_chain(*row) for row in zip(stage.views, inputs, stage.outside(needs), strict=True))
    places = range(stage.parameters.stop)[stage.parameters]
    parameters = {p.name: i for p, i in zip(stage.space.parameters, places, strict=True)}
    local = Local(stage.space, stage.specs, box, needs, all_reduce=all_reduce, device=device)
    return LocalStage(stage, local, replace(local, training=False), chains, parameters)


def _chain(views: Sequence[Op], spec: TensorSpec, wanted: Box) -> Chain:
    """Views, each with its input and output box, computed backwards from what the operator needs."""
    specs = [spec]
    for view in views:
        specs.append(view.output(specs[-1]))
    result: list[tuple[Op, Local]] = []
    for view, before in reversed(list(zip(views, specs, strict=False))):
        where = space(view, (before,))
        given = needed_box(where.needs[0], wanted)
        result.insert(0, (view, Local(where, (before,), wanted, (given,))))
        wanted = given
    return tuple(result)


def _viewed(x: Tensor, chain: Chain) -> Tensor:
    for view, local in chain:
        x = view.run(local, [x], {})
    return x
