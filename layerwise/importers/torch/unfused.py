"""UnfusedLayers: runs a graph's layers as imported, on one device, with fixed numbers for random draws.

Fixed draws mean that nothing is dropped. A module without memory gets random values, equal on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from layerwise.errors import LayerwiseError
from layerwise.graph.layer import Layer
from layerwise.graph.layer_graph import LayerGraph
from layerwise.graph.types import autocast_within
from layerwise.ops.base import Op, Role
from layerwise.ops.facts import Local
from layerwise.ops.fused import undivided
from layerwise.ops.nn.attention import Attention
from layerwise.ops.tensor.draw import Draw
from layerwise.ops.tensor.pointwise import Dropout


class UnlikeError(LayerwiseError):
    """Raised if the layers compute something else than the module."""

    def __init__(self, layer: str, what: str) -> None:
        self.layer = layer
        super().__init__(
            f"layer {layer!r} gives other numbers than the model as written when both run on the example ({what}): the "
            "trace lacks something that the model does in Python or in autograd, or an operator is imported wrongly"
        )


class UnfusedLayers:
    """The layers of an unfused graph, run on one device with fixed numbers for random draws (`Undrawing`)."""

    def __init__(self, graph: LayerGraph, state: Mapping[str, Tensor | None], *, training: bool) -> None:
        self.graph, self.state, self.training = graph, state, training

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Each layer's output. Raises UnlikeError if a layer cannot run, UnprovenError if a constant has no value."""
        made: dict[str, Tensor] = {}
        device = next(iter(inputs.values())).device
        for layer in self.graph.layers[:-1]:
            if layer.role is Role.INPUT:
                made[layer.name] = inputs[layer.name]
            elif layer.role in (Role.CONSTANT, Role.TIED):
                made[layer.name] = self._stored(layer.name, layer.out.shape, device)
            else:
                try:
                    made[layer.name] = self._computed(layer, [made[name] for name in layer.inputs], device)
                except LayerwiseError:
                    raise
                except torch.OutOfMemoryError as error:
                    raise UnprovenError("running it would take more memory than there is") from error
                except Exception as error:
                    raise UnlikeError(layer.name, f"it raises {type(error).__name__}: {str(error)[:120]}") from error
        return made

    def _computed(self, layer: Layer, inputs: Sequence[Tensor], device: torch.device) -> Tensor:
        count, where = len(layer.specs), layer.space
        tied = dict(zip(layer.tied, inputs[count:], strict=True))
        parameters = {
            p.name: (tied[i] if i in tied else self._stored(layer.parameters[i], p.shape, device)).reshape(p.shape)
            for i, p in enumerate(where.parameters)
        }
        local = undivided(where, layer.specs, training=self.training, device=device)
        wanted = autocast_within(layer.autocast, device.type, None)
        dtype = None if wanted is None else getattr(torch, wanted)
        with torch.autocast(device.type, dtype, enabled=dtype is not None, cache_enabled=False):
            needed = [x[box.slices()] for x, box in zip(inputs, local.needs, strict=False)]
            return undrawn(layer.op, local, needed, parameters)

    def _stored(self, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
        value = self.state.get(name if name in self.state else name.partition(":")[0])
        if value is None:
            raise UnprovenError(f"constant {name!r} has no value")
        if prod(value.shape) == prod(shape):
            return value.to(device).reshape(shape)
        if value.dim() != len(shape) or not bool((value == value[:1]).all()):
            raise UnlikeError(name, "the constant depends on the batch")
        return value[:1].to(device).expand(shape)


def undrawn(op: Op, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
    """A layer's output with fixed numbers for random draws."""
    p = op.p if isinstance(op, Dropout) else op.dropout if isinstance(op, Attention) else 0.0
    if isinstance(op, Attention) and local.training and 0 < p < 1:
        return replace(op, dropout=0.0).run(local, inputs, parameters) / (1 - p)
    if isinstance(op, Dropout) and local.training and 0 < p < 1:
        return inputs[0] / (1 - p)
    if not isinstance(op, Draw):
        return op.run(local, inputs, parameters)
    low, *rest = (float(a) for a in op.arguments)
    number = {
        "uniform": lambda: low + DRAWN * (rest[0] - low),
        "normal": lambda: low + DRAWN * rest[0],
        "integers": lambda: low,
        "bernoulli": lambda: 1.0,
    }[op.distribution]()
    return torch.full(op.spec.shape, number, dtype=getattr(torch, op.spec.dtype), device=local.device)


DRAWN = 0.75  # of [0, 1): stochastic depth, floor(keep + it), then keeps everything


class UnprovenError(LayerwiseError):
    """Raised if the layers cannot run beside the module, or not within the time and memory limits."""


class Undrawing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which random draws return fixed numbers; bernoulli returns 1, so that nothing is dropped."""

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
    """True if a tensor has the memory of at most one number, which stands for all."""
    return x.layout == torch.strided and x.numel() > 1 and x.untyped_storage().nbytes() <= x.element_size()


def values_like(x: Tensor, draws: torch.Generator | None = None) -> Tensor:
    """Values of a tensor's shape and type: small for a weight, around 1 for a vector, 0 and 1 for integers."""
    if not x.is_floating_point() and not x.is_complex():
        return (torch.arange(x.numel(), device=x.device) % 2).to(x.dtype).view(x.shape)
    drawn = torch.rand(x.shape, generator=draws or torch.Generator().manual_seed(0))
    drawn = drawn + 0.5 if x.dim() < 2 else (2 * drawn - 1) / x[0].numel() ** 0.5
    return drawn.to(x.device, x.dtype)


@contextmanager
def filled(model: nn.Module) -> Iterator[None]:
    """A context in which parameters without memory have values."""
    draws = torch.Generator().manual_seed(0)
    hollow = [(p, p.data) for p in model.parameters() if is_hollow(p)]
    try:
        for p, _ in hollow:
            p.data = values_like(p.data, draws)
        yield
    finally:
        for p, data in hollow:
            p.data = data


def fixed_weights(x: Tensor) -> Tensor:
    """A different weight for each element, so that none cancels in a weighted sum."""
    return torch.arange(x.numel(), device=x.device).cos().add(1.5).to(x.real.dtype).view(x.shape)


def distance(ours: Tensor, theirs: Tensor, least: float = 0.0) -> float:
    """The largest difference, relative to the largest number or to `least`."""
    if ours.shape != theirs.shape:
        return float("inf")
    if not theirs.numel() or (ours.dtype == theirs.dtype and torch.equal(ours, theirs)):
        return 0.0
    wide = torch.complex128 if theirs.is_complex() else torch.float64
    a, b = ours.detach().to(wide), theirs.detach().to(wide)
    if not torch.equal(torch.isfinite(a), torch.isfinite(b)):
        return float("inf")
    a, b = (torch.where(torch.isfinite(x), x, torch.sign(x.real).nan_to_num(2.0)) for x in (a, b))
    return float((a - b).abs().max()) / max(float(b.abs().max()), least, 1e-30)
