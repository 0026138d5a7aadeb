"""Case: a strategy on a number of devices, as the closed forms take it."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.paradl.collectives import Hop, all_gather_s
from benchmarks.paradl.facts import Facts, LayerFacts
from layerwise.cost.model import CostModel
from layerwise.machine import DeviceGraph
from layerwise.oracle.strategies import CUT, Limit, Shape


@dataclass(frozen=True, slots=True)
class Case:
    """What a closed form is asked for: the phases of an iteration of the model's batch."""

    facts: Facts
    strategy: str
    shape: Shape  # how the strategy uses the devices
    model: CostModel  # of all devices
    segments: int  # of a pipelined batch, else 1
    limit: Limit  # of the strategy, with this batch

    @property
    def devices(self) -> DeviceGraph:
        """The machine."""
        return self.model.devices

    @property
    def batch(self) -> float:
        """Samples of a group of devices that share them."""
        return self.model.graph.batch / self.shape.groups

    @property
    def cut(self) -> str | None:
        """The dimension along which groups cut every layer: `c`, `k`, or none."""
        return CUT.get(self.strategy)

    @property
    def grid(self) -> dict[str, int]:
        """Degrees of a spatial cut inside a group."""
        return dict(self.shape.grid)

    @property
    def spatial(self) -> tuple[tuple[LayerFacts, ...], tuple[LayerFacts, ...]]:
        """The layers up to the one that a spatial strategy gathers after, and the rest."""
        layers = self.facts.layers
        end = next((i for i, layer in enumerate(layers, start=1) if layer.name == self.shape.gather_after), 0)
        return layers[:end], layers[end:]

    def spread_s(self, items: float, link: Hop) -> float:
        """A ring's all-gather of `items` a sample, of which each device of a group has its share."""
        size_bytes = self.batch * items / self.shape.inside * self.facts.activation_bytes
        return all_gather_s(size_bytes, self.shape.inside, link)

    def gather_after_s(self, link: Hop) -> float:
        """One way: the gather after the last spatial layer."""
        before, after = self.spatial
        return self.spread_s(before[-1].outputs, link) if before and after else 0.0
