"""UnfusedLayers: the layers of a graph as they were imported, run on one device where nothing is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.graph.layer import Layer, LayerGraph
from layerwise.graph.types import autocast_within
from layerwise.importers.torch.drawn import DRAWN, UnprovenError
from layerwise.ops.base import Op, Role
from layerwise.ops.facts import Local
from layerwise.ops.fused import needed_box
from layerwise.ops.nn.attention import Attention
from layerwise.ops.tensor.draw import Draw
from layerwise.ops.tensor.pointwise import Dropout


class UnlikeError(LayerwiseError):
    """The layers compute something else than the module."""

    def __init__(self, layer: str, what: str) -> None:
        self.layer = layer
        super().__init__(
            f"layer {layer!r} gives other numbers than the model as it is written, where both are run on the example "
            f"({what}): what it does in Python or in autograd is not in its trace, or an operator is imported wrongly"
        )


class UnfusedLayers:
    """The layers of a graph that is not fused, run on one device where `undrawing` draws."""

    def __init__(self, graph: LayerGraph, state: Mapping[str, Tensor | None], *, training: bool) -> None:
        self.graph, self.state, self.training = graph, state, training

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What each layer makes. UnlikeError where one cannot be run, UnprovenError where a constant has no value."""
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
                    raise UnprovenError("it would take more memory than there is") from error
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
        cell = Box((0,) * len(where.dims), tuple(dim.extent for dim in where.dims))
        needs = tuple(needed_box(maps, cell) for maps in where.needs)
        local = Local(where, layer.specs, cell, needs, training=self.training, device=device)
        wanted = autocast_within(layer.autocast, device.type, None)
        dtype = None if wanted is None else getattr(torch, wanted)
        with torch.autocast(device.type, dtype, enabled=dtype is not None, cache_enabled=False):
            needed = [x[box.slices()] for x, box in zip(inputs, needs, strict=False)]
            return undrawn(layer.op, local, needed, parameters)

    def _stored(self, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
        value = self.state.get(name if name in self.state else name.partition(":")[0])
        if value is None:
            raise UnprovenError(f"constant {name!r} has no value")
        if prod(value.shape) == prod(shape):
            return value.to(device).reshape(shape)
        if value.dim() != len(shape) or not bool((value == value[:1]).all()):
            raise UnlikeError(name, "it is another constant at another batch")
        return value[:1].to(device).expand(shape)


def undrawn(op: Op, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
    """What a layer makes where nothing is drawn."""
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
