"""Fixed numbers in place of random ones, so that nothing is dropped.

And drawn ones, the same on every rank, in place of values that are not there: of a module without memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from layerwise.errors import LayerwiseError

DRAWN = 0.75  # of [0, 1): so that stochastic depth, floor(keep + it), keeps all


class UnprovenError(LayerwiseError):
    """The layers cannot be run beside the module, or not in the time and memory that importing may take."""


def undrawing() -> AbstractContextManager[object]:
    return _Undrawn()  # type: ignore[no-untyped-call]


class _Undrawn(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it fixed numbers are drawn: of a chance always 1, so that nothing is dropped."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        given = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
        given |= {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
        name = func._schema.name.partition("::")[2].removesuffix("_")
        if name == "native_dropout":
            x, p = given["input"], given["p"] if given.get("train") is not False else 0.0
            return x / (1 - p), torch.ones_like(x, dtype=torch.bool)
        drops = given.get("dropout_p", given.get("dropout"))
        if drops is not None and not drops:
            return func(*args, **kwargs)
        if name == "bernoulli":
            chances = given.get("p", given["self"])
            drawn = chances > DRAWN if isinstance(chances, Tensor) else torch.ones_like(given["self"])
            numbers = drawn.to(given["self"].dtype)
        else:
            number = _number(name, given)
            out = given["self"] if isinstance(given.get("self"), Tensor) else None
            with torch.no_grad():
                numbers = torch.full_like(func(*args, **kwargs) if out is None or "like" in name else out, number)
        written = given.get("self") if func._schema.is_mutable else None
        return numbers if written is None else written.copy_(numbers)


def _number(name: str, given: Mapping[str, Any]) -> float:
    kind = name.removesuffix("_like")
    if kind in ("rand", "uniform"):
        low, high = given.get("from", 0.0), given.get("to", 1.0)
        return float(low + DRAWN * (high - low))
    if kind in ("randn", "normal") and not any(isinstance(given.get(k), Tensor) for k in ("mean", "std")):
        return float(given.get("mean", 0.0) + DRAWN * given.get("std", 1.0))
    if kind == "randint":
        return float(given.get("low", 0))
    raise UnprovenError(f"it draws random numbers by {name}")


def is_hollow(x: Tensor) -> bool:
    """Whether a tensor has the memory of one number at most, which stands for all."""
    return x.layout == torch.strided and x.numel() > 1 and x.untyped_storage().nbytes() <= x.element_size()


def values_like(x: Tensor, draws: torch.Generator | None = None) -> Tensor:
    """Numbers of the shape and type of a tensor: of a weight small, of a vector around 1, of integers 0 and 1."""
    if not x.is_floating_point() and not x.is_complex():
        return (torch.arange(x.numel(), device=x.device) % 2).to(x.dtype).view(x.shape)
    drawn = torch.rand(x.shape, generator=draws or torch.Generator().manual_seed(0))
    drawn = drawn + 0.5 if x.dim() < 2 else (2 * drawn - 1) / x[0].numel() ** 0.5
    return drawn.to(x.device, x.dtype)


@contextmanager
def filled(model: nn.Module) -> Iterator[None]:
    """Within it parameters without memory have values."""
    draws = torch.Generator().manual_seed(0)
    hollow = [(p, p.data) for p in model.parameters() if is_hollow(p)]
    try:
        for p, _ in hollow:
            p.data = values_like(p.data, draws)
        yield
    finally:
        for p, data in hollow:
            p.data = data
