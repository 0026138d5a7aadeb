"""Stages: a cell of a layer as the operators that a device runs in turn. The runtime's and the profiler's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from layerwise.geometry import Box, needed
from layerwise.ops.base import Maps, Op, Space, space
from layerwise.ops.fused import Fused, viewed_spec
from layerwise.ops.local import Local
from layerwise.tensor import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    AllReduce = Callable[[Tensor], Tensor]

Chain = tuple[tuple[Op, Local], ...]  # views of one input, first applied first


@dataclass(frozen=True, slots=True)
class Stage:
    """One operator of a layer: the main one, or a follower whose input `slot` is the running result.

    views: of each input that comes from outside. parameters: the operator's name of each, and its place among the
    layer's.
    """

    op: Op
    local: Local
    views: tuple[Chain, ...]
    slot: int | None
    parameters: Mapping[str, int]


def stages_of(op: Op, specs: tuple[TensorSpec, ...], where: Space, cell: Box, owned: Box) -> tuple[Stage, ...]:
    """The stages of one cell of a layer: the main operator on `cell`, its followers on the box that is `owned`.

    where: the layer's space, of whose iteration space `cell` is a box; `owned` differs where k is split.
    """
    fused = op if isinstance(op, Fused) else Fused(op, ((),) * len(specs))
    at = {p.name: i for i, p in enumerate(where.parameters)}
    taken = len(specs) - sum(f.extras for f in fused.followers)
    found = [_stage(fused.main, specs[:taken], fused.views[:taken], None, cell, at, "")]
    for i, follower in enumerate(fused.followers):
        rows = slice(taken, taken + follower.extras)
        taken += follower.extras
        inner = (follower.slot, found[-1].local.space.out)
        found.append(_stage(follower.op, specs[rows], fused.views[rows], inner, owned, at, f"{i}."))
    return tuple(found)


def run_stages(
    stages: Sequence[Stage],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    *,
    training: bool,
    seed: Callable[[int], int],
    all_reduce: Callable[[int], AllReduce | None],
    reduce: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """The box of the output that a device owns afterwards.

    seed, all_reduce: by the stage's number, its random numbers' seed, and the sum over the devices that share its
    statistics. reduce: where k is split, what makes the owned box of the sum from this device's partial sums.
    """
    given = list(inputs)
    result: Tensor | None = None
    for number, stage in enumerate(stages):
        values = [_viewed(given.pop(0), chain) for chain in stage.views]
        if stage.slot is not None:
            assert result is not None
            values.insert(stage.slot, result)
        named = {name: parameters[i] for name, i in stage.parameters.items()}
        local = replace(stage.local, training=training, seed=seed(number), all_reduce=all_reduce(number))
        if number == 0 and reduce is not None:
            late = {p.name for p in local.space.parameters if p.late}
            total = reduce(stage.op.run(local, values, {name: v for name, v in named.items() if name not in late}))
            result = stage.op.finish(total, {name: v for name, v in named.items() if name in late})
        else:
            result = stage.op.run(local, values, named)
    assert result is not None
    return result


def needed_box(maps: Maps, box: Box) -> Box:
    """The box of a tensor that `maps` need for a box of the iteration space (or of the output)."""
    lo, hi = needed(maps, np.array(box.lo, np.int64), np.array(box.hi, np.int64))
    return Box(tuple(lo.tolist()), tuple(hi.tolist()))


def _stage(
    op: Op,
    outside: Sequence[TensorSpec],
    views: Sequence[Sequence[Op]],
    inner: tuple[int, TensorSpec] | None,
    box: Box,
    at: Mapping[str, int],
    prefix: str,
) -> Stage:
    specs = [viewed_spec(spec, chain) for spec, chain in zip(outside, views, strict=True)]
    slot = None
    if inner is not None:
        slot = inner[0]
        specs.insert(slot, inner[1])
    where = space(op, tuple(specs))
    needs = [needed_box(maps, box) for maps in where.needs]
    outer = [need for i, need in enumerate(needs) if i != slot]
    chains = tuple(_chain(c, spec, need) for c, spec, need in zip(views, outside, outer, strict=True))
    own = {p.name: at[prefix + p.name] for p in where.parameters}
    return Stage(op, Local(where, tuple(specs), box, tuple(needs)), chains, slot, own)


def _chain(views: Sequence[Op], spec: TensorSpec, wanted: Box) -> Chain:
    """Views with the boxes that they are given and shall give, from what the operator needs backwards."""
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
