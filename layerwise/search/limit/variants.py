"""Variants: the configurations of a layer in all forms that may save memory, and the memory of them all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from layerwise.config import Config, States
from layerwise.cost.memory.bounds import MemoryBounds
from layerwise.cost.model import CostModel, EdgeName
from layerwise.errors import LayerwiseError
from layerwise.geometry.arrays import Floats, Ints, Mask
from layerwise.graph.layer import Layer
from layerwise.graph.layer_graph import LayerGraph
from layerwise.partition.blocks import recomputable
from layerwise.partition.sharding import may_shard, may_shard_each
from layerwise.search.limit.additive import Choice, Costs, Problem

OFFERS = ("recompute", "shard")
Configs = Mapping[str, tuple[Config, ...]]
Strategy = Mapping[str, Config]
Form = tuple[bool, States]  # recompute, states


@dataclass(frozen=True, slots=True)
class Forms:
    """The forms of a layer that may save memory."""

    offered: tuple[Form, ...]  # the first saves nothing
    recomputable: frozenset[str]  # layers
    layers: Mapping[str, Layer]
    devices: int
    fixed: frozenset[str]  # layers that stay as they are
    unfed: frozenset[str]  # `LayerGraph.unfed`

    @staticmethod
    def of(graph: LayerGraph, devices: int, offer: Iterable[str], fixed: Iterable[str] = ()) -> Forms:
        """offer: of OFFERS. LayerwiseError for anything else."""
        offer = tuple(offer)
        if unknown := sorted(set(offer) - set(OFFERS)):
            raise LayerwiseError(f"{unknown[0]!r} cannot be offered: choose of {', '.join(OFFERS)}")
        recompute = (False, True) if "recompute" in offer else (False,)
        states: tuple[States, ...] = ("replicated", "sharded", "gathered") if "shard" in offer else ("replicated",)
        forms = tuple(product(recompute, states))
        stay = {layer.name for layer in graph.layers if layer.end} | set(fixed)
        layers = {layer.name: layer for layer in graph.layers}
        return Forms(forms, recomputable(graph), layers, devices, frozenset(stay), graph.unfed)

    def of_layer(self, name: str, config: Config, form: Form) -> Config:
        """The configuration in a form, as far as that means anything for the layer."""
        if name in self.fixed or form == self.offered[0]:
            return config
        return self._formed(
            name, config, form, may_shard(self.layers[name], config, self.devices, unfed=name in self.unfed)
        )

    def of_layers(self, name: str, cells: tuple[Config, ...]) -> dict[Config, int]:
        """All different ones of a layer: which of the cells each has."""
        if name in self.fixed:
            return {config: i for i, config in enumerate(cells)}
        may = may_shard_each(self.layers[name], cells, self.devices, unfed=name in self.unfed)
        each = enumerate(zip(cells, may, strict=True))
        return {self._formed(name, c, form, shares): i for i, (c, shares) in each for form in self.offered}

    def _formed(self, name: str, config: Config, form: Form, shares: bool) -> Config:
        recompute, states = form
        return Config(
            config.degrees,
            config.placement,
            recompute and name in self.recomputable,
            states if shares else "replicated",
        )


@dataclass(frozen=True, slots=True)
class Variants:
    """The variants of every layer: its configurations in their forms."""

    configs: Configs  # V_l
    bases: Configs  # B_l: what neighbours see of them, all but states
    base: Mapping[str, Ints]  # (V_l,)
    cell: Mapping[str, Ints]  # (V_l,) which of the cells that they were made of

    @staticmethod
    def of(cells: Configs, forms: Forms) -> Variants:
        """Every configuration in every form."""
        configs = {name: forms.of_layers(name, these) for name, these in cells.items()}
        cell = {name: np.array(list(these.values())) for name, these in configs.items()}
        return Variants.grouped({name: tuple(these) for name, these in configs.items()}, cell)

    @staticmethod
    def grouped(configs: Configs, cell: Mapping[str, Ints] | None = None) -> Variants:
        """The variants of these configurations."""
        bases, base = dict[str, tuple[Config, ...]](), dict[str, Ints]()
        for name, these in configs.items():
            seen = [replace(config, states="replicated") for config in these]
            bases[name] = tuple(dict.fromkeys(seen))
            place = {config: i for i, config in enumerate(bases[name])}
            base[name] = np.array([place[config] for config in seen])
        return Variants(configs, bases, base, base if cell is None else cell)

    def restrict(self, keep: Mapping[str, Mask]) -> Variants:
        """The variants that are kept."""
        configs = {n: tuple(c for c, k in zip(these, keep[n], strict=True) if k) for n, these in self.configs.items()}
        return Variants.grouped(configs, {name: cell[keep[name]] for name, cell in self.cell.items()})

    def choice(self, strategy: Strategy) -> Choice:
        """The indices of a strategy's configurations."""
        return {name: configs.index(strategy[name]) for name, configs in self.configs.items()}

    def choices(self, strategies: Iterable[Strategy]) -> list[Choice]:
        """The choices of which all configurations are here."""
        places = {name: {config: i for i, config in enumerate(configs)} for name, configs in self.configs.items()}
        here = (s for s in strategies if all(s[name] in place for name, place in places.items()))
        return [{name: place[s[name]] for name, place in places.items()} for s in here]

    def strategy(self, choice: Choice) -> Strategy:
        """The configurations of these indices."""
        return {name: configs[choice[name]] for name, configs in self.configs.items()}

    def problem(
        self,
        node: Mapping[str, Floats],
        transfer: Mapping[EdgeName, Floats],
        memory: Memory,
        peak: Callable[[Strategy], float],
        cost: Callable[[Strategy], float] | None = None,
    ) -> Problem:
        """node: (V_l,) seconds; transfer: (B_u, B_v) seconds, lower bounds where `cost` says what a strategy costs."""

        def over(memory: Memory) -> Problem:
            return Problem(
                Costs(node, transfer),
                self.base,
                memory.row,
                memory.rows,
                lambda choice: peak(self.strategy(choice)),
                None if cost is None else lambda choice: cost(self.strategy(choice)),
                lambda choice: over(memory.nearer(choice)),
            )

        return over(memory)


