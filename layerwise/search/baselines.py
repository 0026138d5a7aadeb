"""Named strategies: the usual ones, and process grids of MLPs (Laugier et al., 2018); and layers that a user fixes.

A grid splits samples over P_r batch groups, and every layer's outputs over P_c parts. It is one strategy of the
search's space, so the layer-wise optimum is never worse than the best grid. `benchmarks.grids` repeats the paper's
study. `configurations` has what a search may choose of, the named strategies' included.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import filterfalse

from layerwise.config import Config, SearchSpace, is_legal, parse, reduce_axis
from layerwise.cost.model import CostModel
from layerwise.cost.price import complete
from layerwise.errors import LayerwiseError, nearest
from layerwise.graph.layer import Layer
from layerwise.graph.layer_graph import LayerGraph
from layerwise.ops.nn.linear import Linear
from layerwise.ops.tensor.along import Softmax
from layerwise.partition.place import data_parallel
from layerwise.partition.sharding import check_held, held_configurations, why_not_held

NAMES = ("data", "model", "owt")


def baselines(model: CostModel, space: SearchSpace) -> dict[str, dict[str, Config]]:
    """All baselines, by name, with the configurations of all layers."""
    return {name: complete(model, baseline(model, name, space.replicas)) for name in NAMES}


def baseline(model: CostModel, name: str, replicas: int = 1) -> dict[str, Config]:
    """`data`: samples over all devices. `model`: channels of every layer over the largest divisor of N that fits, as in
    Krizhevsky (2014). `owt`: his one weird trick, model parallelism for fully-connected layers only.

    replicas: see `SearchSpace`; each uses the same strategy on its devices.
    """
    assert name in NAMES
    if replicas > 1:
        return _in_replicas(model, name, replicas)
    by_channel = _by_channel(model, name)
    count, shares = model.devices.count, model.shares or ()
    return {
        layer.name: _channels(layer, count) if layer.name in by_channel else data_parallel(layer, count, shares)
        for layer in model.graph.inner
    }


def _by_channel(model: CostModel, name: str) -> set[str]:
    """The layers whose channels a baseline splits, except those of which a device must have all classes."""
    named = [x for x in model.graph.inner if name == "model" or (name == "owt" and isinstance(x.main, Linear))]
    return {layer.name for layer in named} - of_all_classes(model)


def named_strategy(model: CostModel, name: str, replicas: int = 1) -> dict[str, Config] | None:
    """The strategy of a name: a baseline's, or `grid:RxC` for an MLP. None for other names."""
    if name.startswith("grid:"):
        return grid_strategy(model, parse_grid(name.removeprefix("grid:")))
    return baseline(model, name, replicas) if name in NAMES else None


def _in_replicas(model: CostModel, name: str, replicas: int) -> dict[str, Config]:
    """Each layer's configuration on a replica's devices, multiplied by the number of replicas along samples."""
    devices, by_channel, strategy = model.devices.count, _by_channel(model, name), dict[str, Config]()
    each = devices // replicas
    for layer in model.graph.inner:
        label = "c" if layer.name in by_channel and not isinstance(layer.main, Softmax) else "n"
        if layer.space.max_degree("n") < replicas:  # no samples
            strategy[layer.name] = data_parallel(layer, devices)
            continue
        configs = (
            Config.of(
                {"n": replicas, label: inner} if label == "c" else {"n": replicas * inner},
                "contiguous" if inner == each else "strided",
            )
            for inner in range(each, 0, -1)
            if each % inner == 0
        )
        strategy[layer.name] = next(
            config for config in configs if is_legal(config, layer.space.dims) and why_not_held(layer, config) is None
        )
    return strategy


def _channels(layer: Layer, devices: int) -> Config:
    if isinstance(layer.main, Softmax):  # has no channels to split: where its input is, serial
        return Config()
    degrees = [d for d in range(1, devices + 1) if devices % d == 0 and d <= layer.space.max_degree("c")]
    configs = (Config.of({"c": degree}) for degree in reversed(degrees))
    return next(config for config in configs if why_not_held(layer, config) is None)


def of_all_classes(model: CostModel) -> frozenset[str]:
    """The layers whose output must have all classes on some device."""
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
    """True if no device has all classes under a configuration."""
    dims = layer.space.dims
    return config[dims[1].label or ""] > 1 or (config["k"] > 1 and reduce_axis(config, dims) == 1)


@dataclass(frozen=True, slots=True)
class ProcessGrid:
    """P_r x P_c processes. The parts of one batch group are neighbours, so that they stay inside a node."""

    batch_groups: int  # P_r
    model_parts: int  # P_c

    @property
    def processes(self) -> int:
        """The number of processes, P."""
        return self.batch_groups * self.model_parts

    def __str__(self) -> str:
        return f"{self.batch_groups}x{self.model_parts}"


