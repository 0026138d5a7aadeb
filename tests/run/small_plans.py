"""Small plans with hand-written strategies, for the tests of training."""

from collections.abc import Mapping
from functools import cache

from layerwise.graph.fuse import fuse
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.load import Network, load_network
from layerwise.plan import Plan, parse_strategy


@cache
def network(model: str, batch: int) -> Network:
    """torch.export is slow, and not for threads."""
    return load_network(model, batch)


def graph(model: str, batch: int) -> LayerGraph:
    """Fused."""
    return fuse(network(model, batch).graph)


def plan(
    model: str, batch: int, ranks: int, degrees: Mapping[str, Mapping[str, int]] | None = None, io: str = "sample"
) -> Plan:
    """Samples are split over all ranks, where `degrees` says nothing else of a layer."""
    found = graph(model, batch)
    usual = {"n": min(batch, ranks)}
    strategy = {layer.name: dict((degrees or {}).get(layer.name, usual)) for layer in found.inner}
    return Plan(model, found.digest, batch, ranks, ranks, io, True, parse_strategy(strategy, found, ranks))
