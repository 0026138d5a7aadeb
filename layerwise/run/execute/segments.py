"""Segments: the longest runs of a rank's layers without communication, each compiled as one function.

The executor calls the whole segment when it reaches its first layer. Redistributions, statistics and sums over ranks
run between segments, in the order that all ranks share. So do layers whose parameters or saved tensors come and go:
gathered and recomputed layers; a segment also ends with a block that has recomputed layers. Each function has its own
code object, as PyTorch limits how often one is recompiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from layerwise.errors import LayerwiseError
from layerwise.ops.base import Role
from layerwise.ops.fused import run_stages
from layerwise.ops.random import combine, signed
from layerwise.run.compiling import Settings, compile_with
from layerwise.run.schedule.schedule import Schedule, ScheduledEdge, ScheduledLayer

Values = Sequence[Tensor]
# (inputs, parameters, seeds) -> outputs.
Function = Callable[[Values, Values, Tensor | None], list[Tensor]]


class SegmentInput(NamedTuple):
    """An input of a segment: a layer's output as this rank has it, or what it has received of it."""

    source: str
    slot: int | None = None  # the first layer's edge by which it arrives


class Segment:
    """Layers of a rank's schedule, computed one after the other, compiled as one function, in training or evaluation.

    inputs: what it reads of other layers. outputs: its layers whose outputs are used after it. parameters: the model's
    names of those that it uses. backward: whether a gradient flows through some of it.
    """

    def __init__(
        self, schedule: Schedule, layers: Sequence[ScheduledLayer], settings: Settings, *, training: bool
    ) -> None:
        names = [scheduled.layer.name for scheduled in layers]
        self.name = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"  # in traces and error messages
        used = (_input(edge, slot) for scheduled in layers for slot, edge in enumerate(scheduled.edges))
        others = (scheduled for scheduled in schedule.layers if scheduled.layer.name not in names)
        wanted = {edge.source for scheduled in others for edge in scheduled.edges}
        self.layers, self._training = layers, training
        self.inputs = tuple(dict.fromkeys(x for x in used if x.source not in names))
        self.outputs = tuple(name for name in names if name in wanted)
        parameters = (name for scheduled in layers for name in scheduled.parameters if name is not None)
        self.parameters = tuple(dict.fromkeys(parameters))
        self.backward = any(scheduled.backward for scheduled in layers)
        self._draws = list(self._drawing())
        self._function, self._warm = self._as_function(), False
        self._compiled = compile_with(self._function, settings)

    def _drawing(self) -> Iterator[tuple[int, int]]:
        """Yields the layers and stages that draw random numbers, by their numbers in the graph."""
        for scheduled in self.layers:
            assert scheduled.work is not None
            for number, own in enumerate(scheduled.work.stages):
                if self._training and own.stage.op.draws:
                    yield scheduled.work.number, number

    def seeds(self, of_step: int, device: torch.device) -> Tensor | None:
        """Returns an int64 for each draw of a step, as a tensor: a number would be compiled in as a constant.

        Each pass gets a new tensor: the backward pass of an earlier one reads its own.
        """
        draws = [signed(combine(of_step, *draw)) for draw in self._draws]
        return torch.tensor(draws, device=device) if draws else None

    def __call__(self, inputs: Values, parameters: Values, seeds: Tensor | None) -> Sequence[Tensor]:
        """Returns the outputs. Raises LayerwiseError, which names the layers, if they cannot be compiled."""
        from torch._dynamo.exc import TorchDynamoException

        try:
            if not self._warm:  # so that values computed once (`Local.once`) are constants to the compiler
                with torch.no_grad():
                    self._function(*pytree.tree_map_only(Tensor, torch.zeros_like, (inputs, parameters, seeds)))
                self._warm = True
            outputs: Sequence[Tensor] = self._compiled(inputs, parameters, seeds)
            return outputs
        except TorchDynamoException as error:
            reason = str(error).strip().partition("\n")[0]
            raise LayerwiseError(f"layer {self.name!r} cannot be compiled: leave compile= out ({reason})") from error
        except ValueError as error:  # a LayerwiseError, or raised by PyTorch, such as batch norm of one value a channel
            raise LayerwiseError(f"layer {self.name!r}: {error}") from error

    def _as_function(self) -> Function:
        own = (SegmentInput(scheduled.layer.name) for scheduled in self.layers)
        places = {x: i for i, x in enumerate((*self.inputs, *own))}
        outputs = tuple(places[SegmentInput(name)] for name in self.outputs)
        names = {name: i for i, name in enumerate(self.parameters)}
        draws = {draw: i for i, draw in enumerate(self._draws)}
        steps = [(one.backward, self._step(one, places, names, draws)) for one in self.layers]

        def run(inputs: Values, parameters: Values, seeds: Tensor | None) -> list[Tensor]:
            values = list(inputs)
            for backward, step in steps:
                with torch.set_grad_enabled(backward and torch.is_grad_enabled()):
                    values.append(step(values, parameters, seeds))
            return [values[i] for i in outputs]

        code = run.__code__.replace(co_name=f"segment of {self.name}")
        return FunctionType(code, run.__globals__, code.co_name, run.__defaults__, run.__closure__)

    def _step(
        self,
        scheduled: ScheduledLayer,
        places: Mapping[SegmentInput, int],
        names: Mapping[str, int],
        draws: Mapping[tuple[int, int], int],
    ) -> Callable[[Values, Values, Tensor | None], Tensor]:
        """Returns one layer as a function of values, parameters and seeds. The mappings give their places there."""
        work, dtype, count, training = scheduled.work, scheduled.dtype, len(scheduled.layer.specs), self._training
        assert work is not None
        number, stages = work.number, work.stages
        edges = [(places[_input(edge, i)], _slices(edge)) for i, edge in enumerate(scheduled.edges)]
        tied = iter(edges[count:])
        own = [next(tied) if name is None else names[name] for name in scheduled.parameters]

        def received(values: Values, edge: tuple[int, tuple[slice, ...] | None]) -> Tensor:
            place, slices = edge
            return values[place] if slices is None else values[place][slices]

        def step(values: Values, parameters: Values, seeds: Tensor | None) -> Tensor:
            def seed(stage: int) -> Tensor:
                assert seeds is not None
                return seeds[draws[number, stage]]

            inputs = [received(values, edge) for edge in edges[:count]]
            weights = [parameters[p] if isinstance(p, int) else received(values, p) for p in own]
            out = run_stages(stages, inputs, weights, training=training, seed=seed, reduce=None)
            return out if dtype is None or out.dtype == dtype else out.to(dtype)

        return step