def parse_grid(text: str) -> ProcessGrid:
    """`2x4`: two batch groups of four parts."""
    parts = re.fullmatch(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})", text.lower())
    if not parts:
        raise LayerwiseError(f"grid {text!r} must be batch groups x model parts, such as 2x4")
    return ProcessGrid(int(parts[1]), int(parts[2]))


def grids(processes: int, graph: LayerGraph) -> tuple[ProcessGrid, ...]:
    """All grids of P processes with a sample for every batch group and an output for every part, batch groups first."""
    divisors = [d for d in range(1, processes + 1) if processes % d == 0]
    every = (ProcessGrid(processes // d, d) for d in divisors)
    return tuple(grid for grid in every if _too_large(grid, graph) is None)


def mlp_layers(graph: LayerGraph) -> tuple[Layer, ...]:
    """The layers of an MLP, first to last. Raises LayerwiseError for any other network."""
    before = graph.layers[0].name
    for layer in graph.inner:
        if not isinstance(layer.main, Linear) or len(layer.out.shape) != 2 or layer.inputs != (before,):
            raise LayerwiseError(
                "process grids are for MLPs (linear layers with element-wise functions between), but layer "
                f"{layer.name!r} is {layer.main.kind}: search instead, which splits any network"
            )
        before = layer.name
    return tuple(graph.inner)


def _too_large(grid: ProcessGrid, graph: LayerGraph) -> str | None:
    widest = max(layer.out.shape[-1] for layer in mlp_layers(graph))
    if grid.batch_groups > graph.batch:
        return f"a batch of {graph.batch} samples cannot be split into {grid.batch_groups} groups"
    if grid.model_parts > widest:
        return f"the widest layer has {widest} outputs, which cannot be split into {grid.model_parts} parts"
    return None


def grid_strategy(model: CostModel, grid: ProcessGrid) -> dict[str, Config]:
    """Every layer's configuration. A layer with fewer outputs than parts is split into the largest divisor that fits.

    Raises LayerwiseError if the network is not an MLP, has too few samples or outputs, or the number of devices
    differs.
    """
    if grid.processes != model.devices.count:
        raise LayerwiseError(
            f"grid {grid} has {grid.processes} processes, but there are {model.devices.count} devices: pass --gpus "
            f"{grid.processes}"
        )
    return grid_configs(model.graph, grid)


def grid_configs(graph: LayerGraph, grid: ProcessGrid) -> dict[str, Config]:
    """`grid_strategy` on as many devices as the grid has processes."""
    reason = _too_large(grid, graph)
    if reason:
        raise LayerwiseError(f"grid {grid}: {reason}")
    return {layer.name: _config(grid, layer) for layer in graph.inner}


def _config(grid: ProcessGrid, layer: Layer) -> Config:
    most = layer.space.max_degree("c")
    parts = max(d for d in range(1, grid.model_parts + 1) if grid.model_parts % d == 0 and d <= most)
    total = grid.batch_groups * parts
    # Strided, so that a layer with fewer cells stays with the processes that hold its samples.
    return Config.of({"n": grid.batch_groups, "c": parts}, "strided" if 1 < total < grid.processes else "contiguous")


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


def configurations(
    model: CostModel, space: SearchSpace, named: Mapping[str, Mapping[str, Config]]
) -> dict[str, tuple[Config, ...]]:
    """Returns the configurations of every layer: the space's and the named strategies'; a single one for inputs, sink
    and fixed layers.
    """
    result, fixed = dict[str, tuple[Config, ...]](), dict(space.fixed)
    of_kind: dict[int, tuple[Config, ...]] = {}
    whole = of_all_classes(model)
    if model.graph.batch < space.replicas:
        batch = model.graph.batch
        raise LayerwiseError(f"a batch of {batch} is too small to give each of {space.replicas} replicas a sample")
    for layer in model.graph.layers:
        if layer.end:
            result[layer.name] = (model.end_config(layer),)
        elif layer.name in fixed:
            space.check(fixed[layer.name], layer.space.dims, layer.name)
            result[layer.name] = (fixed[layer.name],)
        else:
            kind = model.kind(layer)
            if kind not in of_kind:
                of_kind[kind] = held_configurations(layer, space)
            known = of_kind[kind]
            if layer.name in whole:
                known = tuple(config for config in known if not cuts_classes(layer, config))
            extra = dict.fromkeys(s[layer.name] for s in named.values())
            result[layer.name] = known + tuple(filterfalse(frozenset(known).__contains__, extra))
    return result
