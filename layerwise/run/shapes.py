"""Shapes: the network for inputs of other sizes than the example's, such as larger images, or longer sequences."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.graph.layer import Layer, LayerGraph
from layerwise.importers.load import Network, network_of
from layerwise.ops.base import Role
from layerwise.plan import Plan
from layerwise.run.inputs import Inputs
from layerwise.run.options import RuntimeOptions

Sizes = tuple[tuple[int, ...], ...]  # of every input, but for the samples


@dataclass(frozen=True, slots=True)
class Shaped:
    """The network at some sizes."""

    graph: LayerGraph
    inputs: Inputs


class Shapes:
    """Traces the model again for sizes that it has not seen yet. The plan's degrees stay."""

    def __init__(self, network: Network, plan: Plan, comm: Comm, options: RuntimeOptions) -> None:
        self.plan, self.comm, self.options = plan, comm, options
        self._layers = [layer for layer in network.graph.layers if layer.role is Role.INPUT]
        self.sizes: Sizes = tuple(_size(layer, layer.out.shape) for layer in self._layers)
        self._known = {self.sizes: Shaped(network.graph, Inputs(network, plan, comm, options))}
        self._skeleton = None if network.module is None else _skeleton(network.module)

    @property
    def inputs(self) -> Inputs:
        """Those of the plan's sizes."""
        return self._known[self.sizes].inputs

    def sizes_of(self, given: Sequence[Tensor]) -> Sizes:
        """Those of a call's inputs, which must be as many as the model takes."""
        return tuple(_size(layer, tuple(x.shape)) for layer, x in zip(self._layers, given, strict=True))

    def at(self, sizes: Sizes) -> Shaped:
        """The network at these sizes. LayerwiseError where it is another one there, or cannot be traced."""
        if sizes not in self._known:
            self._known[sizes] = self._shaped(sizes)
        return self._known[sizes]

    def _shaped(self, sizes: Sizes) -> Shaped:
        known = self._known[self.sizes].graph
        if self._skeleton is None or any(len(a) != len(b) for a, b in zip(sizes, self.sizes, strict=True)):
            raise LayerwiseError(self._unlike(sizes, "the model is not there to be traced again"))
        examples = [_example(layer, size) for layer, size in zip(self._layers, sizes, strict=True)]
        try:
            network = network_of(self._skeleton, examples, self.plan.batch, self.plan.model, trusted=True)
            graph = fuse(network.graph) if self.plan.fused else network.graph
            inputs = Inputs(network, self.plan, self.comm, self.options)
        except LayerwiseError as error:
            raise LayerwiseError(self._unlike(sizes, str(error))) from None
        if [_held(layer) for layer in graph.layers] != [_held(layer) for layer in known.layers]:
            raise LayerwiseError(self._unlike(sizes, "the network has other layers there"))
        return Shaped(graph, inputs)

    def _unlike(self, sizes: Sizes, why: str) -> str:
        name, size, planned = next(
            (layer.name, a, b) for layer, a, b in zip(self._layers, sizes, self.sizes, strict=True) if a != b
        )
        return f"input {name!r} has samples of shape {size}, and the plan is for {planned}: {why}"


def _size(layer: Layer, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[1:] if layer.out.index("n") == 0 else shape


def _example(layer: Layer, size: tuple[int, ...]) -> Tensor:
    """Of two samples, as for built-in networks: tracing is independent of the batch."""
    shape = (2, *size) if layer.out.index("n") == 0 else size
    return torch.zeros(shape, dtype=getattr(torch, layer.out.dtype))


def _held(layer: Layer) -> tuple[object, ...]:
    """What a plan and this rank's parameters rest on."""
    return layer.name, layer.kinds, [(name, p.shape) for name, p in layer.own_parameters()]


def _skeleton(module: nn.Module) -> nn.Module | None:
    """A copy to be traced, whose parameters have no memory. None where a module cannot be copied."""
    memo: dict[int, object] = {}
    for p in module.parameters():
        empty = torch.zeros((), dtype=p.dtype, device=p.device).expand(p.shape)
        memo[id(p)] = nn.Parameter(empty, requires_grad=p.requires_grad)
    try:
        return copy.deepcopy(module, memo)
    except Exception:  # whatever a user's class meets
        return None
