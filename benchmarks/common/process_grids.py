"""The study of process grids: an MLP's communication by the complexities of Laugier et al. (2018), beside the tables.

The paper counts no arithmetic: it is the same on every grid of as many processes. A misprint is corrected here: ring
collectives move (P-1)/P of a tensor, not P/(P-1). Logarithms are to base 2 and rounded up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel
from layerwise.errors import LayerwiseError
from layerwise.graph.layer_graph import LayerGraph
from layerwise.machine import DeviceGraph
from layerwise.search.baselines import ProcessGrid, grid_strategy, mlp_layers
from layerwise.search.find import candidate, search
from layerwise.search.result import Candidate, SearchResult, preferred


@dataclass(frozen=True, slots=True)
class FullLayer:
    """A fully-connected layer."""

    name: str
    inputs: int
    outputs: int
    parameters: int  # weights and biases
    item_bytes: int


@dataclass(frozen=True, slots=True)
class AlphaBeta:
    """alpha and beta of the processes that communicate: s a message, s a byte."""

    alpha_s: float
    beta_s_per_byte: float


def full_layers(graph: LayerGraph) -> tuple[FullLayer, ...]:
    """The layers of an MLP, first to last. LayerwiseError where the network is anything else."""
    return tuple(
        FullLayer(
            layer.name,
            layer.stages[0].specs[0].shape[-1],
            layer.out.shape[-1],
            sum(prod(p.shape) for p in layer.space.parameters if p.trainable),
            layer.out.item_bytes,
        )
        for layer in mlp_layers(graph)
    )


def grid_s(
    layers: Sequence[FullLayer], batch: int, batch_groups: int, model_parts: int, within: AlphaBeta, across: AlphaBeta
) -> float:
    """Of a grid (Gholami et al., 2018). within: the links of a batch group's parts; across: of one part's replicas.

    With one part it is batch parallelism: gradients of every weight are all-reduced. With one batch group it is less
    than their model parallelism, which gathers every layer's outputs and all-reduces gradients of the same size: no
    gradient of the network's input is needed, and that of another layer's input is as wide as the layer before.
    """
    total, samples = 0.0, batch / batch_groups
    for number, layer in enumerate(layers):
        total += _collective(samples * layer.outputs * layer.item_bytes, model_parts, within)
        if number:
            total += 2 * _collective(samples * layer.inputs * layer.item_bytes, model_parts, within)
        total += 2 * _collective(layer.parameters * layer.item_bytes / model_parts, batch_groups, across)
    return total


def _collective(size_bytes: float, processes: int, link: AlphaBeta) -> float:
    share = (processes - 1) / processes
    return link.alpha_s * (processes - 1).bit_length() + link.beta_s_per_byte * share * size_bytes


def link_between(devices: DeviceGraph, first: int, last: int) -> AlphaBeta:
    """The outermost link between two devices: collectives wait for it. Ports that are shared count as free."""
    level = devices.levels[devices.level_between(first, last)]
    return AlphaBeta(level.alpha_s, level.beta_s_per_byte)


@dataclass(frozen=True, slots=True)
class PricedGrid:
    """A grid's communication by the paper's complexity, and its whole step by the cost tables."""

    grid: ProcessGrid
    paper_s: float
    tables: Candidate


@dataclass(frozen=True, slots=True)
class GridStudy:
    """Grids beside the layer-wise search."""

    grids: tuple[PricedGrid, ...]
    result: SearchResult
    best: Candidate  # the fastest with overlap of all of these that fit into memory

    @property
    def best_grid(self) -> PricedGrid:
        """By the cost tables, with overlap."""
        best = preferred(g.tables for g in self.grids)
        return next(g for g in self.grids if g.tables is best)

    @property
    def best_by_paper(self) -> PricedGrid:
        """By the paper's complexity."""
        return min(self.grids, key=lambda g: g.paper_s)


def study(model: CostModel, space: SearchSpace, wanted: Sequence[ProcessGrid]) -> GridStudy:
    """Prices grids, and searches for what is best layer by layer."""
    priced = tuple(price_grid(model, grid) for grid in wanted)
    if not priced:
        raise LayerwiseError(
            f"no grid of {model.devices.count} processes has a sample for every batch group ({model.graph.batch} "
            "samples) and an output for every part: take fewer processes or more samples"
        )
    result = search(model, replace(space, spread=True))
    best = preferred((result.fastest, *(p.tables for p in priced)))  # ties: to the search's
    return GridStudy(priced, result, best)


def price_grid(model: CostModel, grid: ProcessGrid) -> PricedGrid:
    """One grid on all the devices. LayerwiseError where it does not fit the network or the devices."""
    graph, devices = model.graph, model.devices
    tables = candidate(model, f"grid:{grid}", grid_strategy(model, grid))
    layers = full_layers(graph)
    within = link_between(devices, 0, grid.model_parts - 1)
    across = link_between(devices, 0, grid.processes - grid.model_parts)
    paper_s = grid_s(layers, graph.batch, grid.batch_groups, grid.model_parts, within, across)
    return PricedGrid(grid, paper_s, tables)
