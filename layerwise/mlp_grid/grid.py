"""Process grids for MLPs (Laugier et al., 2018): samples over P_r batch groups, every layer's outputs over P_c parts.

A grid is one strategy of the search's space, the same configuration for every layer; so the layer-wise optimum is
never worse than the best grid.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from layerwise.cache import Answers
from layerwise.config import Config, SearchSpace
from layerwise.cost.model import CostModel, Progress
from layerwise.errors import LayerwiseError
from layerwise.graph.layer import Layer, LayerGraph
from layerwise.mlp_grid.cost import Distribution, distribution, full_layers, grid_s, link_between
from layerwise.plan import Plan
from layerwise.search.find import candidate, search
from layerwise.search.limit.variants import OFFERS
from layerwise.search.make_plan import make_plan
from layerwise.search.result import Candidate, SearchResult, preferred


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
        raise LayerwiseError(f"--grid {text!r}: write batch groups x model parts, such as 2x4")
    return ProcessGrid(int(parts[1]), int(parts[2]))


def grids(processes: int, graph: LayerGraph) -> tuple[ProcessGrid, ...]:
    """All grids of P processes that have a sample for every batch group and an output for every part, batch first."""
    divisors = [d for d in range(1, processes + 1) if processes % d == 0]
    every = (ProcessGrid(processes // d, d) for d in divisors)
    return tuple(grid for grid in every if _too_large(grid, graph) is None)


def _too_large(grid: ProcessGrid, graph: LayerGraph) -> str | None:
    widest = max(layer.outputs for layer in full_layers(graph))
    if grid.batch_groups > graph.batch:
        return f"a batch of {graph.batch} samples cannot be cut into {grid.batch_groups} groups"
    if grid.model_parts > widest:
        return f"the widest layer has {widest} outputs and cannot be cut into {grid.model_parts} parts"
    return None


def grid_strategy(grid: ProcessGrid, graph: LayerGraph) -> dict[str, Config]:
    """Every layer's configuration. A layer with fewer outputs than parts is cut into the largest divisor that fits.

    Raises LayerwiseError where the network is no MLP, or has too few samples or outputs for the grid.
    """
    reason = _too_large(grid, graph)
    if reason:
        raise LayerwiseError(f"--grid {grid}: {reason}")
    return {layer.name: _config(grid, layer) for layer in graph.inner}


def _config(grid: ProcessGrid, layer: Layer) -> Config:
    most = layer.space.max_degree("c")
    parts = max(d for d in range(1, grid.model_parts + 1) if grid.model_parts % d == 0 and d <= most)
    total = grid.batch_groups * parts
    # Strided, so that what is left of a layer stays with the processes that hold its samples.
    return Config.of({"n": grid.batch_groups, "c": parts}, "strided" if 1 < total < grid.processes else "contiguous")


@dataclass(frozen=True, slots=True)
class PricedGrid:
    """A grid's communication by the paper's complexity, and its whole step by the cost tables."""

    grid: ProcessGrid
    paper_s: float
    tables: Candidate
    distribution: Distribution


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


def study(
    model: CostModel,
    space: SearchSpace,
    wanted: Sequence[ProcessGrid],
    *,
    memory_bytes: float = 2**31,
    memory_limit_bytes: float | None = None,
    offer: Iterable[str] = OFFERS,
    progress: Progress | None = None,
    answers: Answers | None = None,
) -> GridStudy:
    """Prices grids, and searches for what is best layer by layer; the arguments are those of `search`."""
    priced = tuple(price_grid(model, grid, memory_limit_bytes) for grid in wanted)
    if not priced:
        raise LayerwiseError(
            f"no grid of {model.devices.count} processes has a sample for every batch group ({model.graph.batch} "
            "samples) and an output for every part: take fewer processes or more samples"
        )
    result = search(
        model,
        replace(space, spread=True),
        memory_bytes=memory_bytes,
        memory_limit_bytes=memory_limit_bytes,
        offer=offer,
        progress=progress,
        answers=answers,
    )
    best = preferred((result.fastest, *(p.tables for p in priced)))  # ties: to the search's
    return GridStudy(priced, result, best)


def price_grid(model: CostModel, grid: ProcessGrid, memory_limit_bytes: float | None = None) -> PricedGrid:
    """One grid on all the devices. LayerwiseError where it does not fit the network or the devices.

    memory_limit_bytes: by default what a device has.
    """
    graph, devices = model.graph, model.devices
    if grid.processes != devices.count:
        raise LayerwiseError(f"--grid {grid} has {grid.processes} processes, there are {devices.count}")
    layers = full_layers(graph)
    within = link_between(devices, 0, grid.model_parts - 1)
    across = link_between(devices, 0, grid.processes - grid.model_parts)
    slice_bytes = graph.batch / grid.batch_groups * layers[0].inputs * layers[0].item_bytes
    return PricedGrid(
        grid,
        grid_s(layers, graph.batch, grid.batch_groups, grid.model_parts, within, across),
        candidate(model, f"grid {grid}", grid_strategy(grid, graph), memory_limit_bytes),
        distribution(slice_bytes, grid.batch_groups, grid.model_parts, link_between(devices, 0, devices.count - 1)),
    )


def grid_plan(
    name: str,
    profile: str,
    model: CostModel,
    space: SearchSpace,
    studied: GridStudy,
    *,
    input_shape: tuple[int, ...] | None = None,
) -> Plan:
    """The only grid of a study as a plan for the runtime; the other arguments are those of `make_plan`."""
    (priced,) = studied.grids
    result = replace(studied.result, best=priced.tables)
    return make_plan(name, profile, model, space, result, fused=True, input_shape=input_shape)
