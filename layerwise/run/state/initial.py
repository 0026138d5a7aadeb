"""Initial values: a rank's box of each parameter, from the model's own values or drawn by position.

If every rank has built the model itself and the values differ, rank 0's win, as with DDP.

No rank ever creates more of a parameter than it owns. Stored values are sliced where they are; drawn values depend only
on an element's position in the full tensor, so any split, one device included, has the same values.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from math import prod

import numpy as np
import torch
from torch import Tensor

from layerwise.comm.base import Comm, CommError
from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.graph.layer import Layer
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.load import Network
from layerwise.ops.facts import Parameter
from layerwise.ops.random import combine, normal, uniform
from layerwise.run.local_tensor import digest


def drawn_as(graph: LayerGraph) -> dict[str, Parameter]:
    """Returns how each tied parameter is drawn: as the first layer that uses it would."""
    return {
        layer.inputs[len(layer.specs) + i]: layer.space.parameters[p]
        for layer in reversed(graph.layers)
        for i, p in enumerate(layer.tied)
    }


def drawn(name: str, p: Parameter, box: Box, seed: int, dtype: torch.dtype) -> Tensor:
    """Returns PyTorch's default initial values for this kind of parameter; 16-bit ones are rounded from float32."""
    stream, exact = combine(seed, zlib.crc32(name.encode())), torch.promote_types(dtype, torch.float32)
    if p.initial == "uniform":
        return ((2.0 * uniform(stream, box, p.shape, dtype=exact) - 1.0) * p.scale).to(dtype)
    if p.initial == "normal":
        return (normal(stream, box, p.shape, dtype=exact) * p.scale).to(dtype)
    return torch.full(box.shape, p.scale, dtype=dtype)


def stored(network: Network, name: str, box: Box | None, shape: tuple[int, ...]) -> Tensor | None:
    """Returns the network's own values of `box` (None: all), or None if it has none."""
    value = network.value(name)
    if value is None or (isinstance(value, Tensor) and value.device.type == "meta"):
        return None
    array = value if isinstance(value, Tensor) else np.asarray(value)
    if prod(array.shape) != prod(shape):
        raise LayerwiseError(f"{name!r} is stored with shape {tuple(array.shape)}, but the model computes with {shape}")
    if not isinstance(array, Tensor):
        return torch.from_numpy(np.array(array.reshape(shape)[box.slices() if box else ...]))
    value = array.detach().reshape(shape)
    return value[box.slices()].clone() if box else value.clone()


def initial(network: Network, layer: Layer, name: str, p: Parameter, box: Box, seed: int, dtype: torch.dtype) -> Tensor:
    """Returns this box's initial values. Raises LayerwiseError if there are none and none can be drawn."""
    value = stored(network, name, box, p.shape)
    if value is not None:
        return value.to(dtype) if value.is_floating_point() else value
    if not p.trainable and name not in layer.frozen and name.rpartition(".")[2] not in ("running_mean", "running_var"):
        raise LayerwiseError(
            f"layer {layer.name!r}: constant {name!r} has no value, as the model is on the meta device: build the "
            "model with its constants, or pass its weights"
        )
    return drawn(name, p, box, seed, dtype)


def broadcast_values(tensors: Mapping[str, Tensor], comm: Comm) -> None:
    """Writes rank 0's parameters and buffers into the other ranks' `tensors`, if theirs differ.

    A model on the meta device has no values: they are drawn by position, equal on all ranks. Raises CommError if the
    ranks have built different models.
    """
    if comm.size == 1:
        return
    facts = {name: [list(t.shape), str(t.dtype), None if t.is_meta else digest(t)] for name, t in tensors.items()}
    ranks = comm.all_gather_object(facts)
    for rank, theirs in enumerate(ranks):
        for name in dict.fromkeys((*ranks[0], *theirs)):
            ours, other = ranks[0].get(name), theirs.get(name)
            if ours is None or other is None or ours[:2] != other[:2] or (ours[2] is None) != (other[2] is None):
                what = "is missing" if ours is None or other is None else "has another shape, type or kind of device"
                raise CommError(
                    f"the ranks have built different models: {name!r} {what} on one of the ranks 0 and {rank}; build "
                    "the same model on every rank"
                )
    with torch.no_grad():
        for name, tensor in tensors.items():
            unlike = [rank for rank, theirs in enumerate(ranks) if theirs[name] != ranks[0][name]]
            _send(tensor, unlike, comm, f"the value of {name}")


def _send(tensor: Tensor, to: list[int], comm: Comm, what: str) -> None:
    if comm.rank == 0 and to:
        value = tensor.detach().to(comm.device).contiguous()
        comm.exchange([(rank, value) for rank in to], [], "io", what).wait()
    elif comm.rank in to:
        value = torch.empty(tensor.shape, dtype=tensor.dtype, device=comm.device)
        comm.exchange([], [(0, value)], "io", what).wait()
        tensor.detach().copy_(value)
