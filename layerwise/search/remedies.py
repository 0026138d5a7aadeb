"""Remedies: what would make a plan fit where none does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel
from layerwise.errors import LayerwiseError
from layerwise.machine import DeviceGraph
from layerwise.search.baselines import baselines
from layerwise.search.find import configurations
from layerwise.search.limit.limited import Least
from layerwise.search.limit.variants import OFFERS, Strategy
from layerwise.search.limit.within import LimitedSearch


@dataclass(frozen=True, slots=True)
class Remedy:
    """A remedy that was tried, as a phrase, and the least memory of a plan found then; whether that fits."""

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
    with_k: str = "k in --dims",
) -> list[Remedy]:
    """Remedies, each with its least memory: more choices, k, twice the devices, half the batch.

    more_devices: twice as many as now, where they are known. with_k: what is said of letting contractions be split.
    """
    offered = tuple(offer)
    tried: list[Remedy] = []
    for what, other, searched, choices in _others(model, space, offered, more_devices, with_k):
        try:
            least = least_plan(other, searched, choices).bytes
        except LayerwiseError:  # such as fewer samples than a layer can have
            continue
        tried.append(Remedy(what, least, least <= limit_bytes))
    return tried


def _others(
    model: CostModel, space: SearchSpace, offered: tuple[str, ...], more_devices: DeviceGraph | None, with_k: str
) -> Iterator[tuple[str, CostModel, SearchSpace, tuple[str, ...]]]:
    left_out = [choice for choice in OFFERS if choice not in offered]
    if left_out:
        yield f"--offer {','.join(OFFERS)}", model, space, OFFERS
    if "k" not in space.dims:
        yield with_k, model, replace(space, dims=(*space.dims, "k")), offered
    if more_devices is not None:
        bigger = CostModel(model.original, more_devices, model.options)
        yield f"{more_devices.count} GPUs", bigger, replace(space, devices=more_devices.count), offered
    batch = model.graph.batch // 2
    if batch:
        io = model.options.io
        options = replace(model.options, io=io if io != "sample" or batch >= model.devices.count else "free")
        smaller = CostModel(model.original.rebatch(batch), model.devices, options)
        yield f"a global batch of {batch}", smaller, space, offered


def least_plan(model: CostModel, space: SearchSpace, offer: tuple[str, ...]) -> Least[Strategy]:
    """Returns the plan that was found to need the least memory."""
    named = baselines(model, space)
    search = LimitedSearch(model, configurations(model, space, named), offer=offer)
    return search.least(list(named.values()))
