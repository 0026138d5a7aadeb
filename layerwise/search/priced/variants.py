"""Variants: the configurations of a layer, each in all forms that may save memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, product

import numpy as np

from layerwise.config import Config, States
from layerwise.cost.additive import Choice, Moved
from layerwise.cost.model import Configs, CostModel
from layerwise.errors import LayerwiseError
from layerwise.geometry.arrays import Floats, Ints, Mask
from layerwise.graph.layer import Layer
from layerwise.graph.layer_graph import LayerGraph
from layerwise.partition.blocks import recomputable
from layerwise.partition.sharding import may_shard, may_shard_each

OFFERS = ("recompute", "shard")
Strategy = Mapping[str, Config]
Form = tuple[bool, States]  # recompute, states


@dataclass(frozen=True, slots=True)
class Forms:
    """The forms of a layer that may save memory."""

    offered: tuple[Form, ...]  # the first saves nothing
    recomputable: frozenset[str]  # layers
    layers: Mapping[str, Layer]
    devices: int
    fixed: frozenset[str]  # layers that keep their form
    unfed: frozenset[str]  # `LayerGraph.unfed`
    _known: dict[object, dict[Config, int]] = field(default_factory=dict)  # a cache, as repeated blocks are alike

    @staticmethod
    def of(graph: LayerGraph, devices: int, offer: Iterable[str], fixed: Iterable[str] = ()) -> Forms:
        """offer: of OFFERS. Raises LayerwiseError for anything else."""
        offer = tuple(offer)
        if unknown := sorted(set(offer) - set(OFFERS)):
            raise LayerwiseError(f"{unknown[0]!r} cannot be offered: choose of {', '.join(OFFERS)}")
        recompute = (False, True) if "recompute" in offer else (False,)
        states: tuple[States, ...] = ("replicated", "sharded", "gathered") if "shard" in offer else ("replicated",)
        forms = tuple(product(recompute, states))
        stay = {layer.name for layer in graph.layers if layer.end} | set(fixed)
        layers = {layer.name: layer for layer in graph.layers}
        return Forms(forms, recomputable(graph), layers, devices, frozenset(stay), graph.unfed)

    @property
    def saved(self) -> Forms:
        """Returns the forms that recompute nothing."""
        return replace(self, offered=tuple(form for form in self.offered if not form[0]))

    def of_layer(self, name: str, config: Config, form: Form) -> Config:
        """The configuration in a form, as far as the layer can have it."""
        if name in self.fixed or form == self.offered[0]:
            return config
        return self._formed(
            name, config, form, may_shard(self.layers[name], config, self.devices, unfed=name in self.unfed)
        )

    def of_layers(self, name: str, cells: tuple[Config, ...]) -> dict[Config, int]:
        """The different variants of a layer, each with the index of its cells."""
        if name in self.fixed:
            return {config: i for i, config in enumerate(cells)}
        layer, unfed = self.layers[name], name in self.unfed
        key = self.offered, layer.space, layer.role, layer.tied, layer.trains, unfed, name in self.recomputable, cells
        if key not in self._known:
            each = enumerate(zip(cells, may_shard_each(layer, cells, self.devices, unfed=unfed), strict=True))
            forms = self.offered
            self._known[key] = {self._formed(name, c, form, shares): i for i, (c, shares) in each for form in forms}
        return self._known[key]

    def _formed(self, name: str, config: Config, form: Form, shares: bool) -> Config:
        recompute, states = form
        return config.saving(
            recompute=recompute and name in self.recomputable, states=states if shares else "replicated"
        )


@dataclass(frozen=True)
class Variants:
    """The variants of every layer: its configurations in their forms."""

    configs: Configs  # V_l
    bases: Configs  # B_l: the variants without states, as neighbours see them
    base: Mapping[str, Ints]  # (V_l,) the index of each variant's base

    @staticmethod
    def of(cells: Configs, forms: Forms) -> Variants:
        """Every configuration in every form."""
        return Variants.grouped({name: tuple(forms.of_layers(name, these)) for name, these in cells.items()})

    @staticmethod
    def grouped(configs: Configs) -> Variants:
        """The variants of these configurations."""
        bases, base = dict[str, tuple[Config, ...]](), dict[str, Ints]()
        for name, these in configs.items():
            seen = [config.saving(recompute=config.recompute, states="replicated") for config in these]
            bases[name] = tuple(dict.fromkeys(seen))
            place = {config: i for i, config in enumerate(bases[name])}
            base[name] = np.array([place[config] for config in seen])
        return Variants(configs, bases, base)

    def recomputed(self, forms: Forms) -> Variants:
        """These variants, and each of them recomputed where its layer can be and that is offered."""
        if forms.saved.offered == forms.offered:
            return self
        may = forms.recomputable - forms.fixed
        both = {
            name: [*these, *(config.saving(recompute=True, states=config.states) for config in these if name in may)]
            for name, these in self.configs.items()
        }
        return Variants.grouped({name: tuple(dict.fromkeys(these)) for name, these in both.items()})

    def restrict(self, keep: Mapping[str, Mask]) -> Variants:
        """The kept variants."""
        configs = self.configs.items()
        return Variants.grouped({n: tuple(c for c, k in zip(these, keep[n], strict=True) if k) for n, these in configs})

    def choice(self, strategy: Strategy) -> Choice:
        """The indices of a strategy's configurations."""
        return {name: configs.index(strategy[name]) for name, configs in self.configs.items()}

    def choices(self, strategies: Iterable[Strategy]) -> list[Choice]:
        """The choices of those strategies whose configurations are all variants here."""
        here = (s for s in strategies if all(s[name] in place for name, place in self.places.items()))
        return [{name: place[s[name]] for name, place in self.places.items()} for s in here]

    @property
    def forms(self) -> Mapping[str, Floats]:
        """(V_l,) in how many ways each variant saves memory."""
        return {
            name: np.array([c.recompute + (c.states != "replicated") for c in these], np.float64)
            for name, these in self.configs.items()
        }

    @cached_property
    def places(self) -> Mapping[str, Mapping[Config, int]]:
        """The index of each variant, by layer."""
        return {name: {config: i for i, config in enumerate(configs)} for name, configs in self.configs.items()}

    def together(self, model: CostModel, choice: Choice, *, runs: bool = False) -> Iterator[Moved]:
        """Moves of equal layers that are split alike, with `runs` of consecutive ones, too, to what all have."""
        config = {layer.name: self.configs[layer.name][choice[layer.name]] for layer in model.graph.inner}
        lines = [list(run) for _, run in groupby(config, key=config.__getitem__)] if runs else []
        equal = dict[object, list[str]]()
        for name, now in config.items():
            equal.setdefault((model.kind(model.graph[name]), now), []).append(name)
        for names in [*lines, *equal.values()]:
            if len(names) > 1:
                places = [self.places[name] for name in names]
                common = [c for c in self.configs[names[0]] if all(c in place for place in places[1:])]
                yield {
                    name: np.array([place[c] for c in common], np.int64)
                    for name, place in zip(names, places, strict=True)
                }

    def strategy(self, choice: Choice) -> Strategy:
        """The configurations of these indices."""
        return {name: configs[choice[name]] for name, configs in self.configs.items()}
