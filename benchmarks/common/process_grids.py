"""Process grids: an MLP's communication by the complexities of Laugier et al. (2018), and grids by the cost tables.

The paper counts no arithmetic: it is the same on every grid of as many processes. A misprint is corrected here: ring
collectives move (P-1)/P of a tensor, not P/(P-1). Logarithms are to base 2 and rounded up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel
from layerwise.errors import LayerwiseError
from layerwise.search.baselines import ProcessGrid, grid_strategy
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


@dataclass(frozen=True, slots=True)
class GridStudy:
    """Grids, priced by the cost tables, beside the layer-wise search."""

    grids: Mapping[ProcessGrid, Candidate]
    result: SearchResult
    best: Candidate  # the fastest with overlap of all of these that fit into memory


def study(model: CostModel, space: SearchSpace, wanted: Sequence[ProcessGrid]) -> GridStudy:
    """Prices grids on all the devices, and searches for what is best layer by layer.

    LayerwiseError where there is no grid, or one does not fit the network or the devices.
    """
    priced = {grid: candidate(model, f"grid:{grid}", grid_strategy(model, grid)) for grid in wanted}
    if not priced:
        raise LayerwiseError(
            f"no grid of {model.devices.count} processes has a sample for every batch group ({model.graph.batch} "
            "samples) and an output for every part: take fewer processes or more samples"
        )
    result = search(model, replace(space, spread=True))
    best = preferred((result.fastest, *priced.values()))  # ties: to the search's
    return GridStudy(priced, result, best)
