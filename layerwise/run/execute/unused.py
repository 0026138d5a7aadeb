"""Unused: which of the model's outputs a backward pass has gradients of, and the parameters that it does not reach."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from layerwise.comm.base import Comm
from layerwise.graph.layer_graph import LayerGraph


class Unused:
    """Follows which of the model's outputs a backward pass has gradients of, on any rank."""

    def __init__(self, graph: LayerGraph, comm: Comm) -> None:
        self._comm, self._outputs = comm, graph.layers[-1].inputs
        self._behind = parameters_behind(graph)
        self._some = frozenset[str]().union(*self._behind).difference(frozenset[str].intersection(*self._behind))
        self._used = set[int]()  # outputs: that this pass has gradients of
        self._twice = set[int]()  # that a pass to come may differentiate once more

    def begin(self) -> None:
        """A backward pass begins."""
        self._used = set()

    def reach(self, graph: LayerGraph, has_gradient: Sequence[bool]) -> None:
        """Notes that the pass comes to a call's outputs with gradients of some. graph: the network as it was called."""
        same = graph.layers[-1].inputs == self._outputs
        used = {i for i in range(len(self._outputs)) if not same or has_gradient[i]}
        self._used |= used
        if torch.is_grad_enabled():
            self._twice |= used

    def parameters(self) -> frozenset[str]:
        """Returns the parameters that the pass did not reach on any rank. Every rank calls this at its end."""
        if not self._some:
            return frozenset()
        used = self._used | self._twice
        ranks = self._comm.tell([i in used for i in range(len(self._behind))])()
        reached = [parameters for parameters, *each in zip(self._behind, *ranks, strict=True) if any(each)]
        return self._some.difference(*reached) if reached else frozenset()


def parameters_behind(graph: LayerGraph) -> list[frozenset[str]]:
    """Returns for each output the parameters that its gradient reaches; all there are where it can have none."""
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
