"""Unused: parameters that a backward pass does not reach, by which of the model's outputs have gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from layerwise.comm.base import Comm
from layerwise.graph.layer_graph import LayerGraph


class Unused:
    """Tracks which of the model's outputs have gradients in a backward pass, on any rank."""

    def __init__(self, graph: LayerGraph, comm: Comm) -> None:
        self._comm, self._outputs = comm, graph.layers[-1].inputs
        self._behind = parameters_behind(graph)
        self._some = frozenset[str]().union(*self._behind).difference(frozenset[str].intersection(*self._behind))
        self._used = set[int]()  # outputs that have gradients in this pass
        self._twice = set[int]()  # outputs that a later pass may differentiate again

    def begin(self) -> None:
        """Begins a backward pass."""
        self._used = set()

    def reach(self, graph: LayerGraph, has_gradient: Sequence[bool]) -> None:
        """Notes that the pass reaches a call's outputs, with gradients for some. graph: the network as called."""
        same = graph.layers[-1].inputs == self._outputs
        used = {i for i in range(len(self._outputs)) if not same or has_gradient[i]}
        self._used |= used
        if torch.is_grad_enabled():
            self._twice |= used

    def parameters(self) -> frozenset[str]:
        """Returns the parameters that the pass did not reach on any rank. All ranks must call this at its end."""
        if not self._some:
            return frozenset()
        used = self._used | self._twice
        ranks = self._comm.tell([i in used for i in range(len(self._behind))])()
        reached = [parameters for parameters, *each in zip(self._behind, *ranks, strict=True) if any(each)]
        return self._some.difference(*reached) if reached else frozenset()


def parameters_behind(graph: LayerGraph) -> list[frozenset[str]]:
    """Returns for each output the parameters that its gradient reaches; all parameters if it can have no gradient."""
    outputs = graph.layers[-1].inputs
    behind = [_behind(graph, name) for name in outputs]
    every = frozenset[str]().union(*behind)
    return [some if graph[name].out.differentiable else every for some, name in zip(behind, outputs, strict=True)]


def _behind(graph: LayerGraph, output: str) -> frozenset[str]:
    reached, parameters = {output}, set[str]()
    for layer in reversed(graph.layers[:-1]):
        if layer.name in reached and graph.has_gradient[layer.name]:
            parameters.update(name for name, _ in layer.own_parameters())
            sources = zip(layer.inputs, graph.flows_back(layer), strict=True)
            reached.update(source for source, flows in sources if flows)
    return frozenset(parameters)
