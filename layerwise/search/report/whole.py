"""Layers that are not split because nothing is known of their operator: which, and what they take of a step."""

from __future__ import annotations

from collections.abc import Iterator

from layerwise.cost.model import CostModel
from layerwise.search.result import Candidate


def whole_shares(model: CostModel, candidate: Candidate) -> dict[str, float]:
    """Their names, and the share of the step time that each takes, with what travels to it."""
    price = candidate.price
    return {
        layer.name: price.layers[layer.name].total_s / price.step_time_s if price.step_time_s else 0.0
        for layer in model.graph.inner
        if layer.whole
    }


def whole_lines(model: CostModel, candidate: Candidate) -> Iterator[str]:
    """One sentence, where there are some."""
    shares = whole_shares(model, candidate)
    if shares and model.devices.count > 1:
        named = (f"{name} ({model.graph[name].stages[0].label}), {share:.0%}" for name, share in shares.items())
        yield f"Whole (not split), with their share of the step: {'; '.join(named)}."
