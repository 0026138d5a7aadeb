"""torch.compile of what a rank computes by itself; what communicates stays as it is, between the compiled parts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.ops.random import chance

Settings = Mapping[str, Any]  # keyword arguments of torch.compile
# Recompilations of one function that PyTorch allows, for each of the parts that communication cuts a model into: blocks
# of one class share their code.
_LIMIT = 8


@torch.library.custom_op(
    "layerwise::chance",
    mutates_args=(),
    schema="(float p, Tensor seed, SymInt[] lo, SymInt[] hi, SymInt[] shape) -> Tensor",
)
def _chance(p: float, seed: Tensor, lo: Sequence[int], hi: Sequence[int], shape: Sequence[int]) -> Tensor:
    """`ops.random.chance` as one operator, which no compiler looks into. seed: of no dimensions.

    Inductor takes the product of a position and a constant for an index, which it calculates without the overflow that
    random numbers are made of: its draws were others.
    """
    return chance(p, seed, Box(tuple(lo), tuple(hi)), shape, seed.device)


@_chance.register_fake
def _(p: float, seed: Tensor, lo: Sequence[int], hi: Sequence[int], shape: Sequence[int]) -> Tensor:
    return seed.new_empty([b - a for a, b in zip(lo, hi, strict=True)], dtype=torch.bool)


def settings_of(compile: bool | Settings) -> Settings | None:
    """Returns torch.compile's arguments of `compile=`: None for False. LayerwiseError for what it does not take."""
    if isinstance(compile, bool):
        return {} if compile else None
    if not isinstance(compile, Mapping):
        raise LayerwiseError(
            f"compile is {compile!r}; it must be True, False, or a dict of torch.compile's keyword arguments, such as "
            "{'mode': 'max-autotune'}"
        )
    accepted = [name for name in inspect.signature(torch.compile).parameters if name != "model"]
    unknown = next((name for name in compile if name not in accepted), None)
    if unknown is not None:
        raise LayerwiseError(f"torch.compile has no argument {unknown!r}, but {', '.join(accepted)}")
    return dict(compile)


def compile_with(function: Callable[..., Any], settings: Settings) -> Callable[..., Any]:
    """Returns torch.compile of a function or a module. LayerwiseError where PyTorch refuses the settings."""
    try:
        result: Callable[..., Any] = torch.compile(function, **settings)
    except (RuntimeError, TypeError, ValueError) as error:  # the first also of an unknown mode or option
        raise LayerwiseError(f"torch.compile refuses compile={dict(settings)}: {error}") from error
    return result


def limits(parts: int) -> AbstractContextManager[object]:
    """Returns a context in which functions may be compiled as often as a model cut into so many parts needs."""
    from torch._dynamo import config

    most = _LIMIT * (1 + parts)
    patch: AbstractContextManager[object] = config.patch(
        recompile_limit=max(config.recompile_limit, most),
        accumulated_recompile_limit=max(config.accumulated_recompile_limit, 2 * most),
    )
    return patch
