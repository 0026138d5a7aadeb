"""RuntimeOptions: how a plan is run, beside what the plan itself says."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from layerwise.errors import LayerwiseError
from layerwise.graph.layer_graph import LayerGraph
from layerwise.graph.mixed import mixed
from layerwise.graph.types import Regions, autocast_within
from layerwise.ops.base import Role
from layerwise.plan import Plan
from layerwise.tensorfile import dtype_name


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """The options of a run: the same on every rank, except for the device's number."""

    device: torch.device  # of this rank
    dtype: torch.dtype = torch.float32  # of parameters and, without autocast, of activations
    autocast: torch.dtype | None = None  # mixed precision: the 16-bit type
    seed: int = 0  # of random initial values and of dropout
    local_batch_norm: bool = False  # statistics of each rank's own samples, like DistributedDataParallel
    recompute: bool = False  # activation checkpointing: beside the plan's, all layers that save memory by it
    compile: Mapping[str, Any] | None = None  # torch.compile's arguments, for what a rank computes by itself
    compare_ranks: bool = True  # whether to notice ranks whose parameters drift apart
    compare_model: bool = False  # whether to run the model beside its layers in some steps

    def element_type(self, dtype: str, graph: LayerGraph) -> torch.dtype:
        """Returns the run's torch type for an element type of `graph`; types other than the model's main one stay."""
        other: torch.dtype = getattr(torch, dtype)
        return self.dtype if dtype == graph.dtype else other

    def here(self) -> RuntimeOptions:
        """Returns the options with the type of the surrounding torch.autocast, if there is one."""
        kind = self.device.type
        ambient = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.autocast
        return self if ambient == self.autocast else replace(self, autocast=ambient)

    def typed(self, graph: LayerGraph) -> LayerGraph:
        """Returns `graph` with the element types of this run: `dtype` in place of the model's own."""
        autocast = None if self.autocast is None else dtype_name(self.autocast)
        return mixed(graph, autocast, self.device.type, dtype_name(self.dtype))

    def autocast_within(self, regions: Regions) -> torch.dtype | None:
        """Returns the type that autocast casts to in the model's own autocast regions; None if it is off."""
        around = None if self.autocast is None else dtype_name(self.autocast)
        here = autocast_within(regions, self.device.type, around)
        return None if here is None else getattr(torch, here)


def check_types(graph: LayerGraph, dtype: torch.dtype) -> None:
    """Raises LayerwiseError if a model of several element types is to run in a type other than its own."""
    if dtype_name(dtype) == graph.dtype:
        return
    for layer in graph.layers:
        for stage in layer.stages:
            out = stage.space.out
            if out.differentiable and out.dtype != graph.dtype and layer.op.role is not Role.SINK:
                raise LayerwiseError(
                    f"layer {layer.name!r} computes in {out.dtype} but the model in {graph.dtype}, so it cannot run in "
                    f"{dtype_name(dtype)}: load it with dtype=torch.{graph.dtype}, or convert all of the model to one "
                    "type"
                )


def searched_with(plan: Plan, option: str) -> object:
    """Returns one of the cost model's options that the plan was searched with; None if the plan does not say."""
    options = plan.provenance.get("cost_options")
    return options.get(option) if isinstance(options, dict) else None


def uses_local_batch_norm(plan: Plan, wanted: bool | None = None) -> bool:
    """True if batch norms use each rank's own samples: as `wanted`, or (None) as the plan was searched."""
    return bool(searched_with(plan, "local_batch_norm")) if wanted is None else wanted


def planned_types(plan: Plan, graph: LayerGraph) -> LayerGraph:
    """Returns `graph` with the element types that the plan's predictions assume."""
    types = plan.provenance.get("mixed_precision")
    return mixed(graph, types["autocast"], str(types["device"])) if isinstance(types, dict) else graph


def plan_digest(plan: Plan) -> str:
    """Returns 12 hex digits of the plan's SHA-256, by which ranks check that they have the same plan."""
    return hashlib.sha256(plan.dumps().encode()).hexdigest()[:12]
