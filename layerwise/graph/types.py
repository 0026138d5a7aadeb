"""Types: the element types of a layer's tensors where they are not what its operators say by themselves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from layerwise.ops.base import Op, Space, Stage, space
from layerwise.tensor import TensorSpec


@dataclass(frozen=True, slots=True)
class Types:
    """Of a layer's stages, in order."""

    made: tuple[str, ...]  # what each makes under autocast
    plain: tuple[str, ...]  # what it makes without, which is also the type of its parameters


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
