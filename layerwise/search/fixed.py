"""Layers with a configuration from the user: a search keeps it, and chooses the others around it."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from layerwise.config import Config, parse
from layerwise.errors import LayerwiseError, nearest
from layerwise.graph.layer_graph import LayerGraph
from layerwise.partition.sharding import check_held


def fixed_layers(graph: LayerGraph, devices: int, wanted: Mapping[str, object]) -> dict[str, Config]:
    """Returns the configuration of every named layer.

    Args:
        graph: The network.
        devices: The number of devices.
        wanted: {layers: degrees}, such as {"fc*": {"c": 4}}. A key names a layer, a module around layers, or either
            with * and ?; if several keys match a layer, the last counts.

    Raises:
        LayerwiseError: Layers are not in the model, or one of them cannot be split that way.
    """
    layers, configs = {layer.name: layer for layer in graph.inner}, dict[str, Config]()
    for pattern, degrees in wanted.items():
        names = [pattern] if pattern in layers else [name for name in layers if _names(pattern, name)]
        if not names:
            hint = nearest(str(pattern), layers) or f" (it has {', '.join(list(layers)[:8])}{' …' * (len(layers) > 8)})"
            raise LayerwiseError(
                f"the strategy names layer {pattern!r}, which the model does not have{hint}; element-wise layers "
                "belong to the layer before them"
            )
        for name in names:
            configs[name] = parse(degrees, layers[name].space.dims, devices, name)
            check_held(layers[name], configs[name])
    return configs


def _names(pattern: str, layer: str) -> bool:
    return fnmatchcase(layer, pattern) or fnmatchcase(layer, f"{pattern}.*")
