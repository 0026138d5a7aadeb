"""NodeCost: a layer's own costs under many configurations; NodeCosts keeps those that were needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from layerwise.config import Config
from layerwise.cost.compute.roofline import ComputeTime
from layerwise.geometry.arrays import Floats, Ints


@dataclass(frozen=True, slots=True)
class NodeCost:
    """A layer's own costs under C configurations, in seconds."""

    compute: ComputeTime  # without recomputation
    seconds: Mapping[str, Floats]  # (C,) by term, with recomputation: t_C, t_S, and the collectives inside the layer
    kinds: Sequence[ComputeTime] = ()  # of unequal devices, that of each kind; `compute` is the slowest one's

    @staticmethod
    def joined(costs: Sequence[NodeCost]) -> NodeCost:
        """The costs of all configurations, concatenated."""
        seconds = {name: np.concatenate([cost.seconds[name] for cost in costs]) for name in costs[0].seconds}
        kinds = [ComputeTime.joined(times) for times in zip(*(cost.kinds for cost in costs), strict=True)]
        return NodeCost(ComputeTime.joined([cost.compute for cost in costs]), seconds, kinds)

    def on(self, rows: Ints) -> NodeCost:
        """The costs of these configurations."""
        seconds = {name: cost[rows] for name, cost in self.seconds.items()}
        return NodeCost(self.compute.on(rows), seconds, [time.on(rows) for time in self.kinds])

    def of_kind(self, kind: int) -> ComputeTime:
        """The times of one kind of devices."""
        return self.kinds[kind] if self.kinds else self.compute

    @property
    def total(self) -> Floats:
        """Seconds by configuration, (C,)."""
        return reduce(np.add, self.seconds.values())


class NodeCosts:
    """Node costs of one layer, by configuration, as far as they were needed."""

    def __init__(self) -> None:
        self.row: dict[Config, int] = {}
        self._costs: list[NodeCost] = []

    def add(self, configs: tuple[Config, ...], cost: NodeCost) -> None:
        """Adds the costs of new configurations."""
        first = sum(len(known.compute.forward) for known in self._costs)  # some may be there twice
        self.row |= {config: first + i for i, config in enumerate(configs)}
        self._costs = [NodeCost.joined([*self._costs, cost])]

    def of(self, configs: tuple[Config, ...]) -> NodeCost:
        """The costs of these configurations, which must be there."""
        return self._costs[0].on(np.array([self.row[config] for config in configs], np.int64))