def _input(edge: ScheduledEdge, slot: int) -> SegmentInput:
    return SegmentInput(edge.source, slot if edge.travels else None)


def _slices(edge: ScheduledEdge) -> tuple[slice, ...] | None:
    """Returns the part of a tensor that is used; if the edge travels, all that arrived is used."""
    t = edge.redistribution.transfer
    if edge.travels or t.kept == t.own:
        return None
    assert t.kept is not None
    return t.kept.slices(t.own)


def segments(schedule: Schedule, settings: Settings, *, training: bool) -> list[Segment]:
    """Returns a rank's segments: one begins where something is received, and ends where it is sent, or a block ends."""
    runs: list[list[ScheduledLayer]] = [[]]
    travelling = {edge.source for scheduled in schedule.layers for edge in scheduled.edges if edge.travels}
    for before, scheduled in zip((None, *schedule.layers), schedule.layers, strict=False):
        if before is not None and before.layer.name in schedule.blocks:
            runs.append([])
        if scheduled.layer.role is not Role.COMPUTE or not (training or scheduled.returned):
            continue
        other = bool(runs[-1]) and runs[-1][-1].autocast != scheduled.autocast
        if other or any(edge.travels for edge in scheduled.edges):
            runs.append([])
        if _by_itself(scheduled):
            runs[-1].append(scheduled)
        elif scheduled.work is not None:
            runs.append([])
        if scheduled.layer.name in travelling:
            runs.append([])
    return [Segment(schedule, layers, settings, training=training) for layers in runs if layers]


def _by_itself(scheduled: ScheduledLayer) -> bool:
    """True if this rank computes a layer from what it has when the layer begins."""
    alone = not (scheduled.recompute or scheduled.gathered or scheduled.pieces)
    if scheduled.work is None or scheduled.work.communicates or not alone:
        return False
    return all(edge.travels or edge.redistribution.transfer.kept is not None for edge in scheduled.edges)
