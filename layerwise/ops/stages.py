"""Stages: a cell of a layer as the operators that a device runs in turn. The runtime's and the profiler's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from layerwise.geometry import Box, needed
from layerwise.ops.base import Op, Stage, space
from layerwise.ops.facts import Local, Maps
from layerwise.ops.random import Seed
from layerwise.tensor import TensorSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

AllReduce = Callable[["Tensor"], "Tensor"]

Chain = tuple[tuple[Op, Local], ...]  # views of one input, first applied first


@dataclass(frozen=True, slots=True)
class LocalStage:
    """A stage on the device that computes a cell of it."""

    stage: Stage
    training: Local
    evaluation: Local
    views: tuple[Chain, ...]  # of each input that comes from outside
    parameters: Mapping[str, int]  # by the operator's names, their places among the layer's

    def padded(self) -> LocalStage:
        """Whose first input comes with the operator's margins."""
        training, evaluation = (replace(local, padded=True) for local in (self.training, self.evaluation))
        return replace(self, training=training, evaluation=evaluation)


def local_stages(
    stages: Sequence[Stage],
    inputs: Sequence[TensorSpec],
    cell: Box,
    owned: Box,
    all_reduce: Callable[[int], AllReduce | None] = lambda _: None,
    device: torch.device | None = None,
) -> tuple[LocalStage, ...]:
    """The stages of one cell of a layer: the main operator on `cell`, the epilogue on the box that is `owned`.

    inputs: the layer's; cell: a box of its iteration space; `owned` differs from it where k is split. all_reduce: by
    the stage's number, the sum over the devices that share its statistics. device: that computes it.
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
    convolve: Callable[..., Tensor] | None = None,
) -> Tensor:
    """The box of the output that a device owns afterwards.

    seed: of a stage's random numbers, by its number. reduce: where k is split, what makes the owned box of the sum
    from this device's partial sums. convolve: what the main operator calls instead of PyTorch's convolution.
    """
    given = list(inputs)
    result: Tensor | None = None
    for number, own in enumerate(stages):
        stage = own.stage
        values = [_viewed(given.pop(0), chain) for chain in own.views]
        if stage.slot is not None:
            assert result is not None
            values.insert(stage.slot, result)
        named = {name: parameters[i] for name, i in own.parameters.items()}
        local = own.training if training else own.evaluation
        if stage.op.draws and (training or stage.op.draws_always):
            local = replace(local, seed=seed(number))
        if convolve is not None and number == 0:
            local = replace(local, convolve=convolve)
        if number == 0 and reduce is not None:
            epilogue = {p.name for p in local.space.parameters if p.epilogue}
            total = reduce(stage.op.run(local, values, {name: v for name, v in named.items() if name not in epilogue}))
            result = stage.op.finish(total, {name: v for name, v in named.items() if name in epilogue})
        else:
            result = stage.op.run(local, values, named)
    assert result is not None
    return result


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
