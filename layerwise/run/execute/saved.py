"""What a layer's backward pass reads if its kernels do not simply save it: recomputed, or part of another tensor.

Recomputed: a layer's kernels save places instead of tensors. Only the block's inputs are saved, as the boxes that this
rank owns. When the backward pass reaches the end of the block, all its recomputed layers run again in the plan's order,
and what their kernels save is put into those places.

Within: a layer's output is saved as a part of what one of its readers receives (`partition.within`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from layerwise.errors import LayerwiseError
from layerwise.partition.blocks import AGAIN
from layerwise.program.instructions import AllGather, Arrive, Compute, Forget, Free, Instruction, Move, Release
from layerwise.run.execute.autograd import ordered
from layerwise.run.execute.kernels import LayerKernel, Pass
from layerwise.run.schedule.redistribute import TimedTransfer
from layerwise.run.schedule.schedule import ScheduledEdge, ScheduledLayer


class SavedPlace:
    """A place for a tensor that a kernel's backward pass reads."""

    __slots__ = ("__weakref__", "layer", "tensor")

    def __init__(self, layer: str, tensor: Tensor | None = None) -> None:
        self.layer, self.tensor = layer, tensor

    def take(self) -> Tensor:
        """Returns the tensor, once; it is there from when its block is recomputed."""
        tensor, self.tensor = self.tensor, None
        if tensor is None:
            raise LayerwiseError(
                f"layer {self.layer!r} is recomputed, but what its backward pass reads was not: compute gradients from "
                "the model's outputs"
            )
        return tensor


