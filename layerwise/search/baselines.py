"""The strategies that everybody uses."""

from __future__ import annotations

from layerwise.config import Config, reduce_axis
from layerwise.cost.model import CostModel
from layerwise.graph.layer import Layer
from layerwise.ops.nn.linear import Linear
from layerwise.ops.tensor.softmax import Softmax
from layerwise.partition.holding import why_not_held
from layerwise.partition.place import data_parallel
from layerwise.search.grids import grid_strategy, parse_grid

NAMES = ("data", "model", "owt")


def baseline(model: CostModel, name: str) -> dict[str, Config]:
    """`data`: samples over all devices. `model`: channels of every layer over the largest divisor of N that fits, as
    Krizhevsky (2014). `owt`: his one weird trick, model parallelism for fully-connected layers only.
    """
    assert name in NAMES
    strategy, whole = {}, of_all_classes(model)
    for layer in model.graph.inner:
        by_channel = name == "model" or (name == "owt" and isinstance(layer.main, Linear))
        by_channel = by_channel and layer.name not in whole
        strategy[layer.name] = (_channels if by_channel else data_parallel)(layer, model.devices.count)
    return strategy


def named_strategy(model: CostModel, name: str) -> dict[str, Config] | None:
    """The strategy of a name: a baseline's, or `grid:RxC` of an MLP. None where the name is none of these."""
    if name.startswith("grid:"):
        return grid_strategy(model, parse_grid(name.removeprefix("grid:")))
    return baseline(model, name) if name in NAMES else None


def _channels(layer: Layer, devices: int) -> Config:
    if isinstance(layer.main, Softmax):  # has no channels to split: where its input is, serial
        return Config()
    degrees = [d for d in range(1, devices + 1) if devices % d == 0 and d <= layer.space.max_degree("c")]
    configs = (Config.of({"c": degree}) for degree in reversed(degrees))
    return next(config for config in configs if why_not_held(layer, config) is None)


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