class Memory:
    """The rows of a problem: every instant of a step on every device, by one bound of memory or by several."""

    def __init__(self, bounds: Sequence[MemoryBounds]) -> None:
        self.bounds = tuple(bounds)
        self._each = len(bounds[0].instants) * bounds[0].devices
        self._tables: dict[int, Costs] = {}

    @staticmethod
    def of(model: CostModel, variants: Variants) -> Memory:
        """Bounds of the memory of a step over these variants."""
        return Memory([MemoryBounds(model, variants.configs, variants.base)])

    def restrict(self, keep: Mapping[str, Mask], variants: Variants) -> Memory:
        """Over the variants that are kept."""
        return Memory([self.bounds[0].restrict(keep, variants.base)])

    def nearer(self, choice: Choice) -> Memory:
        """The bounds with more rows, near the memory of a choice; those that there are keep their numbers."""
        more = Memory([*self.bounds, self.bounds[0].near(choice)])
        more._tables = self._tables
        return more

    def where(self, row: int) -> tuple[str, int]:
        """The instant and the device of a row."""
        instant, device = divmod(row % self._each, self.bounds[0].devices)
        return self.bounds[0].instants[instant], device

    def row(self, row: int) -> Costs:
        """Bytes of one row."""
        if row not in self._tables:
            self._tables[row] = Costs(*self.bounds[row // self._each].tables(*self.where(row)))
        return self._tables[row]

    def rows(self, choice: Choice) -> Floats:
        """(R,) bytes of one choice."""
        return np.concatenate([found.ravel() for found in MemoryBounds.at_each(self.bounds, choice)])
