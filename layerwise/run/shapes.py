"""Shapes: the network in either mode, and for inputs of other sizes than the example's, such as larger images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from layerwise.comm.base import Comm
from layerwise.config import Config, is_legal
from layerwise.errors import LayerwiseError
from layerwise.graph.layer import Layer, LayerGraph
from layerwise.importers.load import Network, network_of
from layerwise.importers.torch.read.structure import Structure
from layerwise.ops.base import Role
from layerwise.partition.place import data_parallel
from layerwise.plan import Plan
from layerwise.run.guards.code import reads
from layerwise.run.guards.hooks import check_seen
from layerwise.run.inputs import Inputs, tensors_of
from layerwise.run.lean import skeleton
from layerwise.run.options import RuntimeOptions

Sizes = tuple[tuple[int, ...], ...]  # of every input, but for the samples


@dataclass(frozen=True, slots=True)
class Shaped:
    """The network at some sizes, in one mode."""

    graph: LayerGraph
    inputs: Inputs
    structure: Structure | None  # of what it returns
    plan: Plan
    sizes: Sizes


class Shapes:
    """Traces the model again for sizes and modes that it has not seen yet. The plan's degrees stay."""

    def __init__(self, network: Network, plan: Plan, comm: Comm, options: RuntimeOptions) -> None:
        self.plan, self.comm, self.options = plan, comm, options
        self._layers = [layer for layer in network.graph.layers if layer.role is Role.INPUT]
        self.sizes: Sizes = tuple(_size(layer, layer.out.shape) for layer in self._layers)
        first = Shaped(network.graph, Inputs(network, plan, comm, options), network.structure, plan, self.sizes)
        module = network.module
        self._traced = module is None or module.training  # the mode of the plan's network
        self._modes = module is not None and _reads_its_mode(module)
        self._known = {(self.sizes, self._traced): first}
        self._skeleton = None if module is None else skeleton(module)

    @property
    def inputs(self) -> Inputs:
        """Those of the plan's sizes."""
        return self.first.inputs

    @property
    def first(self) -> Shaped:
        """The network that the plan is for."""
        return self._known[self.sizes, self._traced]

    def tensors_of(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The tensors of a call."""
        return tensors_of(inputs, self.first.structure, [layer.name for layer in self._layers])

    def sizes_of(self, given: Sequence[Tensor]) -> Sizes:
        """Those of a call's inputs, which must be as many as the model takes."""
        return tuple(_size(layer, tuple(x.shape)) for layer, x in zip(self._layers, given, strict=True))

    def at(self, sizes: Sizes, *, training: bool) -> Shaped:
        """The network at these sizes. LayerwiseError where it is another one there, or cannot be traced."""
        key = sizes, training if self._modes else self._traced
        if key not in self._known:
            self._known[key] = self._shaped(*key)
        return self._known[key]

    def fitted(self, batch: int, shaped: Shaped) -> LayerGraph:
        """The network at this batch. LayerwiseError where it cannot be cut as planned."""
        graph = shaped.graph
        try:
            graph = graph.rebatch(batch)
            for layer in graph.inner:
                config = shaped.plan.strategy[layer.name]
                if not is_legal(config, layer.space.dims):
                    raise LayerwiseError(f"layer {layer.name!r} cannot be cut {config}")
        except LayerwiseError as error:
            what = f"a batch of {batch} samples" + (
                f" of shape {shaped.sizes[0]}" if shaped.sizes != self.sizes else ""
            )
            raise LayerwiseError(f"{what} does not suit the plan: {error}") from None
        return graph

    def _shaped(self, sizes: Sizes, training: bool) -> Shaped:
        known, same_mode = self.first.graph, training == self._traced
        if self._skeleton is None or any(len(a) != len(b) for a, b in zip(sizes, self.sizes, strict=True)):
            raise LayerwiseError(self._unlike(sizes, training, "the model is not there to be traced again"))
        tensors = {layer.name: _example(layer, size) for layer, size in zip(self._layers, sizes, strict=True)}
        structure = self.first.structure
        examples = tuple(tensors.values()) if structure is None else structure.inputs(tensors)
        try:
            self._skeleton.train(training)
            network = network_of(self._skeleton, examples, self.plan.batch, self.plan.model, trusted=True)
            check_seen(network.graph)
            graph = self.plan.layers(network.graph)
            inputs = Inputs(network, self.plan, self.comm, self.options)
        except LayerwiseError as error:
            raise LayerwiseError(self._unlike(sizes, training, str(error))) from None
        if same_mode and [_held(layer) for layer in graph.layers] != [_held(layer) for layer in known.layers]:
            raise LayerwiseError(self._unlike(sizes, training, "the network has other layers there"))
        plan = self.plan if same_mode else self._extended(graph, known, sizes, training)
        return Shaped(graph, inputs, network.structure, plan, sizes)

    def _extended(self, graph: LayerGraph, known: LayerGraph, sizes: Sizes, training: bool) -> Plan:
        """The plan for the other mode: layers that it does not have split samples."""
        held = {name: p.shape for layer in known.layers for name, p in layer.own_parameters()}
        where = {name: layer.name for layer in known.layers for name, _ in layer.own_parameters()}
        strategy = dict(self.plan.strategy)
        for layer in graph.inner:
            for name, p in layer.own_parameters():
                if held.get(name) != p.shape or where[name] != layer.name:
                    raise LayerwiseError(
                        self._unlike(sizes, training, f"layer {layer.name!r} uses {name!r} in this mode only")
                    )
            config = data_parallel(layer, self.plan.gpus)
            strategy.setdefault(layer.name, config if is_legal(config, layer.space.dims) else Config())
        return replace(self.plan, strategy=strategy)

    def _unlike(self, sizes: Sizes, training: bool, why: str) -> str:
        if sizes == self.sizes:
            now, then = ("training", "evaluation") if training else ("evaluation", "training")
            return f"the model was made parallel in {then} mode, and its code does something else in {now}: {why}"
        name, size, planned = next(
            (layer.name, a, b) for layer, a, b in zip(self._layers, sizes, self.sizes, strict=True) if a != b
        )
        return f"input {name!r} has samples of shape {size}, and the plan is for {planned}: {why}"


def _reads_its_mode(module: nn.Module) -> bool:
    """Whether code beside PyTorch's own asks for `training`: what it computes may then be another network."""
    return any(reads(kind, "training", torchs=False) for kind in {type(m) for m in module.modules()})


def _size(layer: Layer, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[1:] if layer.out.index("n") == 0 else shape


def _example(layer: Layer, size: tuple[int, ...]) -> Tensor:
    """Of two samples, as for built-in networks: tracing is independent of the batch."""
    shape = (2, *size) if layer.out.index("n") == 0 else size
    return torch.zeros(shape, dtype=getattr(torch, layer.out.dtype))


def _held(layer: Layer) -> tuple[object, ...]:
    """What a plan and this rank's parameters rest on."""
    return layer.name, layer.kinds, [(name, p.shape) for name, p in layer.own_parameters()]
