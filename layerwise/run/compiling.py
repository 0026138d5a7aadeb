"""torch.compile of what a rank computes by itself; communication stays outside, between the compiled parts."""

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
# PyTorch's limit of recompilations for one function, here for each part that communication cuts a model into: blocks of
# one class share their code.
_LIMIT = 8


@torch.library.custom_op(
    "layerwise::chance",
    mutates_args=(),
    schema="(float p, Tensor seed, SymInt[] lo, SymInt[] hi, SymInt[] shape) -> Tensor",
)
def _chance(p: float, seed: Tensor, lo: Sequence[int], hi: Sequence[int], shape: Sequence[int]) -> Tensor:
    """`ops.random.chance` as one operator that compilers do not look into. seed: a scalar.

    Inductor would take the product of a position and a constant for an index and compute it without the overflow that
    the random numbers rely on, so its draws would differ.
    """
    return chance(p, seed, Box(tuple(lo), tuple(hi)), shape, seed.device)


@_chance.register_fake
def _(p: float, seed: Tensor, lo: Sequence[int], hi: Sequence[int], shape: Sequence[int]) -> Tensor:
    return seed.new_empty([b - a for a, b in zip(lo, hi, strict=True)], dtype=torch.bool)


def settings_of(compile: bool | Settings) -> Settings | None:
    """Returns torch.compile's arguments for `compile=`; None for False. Raises LayerwiseError for any other value."""
    if isinstance(compile, bool):
        return {} if compile else None
    if not isinstance(compile, Mapping):
        raise LayerwiseError(
            f"compile is {compile!r}; it must be True, False, or a dict of torch.compile's keyword arguments, such as "
            f"{{'mode': 'max-autotune'}}"
        )
    accepted = [name for name in inspect.signature(torch.compile).parameters if name != "model"]
    unknown = next((name for name in compile if name not in accepted), None)
    if unknown is not None:
        raise LayerwiseError(f"torch.compile has no argument {unknown!r}; it takes {', '.join(accepted)}")
    return dict(compile)


def compile_with(function: Callable[..., Any], settings: Settings) -> Callable[..., Any]:
    """Returns torch.compile of a function or module. Raises LayerwiseError if PyTorch refuses the settings."""
    try:
        result: Callable[..., Any] = torch.compile(function, **settings)
    except (RuntimeError, TypeError, ValueError) as error:  # RuntimeError is also what an unknown mode or option raises
        raise LayerwiseError(f"torch.compile does not accept compile={dict(settings)}: {error}") from error
    return result


def limits(parts: int) -> AbstractContextManager[object]:
    """Returns a context in which functions may be compiled as often as a model cut into `parts` needs."""
    from torch._dynamo import config

    most = _LIMIT * (1 + parts)
    patch: AbstractContextManager[object] = config.patch(
        recompile_limit=max(config.recompile_limit, most),
        accumulated_recompile_limit=max(config.accumulated_recompile_limit, 2 * most),
    )
    return patch
