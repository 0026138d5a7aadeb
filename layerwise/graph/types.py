"""Types: the element types of a layer's tensors where they are not what its operators say by themselves."""

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
    """A `torch.autocast` in the model's own code.

    A model that is traced on one device and run on another is taken to have asked its tensors for their device, as
    `torch.autocast(x.device.type)` does: its regions of the first (`TRACED`) hold wherever it runs.
    """

    device: str  # "cpu", "cuda"; TRACED
    dtype: str | None  # "bfloat16" or "float16"; None: autocast is turned off


Regions = tuple[Region, ...]  # around a layer, the outermost first


def effective(regions: Iterable[Region], traced: str) -> Regions:
    """Regions without those that one further inside undoes. traced: the device type that the model was traced on."""
    kept: list[Region] = []
    for region in regions:
        name = TRACED if region.device == traced else region.device
        kept = [one for one in kept if one.device != name and name != TRACED]
        kept.append(Region(name, region.dtype))
    return tuple(kept)


def autocast_within(regions: Regions, device: str, around: str | None) -> str | None:
    """The type that autocast casts to on a device; None where it is off. around: what it is around the model's call."""
    inner = (region.dtype for region in reversed(regions) if region.device in (TRACED, device))
    return next(inner, around)


@dataclass(frozen=True, slots=True)
class Types:
    """Element types of a layer's stages, in order."""

    made: tuple[str, ...]  # what each makes
    plain: tuple[str, ...]  # what it makes where autocast is off everywhere
    parameters: tuple[str, ...]  # of its parameters; where it has none, as `plain`


def stacked(types: Sequence[Types]) -> Types:
    """The types of layers that become the stages of one."""
    made, plain, parameters = (tuple(name for one in types for name in getattr(one, part)) for part in Types.__slots__)
    return Types(made, plain, parameters)


@lru_cache(maxsize=65536)
def typed(op: Op, specs: tuple[TensorSpec, ...], made: tuple[str, ...]) -> tuple[Space, tuple[Stage, ...]]:
    """`op` on `specs` as a space and as stages, each of which makes the type in `made`. Cached, as `space` is."""
    stages: list[Stage] = []
    for stage, dtype in zip(op.stages(specs), made, strict=True):
        read = list(stage.specs)
        if stage.slot is not None:
            read[stage.slot] = stages[-1].space.out
        where = replace(stage.space, out=replace(stage.space.out, dtype=dtype))
        stages.append(replace(stage, specs=tuple(read), space=where))
    whole = space(op, specs)
    return replace(whole, out=replace(whole.out, dtype=made[-1])), tuple(stages)
