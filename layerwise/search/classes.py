"""Classes that stay together: of an output of which every device keeps its box (io boxes), a loss is taken box by box.

A loss needs all classes of a position, which are dimension 1 (`run.outputs.check_classes`).
"""

from __future__ import annotations

from layerwise.config import Config, reduce_axis
from layerwise.cost.model import CostModel
from layerwise.graph.layer import Layer


def of_all_classes(model: CostModel) -> frozenset[str]:
    """The layers that make such an output."""
    graph = model.graph
    if model.options.io != "boxes":
        return frozenset()
    sources = [graph[name] for name in graph.layers[-1].inputs]
    return frozenset(
        source.name
        for source in sources
        if source.out.index("n") == 0 and len(source.out.shape) > 1 and source.name not in graph.losses
    )


def cuts_classes(layer: Layer, config: Config) -> bool:
    """Whether no device has them all under a configuration."""
    dims = layer.space.dims
    return config[dims[1].label or ""] > 1 or (config["k"] > 1 and reduce_axis(config, dims) == 1)
