"""A strategy's answer as a plan that `layerwise.run` executes."""

from __future__ import annotations

import platform
from dataclasses import asdict
from importlib.metadata import version

from layerwise import __version__
from layerwise.cost.basis import basis
from layerwise.cost.tables import CostModel
from layerwise.errors import LayerwiseError
from layerwise.oracle.question import Answer
from layerwise.plan import Plan
from layerwise.search.predicted import layer_times


def plan_of(
    name: str, profile: str, model: CostModel, answer: Answer, *, input_shape: tuple[int, ...] | None = None
) -> Plan:
    """`name`, `profile` and `input_shape` as on the command line. LayerwiseError for a pipeline, which is no plan."""
    if answer.priced is None:
        raise LayerwiseError(
            f"{answer.projection.strategy} is not a configuration for every layer, so it cannot be written as a plan"
        )
    cost = answer.priced.price
    strategy = dict(answer.priced.strategy)
    dims = sorted({label for config in strategy.values() for label, _ in config.degrees})
    return Plan(
        model=name,
        digest=model.graph.digest,
        batch=model.graph.batch,
        gpus=model.devices.count,
        gpus_per_node=model.devices.devices_per_node,
        io=model.options.io,
        fused=True,
        strategy=strategy,
        predicted={
            "step_time_s": cost.step_time_s,
            "timeline_s": answer.overlapped_s,
            "transfer_bytes": cost.transfer_bytes,
            "sync_bytes": cost.sync_bytes,
            "statistics_bytes": cost.statistics_bytes,
            "memory_bytes": cost.memory_bytes,
        },
        provenance={
            "chosen": answer.projection.strategy,
            "fits": answer.fits,
            "profile": profile,
            "compute_time": basis(model, cost).as_dict(),
            "cost_options": asdict(model.options),
            "dims": dims,
            "powers_of_two": False,
            "input_shape": None if input_shape is None else list(input_shape),
            "layerwise": __version__,
            "torch": version("torch"),
            "python": platform.python_version(),
        },
        predicted_layers=layer_times(model, strategy),
    )
