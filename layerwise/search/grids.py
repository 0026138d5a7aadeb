"""Process grids for MLPs (Laugier et al., 2018): samples over P_r batch groups, every layer's outputs over P_c parts.

A grid is one strategy of the search's space, the same configuration for every layer; so the layer-wise optimum is
never worse than the best grid. `benchmarks.grids` has the paper's study.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from layerwise.config import Config
from layerwise.cost.model import CostModel
from layerwise.errors import LayerwiseError
from layerwise.graph.layer import Layer, LayerGraph
from layerwise.ops.nn.linear import Linear


@dataclass(frozen=True, slots=True)
class ProcessGrid:
    """P_r x P_c processes. Neighbours are the parts of one batch group, so that these stay inside a node."""

    batch_groups: int  # P_r
    model_parts: int  # P_c

    @property
    def processes(self) -> int:
        """P."""
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
    """The layers of an MLP, first to last. LayerwiseError where the network is anything else."""
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
