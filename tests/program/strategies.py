"""Random complete strategies, with states and recomputation."""

from dataclasses import replace

from hypothesis import strategies as st

from layerwise.config import Config
from layerwise.cost.model import CostModel
from layerwise.partition.sharding import may_shard
from tests.cost.test_price import random_strategy


def any_strategy(model: CostModel, data: st.DataObject) -> dict[str, Config]:
    """Any legal configuration of every layer, states and recomputation included."""
    chosen = random_strategy(model, data)
    for name, config in chosen.items():
        layer = model.graph[name]
        if not layer.end and may_shard(layer, config, model.devices.count):
            states = data.draw(st.sampled_from(["replicated", "sharded", "gathered"]))
            chosen[name] = replace(chosen[name], states=states)
        if model.graph.differentiates(layer):
            chosen[name] = replace(chosen[name], recompute=data.draw(st.booleans()))
    return chosen
