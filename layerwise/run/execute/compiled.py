"""CompiledSegments: a schedule's segments through torch.compile, each when it is first come to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from layerwise.errors import LayerwiseError
from layerwise.run.compiling import Settings
from layerwise.run.compiling import compiled as compile_with
from layerwise.run.execute.segments import Segment, Values, segments
from layerwise.run.schedule.layers import Schedule

Given = tuple[Values, Values, Tensor | None]  # inputs, parameters, seeds


class CompiledSegments:
    """Of one schedule, in training and in evaluation."""

    def __init__(self, schedule: Schedule, settings: Settings) -> None:
        self._settings = {"dynamic": False, **settings, "fullgraph": True}  # a schedule has one size
        self._of: dict[bool, dict[str, CompiledSegment]] = {}
        self._schedule = schedule

    def by_layer(self, *, training: bool) -> Mapping[str, CompiledSegment]:
        """The segment that each layer is in; those that are in none communicate."""
        if training not in self._of:
            made = (CompiledSegment(s, self._settings) for s in segments(self._schedule, training=training))
            self._of[training] = {scheduled.layer.name: one for one in made for scheduled in one.segment.layers}
        return self._of[training]


class CompiledSegment:
    """One segment, compiled."""

    def __init__(self, segment: Segment, settings: Settings) -> None:
        self.segment, self._settings = segment, settings
        self._function, self._warm = segment.function(), False
        self._compiled = compile_with(self._function, settings)
        self.name, self.first, self.backward = segment.name, segment.layers[0], segment.backward
        self.inputs, self.outputs, self.parameters = segment.inputs, segment.outputs, segment.parameters
        self.seeds = segment.seeds

    def __call__(self, inputs: Values, parameters: Values, seeds: Tensor | None) -> Sequence[Tensor]:
        """The outputs. LayerwiseError, which names the layer, where it cannot be compiled."""
        from torch._dynamo.exc import TorchDynamoException

        given = inputs, parameters, seeds
        if not self._warm:
            self._prepare(given)
        try:
            made: Sequence[Tensor] = self._compiled(*given)
        except TorchDynamoException as error:
            name = self._first_to_fail(given, TorchDynamoException, compiled=True)
            reason = str(error).strip().partition("\n")[0]
            raise LayerwiseError(f"layer {name!r} cannot be compiled, leave compile= out: {reason}") from error
        return made

    def _prepare(self, given: Given) -> None:
        """Runs it once, of zeros: what kernels compute once (`Local.once`) is a constant to the compiler then."""
        zeros = pytree.tree_map_only(Tensor, torch.zeros_like, given)
        try:
            with torch.no_grad():
                self._function(*zeros)
        except (
            LayerwiseError,
            ValueError,
        ) as error:  # ValueError: PyTorch's, such as batch norm of one value a channel
            name = self._first_to_fail(zeros, type(error), compiled=False)
            raise LayerwiseError(f"layer {name!r}: {error}") from error
        self._warm = True

    def _first_to_fail(self, given: Given, kind: type[Exception], *, compiled: bool) -> str:
        """The name of the layer with which the segment begins to raise such an error."""
        layers = self.segment.layers

        def fails(number: int) -> bool:
            part = replace(self.segment, layers=layers[:number], outputs=(layers[number - 1].layer.name,)).function()
            try:
                (compile_with(part, self._settings) if compiled else part)(*given)
            except kind:
                return True
            return False

        return layers[bisect_left(range(1, len(layers)), True, key=fails)].layer.name
