"""Types: the element types of a layer's tensors, if they differ from those that its operators determine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from layerwise.ops.base import Op, Stage, space
from layerwise.ops.facts import Space
from layerwise.tensor import TensorSpec

TRACED = ""  # the device type that the model was traced on


class Region(NamedTuple):
    """A `torch.autocast` region in the model's own code.

    A model that is traced on one device and runs on another is assumed to use its tensors' device, as
    `torch.autocast(x.device.type)` does: its regions for the first device (`TRACED`) hold wherever it runs.
    """

    device: str  # "cpu", "cuda"; TRACED
    dtype: str | None  # "bfloat16" or "float16"; None: autocast is turned off


Regions = tuple[Region, ...]  # around a layer, outermost first


def effective(regions: Iterable[Region], traced: str) -> Regions:
    """The regions without those that an inner one overrides. traced: the device type that the model was traced on."""
    kept: list[Region] = []
    for region in regions:
        name = TRACED if region.device == traced else region.device
        kept = [one for one in kept if one.device != name and name != TRACED]
        kept.append(Region(name, region.dtype))
    return tuple(kept)


def autocast_within(regions: Regions, device: str, around: str | None) -> str | None:
    """The type that autocast casts to on a device; None if it is off. around: the same for the model's call."""
    inner = (region.dtype for region in reversed(regions) if region.device in (TRACED, device))
    return next(inner, around)


@dataclass(frozen=True, slots=True)
class Types:
    """Element types of a layer's stages, in order."""

    made: tuple[str, ...]  # of each stage's result
    plain: tuple[str, ...]  # of each stage's result if autocast is off everywhere
    parameters: tuple[str, ...]  # of its parameters; like `plain` if it has none


def stacked(types: Sequence[Types]) -> Types:
    """The types of layers that become stages of one layer."""
    made, plain, parameters = (tuple(name for one in types for name in getattr(one, part)) for part in Types.__slots__)
    return Types(made, plain, parameters)


@lru_cache(maxsize=65536)
def typed(op: Op, specs: tuple[TensorSpec, ...], made: tuple[str, ...]) -> tuple[Space, tuple[Stage, ...]]:
    """`op` on `specs` as a space and as stages with results of the types `made`. Cached like `space`."""
    stages: list[Stage] = []
    for stage, dtype in zip(op.stages(specs), made, strict=True):
        read = list(stage.specs)
        if stage.slot is not None:
            read[stage.slot] = stages[-1].space.out
        where = replace(stage.space, out=replace(stage.space.out, dtype=dtype))
        stages.append(replace(stage, specs=tuple(read), space=where))
    whole = space(op, specs)
    return replace(whole, out=replace(whole.out, dtype=made[-1])), tuple(stages)
