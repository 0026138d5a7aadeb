"""The forms of one layer of a plan: kept or recomputed, states replicated, sharded or gathered, all else as it is."""

from __future__ import annotations

from collections.abc import Mapping

from layerwise.config import Config
from layerwise.cost.model import CostModel
from layerwise.search.find import candidate
from layerwise.search.limit.variants import OFFERS, Forms
from layerwise.search.result import Candidate


def forms_of(
    model: CostModel, strategy: Mapping[str, Config], layer: str, memory_limit_bytes: float
) -> dict[Config, Candidate]:
    """The plan with each form that means anything for `layer`, the one that saves nothing first."""
    forms = Forms.of(model.graph, model.devices.count, OFFERS)
    configs = dict.fromkeys(forms.of_layer(layer, strategy[layer].cells, form) for form in forms.offered)
    return {c: candidate(model, form_name(c), {**strategy, layer: c}, memory_limit_bytes) for c in configs}


def form_name(config: Config) -> str:
    """`recomputed, sharded`."""
    return f"{'recomputed' if config.recompute else 'kept'}, {config.states}"
