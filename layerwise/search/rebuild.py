"""Rebuilds the search that found a plan, from the plan alone: its cost model, and the search for other devices."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel, CostOptions
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.load import load_model, planned_call
from layerwise.machine import DTYPES
from layerwise.machine.devices import DeviceGraph
from layerwise.machine.profiles import planned
from layerwise.plan import Plan
from layerwise.quantities import units
from layerwise.search.baselines import fixed_layers
from layerwise.search.find import search
from layerwise.search.make_plan import make_plan
from layerwise.search.priced.variants import OFFERS


def rebuild(plan: Plan, model: str | None = None, profile: str | None = None) -> tuple[CostModel, SearchSpace]:
    """The cost model and the space of a plan's search; `model`, `profile`: see `planned_call`, `planned`."""
    raw, devices, options, space = _searched(plan, model, profile)
    graph = plan.layers(raw)
    plan.check(graph)
    return CostModel(graph, devices, options, plan.shares), space


def replan(plan: Plan, gpus: int, gpus_per_node: int, *, model: str | None = None, profile: str | None = None) -> Plan:
    """Returns the best plan of the same network, batch and options for another number of devices.

    Args:
        plan: The plan whose search is repeated, on its machine with another number of devices.
        gpus: The number of devices.
        gpus_per_node: Devices in a node.
        model: The plan's model, if that is `package.module:callable`.
        profile: The plan's profile, if that is a file.

    Returns:
        The plan, with the same global batch, so that training can continue with the same samples.

    Raises:
        LayerwiseError: The plan lacks its search's options, is of another model, or nothing fits into memory.

    Examples:
        replan(load_plan("plan.json"), gpus=3, gpus_per_node=3)
    """
    raw, devices, options, space = _searched(replace(plan, gpus=gpus, gpus_per_node=gpus_per_node), model, profile)
    plan.check(plan.layers(raw))
    if options.io == "sample" and plan.batch < gpus:
        options = replace(options, io="auto")
    cost = CostModel(fuse(raw) if plan.fused else raw, devices, options)
    limit, offer = memory_limit(plan, cost), offered(plan)
    result = search(cost, space, memory_limit_bytes=limit, offer=offer)
    if not result.best.fits:
        raise LayerwiseError(
            f"no plan for {plan.model} fits into {units(limit, 'B')} on each of {gpus} devices: start more devices, or "
            "search with a smaller batch"
        )
    shape, name = plan.provenance["input_shape"], cast(str, plan.provenance["profile"])
    return make_plan(plan.model, name, cost, space, result, fused=plan.fused, input_shape=shape)  # type: ignore[arg-type]


def _searched(
    plan: Plan, model: str | None, profile: str | None
) -> tuple[LayerGraph, DeviceGraph, CostOptions, SearchSpace]:
    """The imported network, and the devices, options and space of the plan's search."""
    p = plan.provenance
    try:
        devices = planned(cast(str, p["profile"]), profile).device_graph(plan.gpus, plan.gpus_per_node)
        try:
            options = CostOptions(**cast(dict[str, str], p["cost_options"]))  # type: ignore[arg-type]
        except LayerwiseError as error:
            raise LayerwiseError(f"the plan's provenance: {error}") from None
        dims = tuple(cast(list[str], p["dims"]))
        replicas = cast(int, p.get("replicas", 1))
        space = SearchSpace(plan.gpus, dims, bool(p["powers_of_two"]), devices.nodes > 1, replicas)
    except (KeyError, TypeError) as error:
        raise LayerwiseError(f"the plan's provenance lacks its search's options ({error}): search again") from None
    if options.dtype not in DTYPES:
        raise LayerwiseError(f"the plan's provenance has the dtype {options.dtype!r}: must be of {', '.join(DTYPES)}")
    if p.get("constraints"):
        raise LayerwiseError("the plan was searched with constraints, which were removed: search again with --fix")
    raw = load_model(*planned_call(plan.model, model, plan.batch, p))
    wanted = p.get("fixed", {})
    if not isinstance(wanted, dict):
        raise LayerwiseError(f"the plan's provenance has the fixed layers {wanted!r}: search again")
    fixed = fixed_layers(plan.layers(raw), plan.gpus, wanted)
    return raw, devices, options, replace(space, fixed=tuple(fixed.items()))


def offered(plan: Plan) -> tuple[str, ...]:
    """The ways in OFFERS in which a plan's search could save memory."""
    offer = plan.provenance.get("offer", [])
    if not isinstance(offer, list) or any(word not in OFFERS for word in offer):
        raise LayerwiseError(
            f"the plan's provenance offers {offer!r}, but only {', '.join(OFFERS)} exist: search again"
        )
    return tuple(offer)


def memory_limit(plan: Plan, model: CostModel) -> float:
    """The bytes of a device that a plan was searched with; for other strategies, what may be used."""
    limit = plan.provenance.get("memory_limit_bytes", model.devices.usable_bytes)
    if not isinstance(limit, int | float) or isinstance(limit, bool):
        raise LayerwiseError(f"the plan's provenance has the memory limit {limit!r}: search again")
    return limit
