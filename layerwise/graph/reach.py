"""Which parameters each output depends on."""

from __future__ import annotations

from layerwise.graph.layer import LayerGraph


def parameters_behind(graph: LayerGraph) -> list[frozenset[str]]:
    """For each output, the parameters that a gradient of it reaches; all there are where it is no such number."""
    behind = [_behind(graph, name) for name in graph.layers[-1].inputs]
    every = frozenset[str]().union(*behind)
    return [
        one if graph[name].out.differentiable else every
        for one, name in zip(behind, graph.layers[-1].inputs, strict=True)
    ]


def _behind(graph: LayerGraph, output: str) -> frozenset[str]:
    reached, parameters = {output}, set[str]()
    for layer in reversed(graph.layers[:-1]):
        if layer.name in reached and graph.has_gradient[layer.name]:
            parameters.update(name for name, _ in layer.own_parameters())
            sources = zip(layer.inputs, graph.flows_back(layer), strict=True)
            reached.update(source for source, flows in sources if flows)
    return frozenset(parameters)
