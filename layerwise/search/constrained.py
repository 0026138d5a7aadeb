"""The search under the user's constraints, exact under them, and what they cost.

What is said of one layer restricts its configurations (`find.configurations`). That several layers have the same one is
searched for with each configuration that they have in common, unless the best without it has it already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from itertools import product
from math import prod
from typing import Any, TypeVar, cast

from layerwise.config import Config, SearchSpace
from layerwise.constraints import Constraint, check_names
from layerwise.cost.model import CostModel
from layerwise.errors import LayerwiseError
from layerwise.graph.layer import Layer
from layerwise.partition.sharding import held_configurations
from layerwise.search.result import SearchResult, preferred

MOST = 256  # searches for layers that have the same configuration
Find = Callable[[SearchSpace], SearchResult]
Search = TypeVar("Search", bound=Callable[..., SearchResult])


def heeding_constraints(search: Search) -> Search:
    """A search that heeds what constraints say of several layers, of one that heeds what they say of each by itself.

    Under constraints its result has the best plan without them beside it.
    """

    @wraps(search)
    def heeding(model: CostModel, space: SearchSpace, **options: Any) -> SearchResult:
        if not space.constraints:
            return search(model, space, **options)
        check_names(space.constraints, [layer.name for layer in model.graph.inner])
        find = partial(search, model, **options)
        free = find(replace(space, constraints=()))
        return replace(_tied(model, space, find), unconstrained=free.best)

    return cast("Search", heeding)


def _tied(model: CostModel, space: SearchSpace, find: Find) -> SearchResult:
    ties = [c for c in space.constraints if c.same]
    alone = tuple(c for c in space.constraints if not c.same)
    result = find(replace(space, constraints=alone))
    if not ties or all(_is_met(tie, result.best.strategy) for tie in ties):
        return result
    choices = [_common(model, space, tie) for tie in ties]
    count = prod(map(len, choices))
    if count > MOST:
        raise LayerwiseError(
            f"{' and '.join(repr(tie.text) for tie in ties)} leave {count:,} choices, each a search, of which at most "
            f"{MOST} are made: rule some out with keep or at-most, or search powers of two"
        )
    results = [find(replace(space, constraints=(*alone, *exact))) for exact in product(*choices)]
    best = preferred(r.best for r in results)
    chosen = next(r for r in results if r.best is best)
    cheapest = min(results, key=lambda r: r.optimum.cost_s)
    bounds = [r.overlap_bound_s for r in results]
    return replace(
        chosen,
        additive=cheapest.additive,
        optimum=replace(cheapest.optimum, lower_bound_s=min(r.optimum.lower_bound_s for r in results)),
        overlap_bound_s=None if None in bounds else min(b for b in bounds if b is not None),
    )


def _is_met(tie: Constraint, strategy: Mapping[str, Config]) -> bool:
    return len({config.cells for name, config in strategy.items() if tie.names(name)}) == 1


def _common(model: CostModel, space: SearchSpace, tie: Constraint) -> list[Constraint]:
    """A constraint for each configuration that all layers of a tie can have."""
    layers = [layer for layer in model.graph.inner if tie.names(layer.name)]
    first, *others = (allowed(layer, space, held_configurations(layer, space)) for layer in layers)
    common = [config for config in first if all(config in configs for configs in others)]
    if not common:
        raise LayerwiseError(f"{tie.text!r} cannot be met: {', '.join(l.name for l in layers)} share no configuration")
    return [replace(tie, exactly=config) for config in common]


def allowed(layer: Layer, space: SearchSpace, configs: Sequence[Config]) -> tuple[Config, ...]:
    """Of a layer's configurations those that the constraints allow. LayerwiseError where there is none."""
    about = [c for c in space.constraints if c.names(layer.name)]
    left = tuple(config for config in configs if all(c.allows(config) for c in about))
    if not left:
        texts = " and ".join(repr(c.text) for c in about)
        why = f", which {space.replicas} replicas need more devices for" if space.replicas > 1 else ""
        raise LayerwiseError(f"layer {layer.name!r} has no configuration that meets {texts}{why}")
    return left


def nearest_allowed(layer: Layer, space: SearchSpace, config: Config) -> Config:
    """The configuration, or that of most devices among those allowed which split no dimension more than it does."""
    if all(c.allows(config) for c in space.constraints if c.names(layer.name)):
        return config
    configs = allowed(layer, space, held_configurations(layer, space))
    return max(configs, key=lambda other: (all(config[d] >= n for d, n in other.degrees), other.total))
