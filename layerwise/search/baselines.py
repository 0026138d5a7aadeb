"""Named strategies: those that everybody uses, and process grids of MLPs (Laugier et al., 2018).

A grid has samples over P_r batch groups, every layer's outputs over P_c parts. It is one strategy of the search's
space, so the layer-wise optimum is never worse than the best grid. `benchmarks.grids` has the paper's study.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from layerwise.config import Config, SearchSpace, is_legal, reduce_axis
from layerwise.cost.model import CostModel
from layerwise.cost.price import complete
from layerwise.errors import LayerwiseError
from layerwise.graph.layer import Layer
from layerwise.graph.layer_graph import LayerGraph
from layerwise.ops.nn.linear import Linear
from layerwise.ops.tensor.along import Softmax
from layerwise.partition.place import data_parallel
from layerwise.partition.sharding import why_not_held

NAMES = ("data", "model", "owt")


def baselines(model: CostModel, space: SearchSpace) -> dict[str, dict[str, Config]]:
    """All of them, of all layers, by name."""
    return {name: complete(model, baseline(model, name, space.replicas)) for name in NAMES}


def baseline(model: CostModel, name: str, replicas: int = 1) -> dict[str, Config]:
    """`data`: samples over all devices. `model`: channels of every layer over the largest divisor of N that fits, as
    Krizhevsky (2014). `owt`: his one weird trick, model parallelism for fully-connected layers only.

    replicas: as `SearchSpace` has them: of each the same, among its devices.
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
    """The layers whose channels a baseline splits: none of those of which a device has to have all classes."""
    named = [x for x in model.graph.inner if name == "model" or (name == "owt" and isinstance(x.main, Linear))]
    return {layer.name for layer in named} - of_all_classes(model)


def named_strategy(model: CostModel, name: str, replicas: int = 1) -> dict[str, Config] | None:
    """The strategy of a name: a baseline's, or `grid:RxC` of an MLP. None where the name is none of these."""
    if name.startswith("grid:"):
        return grid_strategy(model, parse_grid(name.removeprefix("grid:")))
    return baseline(model, name, replicas) if name in NAMES else None


def _in_replicas(model: CostModel, name: str, replicas: int) -> dict[str, Config]:
    """Each layer's configuration on a replica's devices, for as many samples more as there are replicas."""
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
    """True if no device has all classes under a configuration."""
    dims = layer.space.dims
    return config[dims[1].label or ""] > 1 or (config["k"] > 1 and reduce_axis(config, dims) == 1)


@dataclass(frozen=True, slots=True)
class ProcessGrid:
    """P_r x P_c processes. Neighbours are the parts of one batch group, so that these stay inside a node."""

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
        raise LayerwiseError(f"grid {text!r}: write batch groups x model parts, such as 2x4")
    return ProcessGrid(int(parts[1]), int(parts[2]))


def grids(processes: int, graph: LayerGraph) -> tuple[ProcessGrid, ...]:
    """All grids of P processes that have a sample for every batch group and an output for every part, batch first."""
    divisors = [d for d in range(1, processes + 1) if processes % d == 0]
    every = (ProcessGrid(processes // d, d) for d in divisors)
    return tuple(grid for grid in every if _too_large(grid, graph) is None)


def mlp_layers(graph: LayerGraph) -> tuple[Layer, ...]:
    """The layers of an MLP, first to last. Raises LayerwiseError if the network is anything else."""
    before = graph.layers[0].name
    for layer in graph.inner:
        if not isinstance(layer.main, Linear) or len(layer.out.shape) != 2 or layer.inputs != (before,):
            raise LayerwiseError(
                f"process grids are for MLPs, linear layers one after the other with element-wise functions between: "
                f"layer {layer.name!r} ({layer.main.kind}) is none of these. Search instead: it splits any network"
            )
        before = layer.name
    return tuple(graph.inner)


def _too_large(grid: ProcessGrid, graph: LayerGraph) -> str | None:
    widest = max(layer.out.shape[-1] for layer in mlp_layers(graph))
    if grid.batch_groups > graph.batch:
        return f"a batch of {graph.batch} samples cannot be cut into {grid.batch_groups} groups"
    if grid.model_parts > widest:
        return f"the widest layer has {widest} outputs and cannot be cut into {grid.model_parts} parts"
    return None


def grid_strategy(model: CostModel, grid: ProcessGrid) -> dict[str, Config]:
    """Every layer's configuration. A layer with fewer outputs than parts is cut into the largest divisor that fits.

    Raises LayerwiseError where the network is no MLP, has too few samples or outputs, or the devices are not as many.
    """
    if grid.processes != model.devices.count:
        raise LayerwiseError(
            f"grid {grid} has {grid.processes} processes, there are {model.devices.count}: give --gpus {grid.processes}"
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
    # Strided, so that what is left of a layer stays with the processes that hold its samples.
    return Config.of({"n": grid.batch_groups, "c": parts}, "strided" if 1 < total < grid.processes else "contiguous")