class Block:
    """The recomputed layers of a block, in one forward pass and its backward passes.

    layers: of the network. names: of the block's layers. instructions: how they are recomputed.
    """

    def __init__(
        self,
        run: Pass,
        layers: Mapping[str, ScheduledLayer],
        names: Sequence[str],
        instructions: Sequence[Instruction],
    ) -> None:
        self._run, self._layers, self._names, self._instructions = run, layers, names, instructions
        self._kernels: dict[str, _Kernel] = {}  # of its recomputed layers that this rank has a part of
        self._boxes: dict[str, Tensor | None] = {}  # of inputs from outside the block, until the forward pass ends

    def save_sources(self, scheduled: ScheduledLayer, values: Mapping[str, Tensor | None]) -> None:
        """Saves the inputs of one of the layers that come from outside the block."""
        for edge in scheduled.edges:
            if not (edge.source in self._names and self._layers[edge.source].recompute):
                x = values[edge.source]
                self._boxes[edge.source] = None if x is None else x.detach()

    def compute(
        self,
        scheduled: ScheduledLayer,
        compute: LayerKernel,
        inputs: list[Tensor | None],
        parameters: list[Any],
    ) -> Tensor:
        """Returns a layer's output on this rank from its inputs and parameters."""
        kernel = self._kernels[scheduled.layer.name] = _Kernel(self._run, scheduled, compute, inputs, parameters)
        return kernel.first(inputs, parameters)

    def end(self, values: dict[str, Tensor | None], types: Mapping[str, torch.dtype]) -> None:
        """Ends the block's forward pass. The backward pass recomputes the block before it differentiates any of it."""
        leaving = {name: x for name in self._names if (x := values.get(name)) is not None and x.requires_grad}
        kernels = list(self._kernels.values())
        counts = [len(kernel.parameters) for kernel in kernels]
        sources = list(self._boxes)
        saved = [*self._boxes.values(), *(p for kernel in kernels for p in kernel.parameters)]
        self._boxes = {}
        for kernel in kernels:
            kernel.parameters = []

        def make(*saved: Tensor | None) -> None:
            rest = iter(saved)
            boxes = {source: next(rest) for source in sources}
            parameters = {
                kernel.name: [next(rest) for _ in range(count)] for kernel, count in zip(kernels, counts, strict=True)
            }
            with torch.no_grad():
                self._make(boxes, parameters, types)

        run = self._run
        run.token, *marked = ordered(run.token, *leaving.values(), at_backward=make, saved=saved)
        values |= dict(zip(leaving, marked, strict=True))

    def _make(
        self,
        values: dict[str, Tensor | None],
        parameters: Mapping[str, Sequence[Tensor | None]],
        types: Mapping[str, torch.dtype],
    ) -> None:
        """Recomputes the layers by the program's instructions."""
        run, received = self._run, list[Tensor | None]()
        for instruction in self._instructions:
            if isinstance(instruction, Move):
                run.comm.at(run.number, instruction.layer + AGAIN)
                edge = self._layers[instruction.layer].edges[instruction.slot]
                received.append(self._received(edge, values[edge.source], types[edge.source]))
            elif isinstance(instruction, Compute):
                name, kernel = instruction.layer, self._kernels.get(instruction.layer)
                with run.spans.span(name + AGAIN, "compute"):
                    values[name] = None if kernel is None else kernel.recompute(received, parameters[name])
                received = []
            elif isinstance(instruction, Free):
                values.pop(instruction.value)
            elif isinstance(instruction, Arrive):
                if instruction.layer in run.gathers:
                    run.gathers[instruction.layer].finish_once_more()
            elif isinstance(instruction, Release):
                if instruction.layer in run.gathers:
                    run.gathers[instruction.layer].drop(values[instruction.layer])
            else:  # a gather begins when it is awaited; autograd's graph frees what the block saved
                assert isinstance(instruction, AllGather | Forget), instruction

    def _received(self, edge: ScheduledEdge, x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        way, like = edge.redistribution, self._run.empty(dtype)
        if edge.stays:
            return x
        if not edge.travels:
            return way.kept(x, like)
        return TimedTransfer(edge.what + AGAIN, partial(way.begin, like=like), self._run.spans)(x)


class _Kernel:
    """A layer's kernels on this rank in one forward pass, and recomputed in its backward passes.

    parameters: its parameters and buffers; those that training writes to, with their values of before. None: a tied
    parameter, which is an edge, or one that is full only while the layer computes.
    """

    def __init__(
        self,
        run: Pass,
        scheduled: ScheduledLayer,
        compute: LayerKernel,
        inputs: Sequence[Tensor | None],
        parameters: Sequence[Any],
    ) -> None:
        self.name, self._compute, self._inputs = scheduled.layer.name, compute, len(scheduled.layer.specs)
        self._wanted = [x is not None and x.requires_grad for x in (*inputs, *parameters)]
        self._places: list[ref[SavedPlace]] = []
        self._moving = {name for name, *_ in scheduled.layer.remembered} if run.training else set()
        gathered = run.gathers[self.name].names if self.name in run.gathers else ()
        self._names, self._run = scheduled.parameters, run
        self.parameters: list[Tensor | None] = [
            None if name is None or name in gathered else p.detach().clone() if name in self._moving else p.detach()
            for name, p in zip(self._names, parameters, strict=True)
        ]

    def first(self, inputs: Sequence[Tensor | None], parameters: Sequence[Tensor | None]) -> Tensor:
        """Returns the layer's output in the forward pass."""
        lasting = self._lasting(parameters)

        def pack(x: Tensor) -> Tensor | SavedPlace:
            if _storage(x) in lasting:
                return x.detach()
            place = SavedPlace(self.name)
            self._places.append(ref(place))
            return place

        def unpack(packed: Tensor | SavedPlace) -> Tensor:
            return packed.take() if isinstance(packed, SavedPlace) else packed

        with saved_tensors_hooks(pack, unpack):
            return self._compute(inputs, parameters)

    def recompute(self, received: Sequence[Tensor | None], saved: Sequence[Tensor | None]) -> Tensor:
        """Returns the output recomputed, in a backward pass. received: its inputs and tied parameters."""
        tied = iter(received[self._inputs :])
        pairs = zip(self._names, saved, strict=True)
        parameters = [next(tied) if name is None else self._parameter(name, p) for name, p in pairs]
        fresh = [
            x.detach().requires_grad_() if x is not None and wanted else x
            for x, wanted in zip((*received[: self._inputs], *parameters), self._wanted, strict=True)
        ]
        inputs, parameters = fresh[: self._inputs], fresh[self._inputs :]
        lasting, places = self._lasting(parameters), iter(self._places)

        def pack(x: Tensor) -> None:
            if _storage(x) not in lasting:
                self._fill(places, x)

        with torch.enable_grad(), saved_tensors_hooks(pack, _never):
            out = self._compute(inputs, parameters).detach()
        if next(places, None) is not None:
            raise self._otherwise()
        return out

    def _parameter(self, name: str, saved: Tensor | None) -> Any:
        """Returns a parameter for recomputation: full if it is gathered; a copy if training writes to it."""
        if saved is None:
            return self._run.parameters[name]
        return saved.clone() if name in self._moving else saved

    def _fill(self, places: Iterator[ref[SavedPlace]], x: Tensor) -> None:
        reference = next(places, None)
        if reference is None:
            raise self._otherwise()
        place = reference()
        if place is not None:  # otherwise nobody will read it
            place.tensor = x.detach()

    def _otherwise(self) -> LayerwiseError:
        return LayerwiseError(
            f"layer {self.name!r} is recomputed but computes something else the second time: turn recomputation off"
        )

    def _lasting(self, parameters: Sequence[Tensor | None]) -> set[int]:
        """Returns the storages that live anyway: those of parameters and buffers."""
        return {
            _storage(p) for p, name in zip(parameters, self._names, strict=True) if name is not None and p is not None
        }


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _never(_: object) -> Tensor:
    raise AssertionError("what is recomputed is not differentiated")


class SavedOutput:
    """The tensors that the kernels of one layer have saved of its output, in one forward pass."""

    def __init__(self) -> None:
        self._places: list[ref[SavedPlace]] = []

    def compute(
        self, compute: LayerKernel, inputs: Sequence[Tensor | None], parameters: Sequence[Tensor | None]
    ) -> Tensor:
        """Returns the layer's output, and notes what its kernels save of it."""
        places = list[ref[SavedPlace]]()  # saved tensors live as long as autograd holds them, and so does `pack`

        def pack(x: Tensor) -> SavedPlace:
            place = SavedPlace("", x.detach())
            places.append(ref(place))
            return place

        with saved_tensors_hooks(pack, attrgetter("tensor")):
            out = compute(inputs, parameters)
        self._places = [where for where in places if (place := where()) is not None and _same(place.tensor, out)]
        return out

    def move(self, edge: ScheduledEdge, received: Tensor | None) -> None:
        """Saves it as a part of what a reader received, so that the output's memory can be freed."""
        way, places, self._places = edge.redistribution, self._places, []
        own = way.transfer.own
        assert own is not None
        assert received is not None
        for place in filter(None, (reference() for reference in places)):
            place.tensor = received.detach()[own.slices(way.room)]


def _same(x: Tensor | None, y: Tensor) -> bool:
    assert x is not None
    return x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride() and x.dtype == y.dtype
