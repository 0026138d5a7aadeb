"""A strategy's answer as a plan that `layerwise.run` executes."""

from __future__ import annotations

from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel
from layerwise.errors import LayerwiseError
from layerwise.oracle.question import Answer
from layerwise.plan import Plan
from layerwise.search.find import candidate
from layerwise.search.make_plan import plan_for


def plan_of(
    name: str, profile: str, model: CostModel, answer: Answer, *, input_shape: tuple[int, ...] | None = None
) -> Plan:
    """`name`, `profile` and `input_shape` as on the command line. LayerwiseError for a pipeline, which is no plan."""
    strategy = answer.projection.strategy
    if answer.strategy is None:
        raise LayerwiseError(f"{strategy} is not a configuration for every layer, so it cannot be written as a plan")
    dims = sorted({label for config in answer.strategy.values() for label, _ in config.degrees})
    space = SearchSpace(model.devices.count, tuple(dims))
    best = candidate(model, strategy, answer.strategy)
    return plan_for(name, profile, model, space, best, fused=True, input_shape=input_shape)
