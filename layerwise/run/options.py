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
    """The options of a run, the same on every rank but for the number of the device."""

    device: torch.device  # where this rank computes
    dtype: torch.dtype = torch.float32  # of parameters, and without autocast of activations
    autocast: torch.dtype | None = None  # mixed precision: the 16-bit type
    seed: int = 0  # of initial values that are drawn, and of dropout
    local_batch_norm: bool = False  # statistics of each rank's own samples, as DistributedDataParallel has them
    recompute: bool = False  # activation checkpointing: all layers that hold less so, beside those of the plan
    compile: Mapping[str, Any] | None = None  # torch.compile's arguments, for what a rank computes by itself
    compare_ranks: bool = True  # whether ranks whose parameters drift apart are noticed
    compare_model: bool = False  # whether the model is run beside its layers in some steps

    def element_type(self, dtype: str, graph: LayerGraph) -> torch.dtype:
        """Returns what an element type of `graph` is in this run; types other than the model's own stay as they are."""
        other: torch.dtype = getattr(torch, dtype)
        return self.dtype if dtype == graph.dtype else other

    def here(self) -> RuntimeOptions:
        """Returns them with the type of the torch.autocast around the caller, if there is one."""
        kind = self.device.type
        ambient = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.autocast
        return self if ambient == self.autocast else replace(self, autocast=ambient)

    def typed(self, graph: LayerGraph) -> LayerGraph:
        """Returns `graph` with the element types that its tensors have in this run, its own type for `dtype`."""
        autocast = None if self.autocast is None else dtype_name(self.autocast)
        return mixed(graph, autocast, self.device.type, dtype_name(self.dtype))

    def autocast_within(self, regions: Regions) -> torch.dtype | None:
        """Returns the type that autocast casts to in some of the model's own regions; None where it is off."""
        around = None if self.autocast is None else dtype_name(self.autocast)
        here = autocast_within(regions, self.device.type, around)
        return None if here is None else getattr(torch, here)


def check_types(graph: LayerGraph, dtype: torch.dtype) -> None:
    """LayerwiseError where a model of several element types is to be run in another one than its own."""
    if dtype_name(dtype) == graph.dtype:
        return
    for layer in graph.layers:
        for stage in layer.stages:
            out = stage.space.out
            if out.differentiable and out.dtype != graph.dtype and layer.op.role is not Role.SINK:
                raise LayerwiseError(
                    f"layer {layer.name!r} computes in {out.dtype} and the model in {graph.dtype}, so it cannot be run "
                    f"in {dtype_name(dtype)}: load it with dtype=torch.{graph.dtype}, or bring all of it to one type"
                )


def searched_with(plan: Plan, option: str) -> object:
    """Returns one of the cost model's options that the plan was searched with; None where it does not say."""
    options = plan.provenance.get("cost_options")
    return options.get(option) if isinstance(options, dict) else None


def uses_local_batch_norm(plan: Plan, wanted: bool | None = None) -> bool:
    """True if batch norms take each rank's own samples: as `wanted`, or as the plan was searched (None)."""
    return bool(searched_with(plan, "local_batch_norm")) if wanted is None else wanted


def planned_types(plan: Plan, graph: LayerGraph) -> LayerGraph:
    """Returns `graph` with the element types that the plan's predictions are of."""
    types = plan.provenance.get("mixed_precision")
    return mixed(graph, types["autocast"], str(types["device"])) if isinstance(types, dict) else graph


def plan_digest(plan: Plan) -> str:
    """Returns 12 hex digits of the plan's SHA-256, by which ranks that meet tell plans apart."""
    return hashlib.sha256(plan.dumps().encode()).hexdigest()[:12]
