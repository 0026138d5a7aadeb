"""Pass: a forward pass, which runs each kernel in its autocast, its trace span and its turn in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from torch import Tensor

from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from layerwise.ops.fused import InPieces
from layerwise.run.execute.autograd import ordered
from layerwise.run.execute.gathers import GatheredParameters, LayerGathers
from layerwise.run.options import RuntimeOptions
from layerwise.run.schedule.schedule import ScheduledLayer
from layerwise.trace import NOTHING, Spans


@dataclass(slots=True)
class Pass:
    """A forward pass. Autograd functions in its graph refer to it, so it must not refer to the graph afterwards."""

    parameters: GatheredParameters  # this rank's boxes by name, buffers included
    training: bool
    seed: int  # of this step's random numbers
    number: int  # the step's number, for error messages
    token: Tensor  # the order token; it requires a gradient if a backward pass may follow
    comm: Comm
    options: RuntimeOptions
    spans: Spans
    # Layers whose parameters are full only while they compute, by name, in their order.
    gathers: Mapping[str, LayerGathers]
    _empty: dict[torch.dtype, Tensor] = field(default_factory=dict)

    @property
    def differentiate(self) -> bool:
        """True if a backward pass may follow."""
        return self.token.requires_grad

    def order(
        self,
        tensors: list[Tensor | None],
        places: Iterable[int],
        at_backward: Callable[..., Sequence[Tensor] | None] | None = None,
    ) -> None:
        """Makes the token wait for these `tensors`' gradients in the backward pass; replaces them in the list."""
        chosen = {i: x for i in places if (x := tensors[i]) is not None and x.requires_grad}
        self.token, *marked = ordered(self.token, *chosen.values(), at_backward=at_backward)
        for i, x in zip(chosen, marked, strict=True):
            tensors[i] = x

    def empty(self, dtype: torch.dtype) -> Tensor:
        """Returns an empty tensor of that type on this rank's device."""
        if dtype not in self._empty:
            self._empty[dtype] = torch.empty(0, dtype=dtype, device=self.options.device)
        return self._empty[dtype]

    def layer(
        self,
        scheduled: ScheduledLayer,
        inputs: Sequence[Tensor | None],
        parameters: Sequence[Tensor | None],
        pieces: InPieces | None = None,
    ) -> Tensor:
        """Returns this rank's box of a layer's output."""
        assert scheduled.work is not None
        try:
            with self.autocast(scheduled):
                out = scheduled.work.run(
                    all_there(inputs),
                    all_there(parameters),
                    training=self.training,
                    seed=self.seed,
                    pieces=pieces,
                )
                return out if scheduled.dtype is None or out.dtype == scheduled.dtype else out.to(scheduled.dtype)
        except LayerwiseError as error:
            raise type(error)(f"layer {scheduled.layer.name!r}: {error}") from None
        except ValueError as error:  # raised by PyTorch, such as batch norm of one value a channel
            raise LayerwiseError(f"layer {scheduled.layer.name!r}: {error}") from error

    def in_turn(
        self,
        name: str,
        tensors: list[Tensor | None],
        compute: Callable[[list[Tensor | None]], list[Tensor | None]],
        *,
        backward: bool,
        communicates: bool = False,
    ) -> list[Tensor | None]:
        """Returns `compute` of `tensors`. backward: whether a backward pass may reach it.

        In the backward pass, communication takes its turn; in a trace everything does, so that a span ends when all its
        gradients are computed.
        """
        span = self.spans.span(name, "compute")
        if not (self.differentiate and backward):
            with torch.no_grad(), span:
                return compute(tensors)
        traced, begun = self.spans.trace is not None, list[int]()
        if not (traced or communicates):
            with span:
                return compute(tensors)
        wanted = [i for i, x in enumerate(tensors) if x is not None and x.requires_grad]
        if traced:
            self.order(tensors, wanted, partial(self._end_span, begun))
        else:  # its backward pass ends with whichever gradient it computes last
            self.order(tensors, wanted[:1])
        with span:
            outputs = compute(tensors)
        begin = partial(self._begin_span, f"{name} (backward)", begun)
        self.order(outputs, range(len(outputs)), begin if traced else None)
        return outputs

    def autocast(self, scheduled: ScheduledLayer) -> AbstractContextManager[object]:
        """Returns the context of a layer's kernels: the run's torch.autocast, or one of the model's own."""
        kind, wanted = self.options.device.type, scheduled.autocast
        there = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        if wanted == there:
            return NOTHING
        # The cache belongs to the surrounding autocast, and does not know to which type it has cast.
        return torch.autocast(kind, wanted, enabled=wanted is not None, cache_enabled=False)

    def _begin_span(self, name: str, begun: list[int]) -> None:
        self.comm.at(self.number, name)
        if self.spans.trace is not None:
            begun.append(self.spans.trace.begin(name, "compute"))

    def _end_span(self, begun: list[int]) -> None:
        if self.spans.trace is not None and begun:
            self.spans.trace.end(begun.pop())


LayerKernel = Callable[[Sequence[Tensor | None], Sequence[Tensor | None]], Tensor]  # of inputs and parameters


def all_there(tensors: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """Returns the tensors, asserting that none is missing: the rank computes the layer."""
    return cast("Sequence[Tensor]", tensors)
