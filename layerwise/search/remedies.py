"""Remedies: changes that make a plan fit if none does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel
from layerwise.errors import LayerwiseError
from layerwise.machine import DeviceGraph
from layerwise.search.baselines import baselines, configurations
from layerwise.search.priced.answers import Least
from layerwise.search.priced.limited import LimitedSearch


@dataclass(frozen=True, slots=True)
class Remedy:
    """A remedy that was tried, as a phrase, with the least memory of a plan found for it, and whether that fits."""

    what: str
    bytes: float
    fits: bool


def remedies(
    model: CostModel,
    space: SearchSpace,
    limit_bytes: float,
    *,
    offer: Iterable[str],
    more_devices: DeviceGraph | None = None,
) -> list[Remedy]:
    """Remedies with their least memory, cheapest first, up to the first that makes a plan fit.

    Inputs as boxes, sharded states, recomputation, twice the devices, half the batch. Degrees are powers of two, as the
    question is only whether something fits.

    more_devices: twice as many as now, if known.
    """
    tried: list[Remedy] = []
    space = replace(space, powers_of_two=True, spread=False)
    for what, other, searched, choices in _others(model, space, tuple(offer), more_devices):
        try:
            least = least_plan(other, searched, choices, limit_bytes).bytes
        except LayerwiseError:  # such as fewer samples than a layer can have
            continue
        tried.append(Remedy(what, least, least <= limit_bytes))
        if tried[-1].fits:
            break
    return tried


def _others(
    model: CostModel, space: SearchSpace, offered: tuple[str, ...], more_devices: DeviceGraph | None
) -> Iterator[tuple[str, CostModel, SearchSpace, tuple[str, ...]]]:
    if model.asked.io == "free":
        yield "--io boxes", CostModel(model.original, model.devices, replace(model.asked, io="boxes")), space, offered
    if "shard" not in offered:
        offered = (*offered, "shard")
        yield f"--offer {','.join(offered)}", model, space, offered
    if "recompute" not in offered:
        offered = ("recompute", *offered)
        yield f"--offer {','.join(offered)}", model, space, offered
    if more_devices is not None:
        bigger = CostModel(model.original, more_devices, model.asked)
        yield f"{more_devices.count} GPUs", bigger, replace(space, devices=more_devices.count), offered
    batch = model.graph.batch // 2
    if batch:
        smaller = CostModel(model.original.rebatch(batch), model.devices, model.asked)
        yield f"a global batch of {batch}", smaller, space, offered


def least_plan(model: CostModel, space: SearchSpace, offer: tuple[str, ...], wanted: float = 0.0) -> Least:
    """Returns the plan found with the least memory; wanted: see `LimitedSearch.least`."""
    named = baselines(model, space)
    search = LimitedSearch(model, configurations(model, space, named), offer=offer)
    return search.least(list(named.values()), wanted)
