"""Mixed precision: the element types of a network's tensors if autocast computes in 16 bits.

PyTorch chooses them by operator, device type and version (https://pytorch.org/docs/stable/amp.html), so layerwise asks
the kernels: each runs once, on tensors with shapes and types but no values, for which no device is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.graph.layer import Layer
from layerwise.graph.layer_graph import LayerGraph
from layerwise.graph.types import Types, autocast_within
from layerwise.ops.base import Op, Role, space
from layerwise.ops.fused import needed_box, undivided
from layerwise.ops.nn.conv import Conv, ConvTranspose
from layerwise.ops.nn.linear import Linear
from layerwise.ops.nn.norm import BatchNorm
from layerwise.ops.nn.pool import AdaptivePool, Pool
from layerwise.ops.tensor.along import Concat
from layerwise.ops.tensor.pointwise import Binary, Dropout, Unary
from layerwise.tensor import TensorSpec

if TYPE_CHECKING:
    import torch

KEEPING = frozenset({"relu", "leaky_relu", "tanh", "hardtanh", "add"})  # functions that autocast leaves alone


def mixed(graph: LayerGraph, autocast: str | None, device: str, dtype: str | None = None) -> LayerGraph:
    """The network with its tensors' types under autocast; parameters and their gradients keep theirs.

    The model's own `torch.autocast` regions override the one around its call. A network without either, or one that
    this function has returned, keeps its types.

    autocast: of the region around the call: "bfloat16", "float16" or None; device: "cpu" or "cuda", which differ;
    dtype: the run's type for the model's own element type (default: the graph's).
    """
    if graph.mixed or (autocast is None and not any(layer.autocast for layer in graph.layers)):
        return graph
    own = graph.dtype
    run = dtype or own
    done: dict[str, Layer] = {}
    for layer in graph.layers:
        specs = tuple(done[source].out for source in layer.inputs[: len(layer.specs)])
        types = None
        if layer.role is Role.COMPUTE:
            made: list[str] = []
            here = autocast_within(layer.autocast, device, autocast)
            for stage, weights in zip(layer.stages, layer.all_types.parameters, strict=True):
                read = [spec.dtype for spec in specs[stage.inputs]]
                if stage.slot is not None:
                    read.insert(stage.slot, made[-1])
                given = tuple(
                    replace(spec, dtype=run if name == own else name)
                    for spec, name in zip(stage.specs, read, strict=True)
                )
                result = made_by(stage.op, given, run if weights == own else weights, here, device)
                made.append(own if result == run else result)
            types = replace(layer.all_types, made=tuple(made))
        done[layer.name] = replace(layer, specs=specs, types=types)
    return replace(graph, layers=tuple(done.values()), mixed=True)


def types_of(op: Op, sources: Sequence[Layer]) -> Types | None:
    """The types of an operator without autocast and parameters; None if it determines them itself."""
    if op.role is not Role.COMPUTE or all(source.types is None for source in sources):
        return None
    made = space(op, tuple(source.out for source in sources)).out.dtype
    plain = tuple(replace(source.out, dtype=source.all_types.plain[-1]) for source in sources)
    without = space(op, plain).out.dtype
    return Types((made,), (without,), (without,))


@lru_cache(maxsize=65536)
def made_by(op: Op, specs: tuple[TensorSpec, ...], weights: str, autocast: str | None, device: str) -> str:
    """The element type of an operator's result, for inputs `specs` and parameters of type `weights`.

    autocast: None: autocast is off.
    """
    where = space(op, specs)
    if not where.out.differentiable:
        return where.out.dtype
    if (known := _known(op, specs, weights, autocast, device)) is not None:
        return known
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    local = undivided(where, specs)

    def empty(box: Box, dtype: str) -> torch.Tensor:
        return torch.empty(box.shape, dtype=getattr(torch, dtype), device=device)

    # Without gradients: a PyTorch without CUDA would end the process on a CUDA tensor with gradients.
    with torch.no_grad(), FakeTensorMode(), _autocast(device, None if autocast is None else getattr(torch, autocast)):
        inputs = [empty(box, spec.dtype) for box, spec in zip(local.needs, specs, strict=True)]
        parameters = {p.name: empty(needed_box(p.maps, local.cell), weights) for p in where.parameters}
        try:
            out = op.run(local, inputs, parameters)
        except (LayerwiseError, RuntimeError):  # there is no kernel, or it reads values
            return where.out.dtype
    return str(out.dtype).removeprefix("torch.")


def _known(op: Op, specs: tuple[TensorSpec, ...], weights: str, autocast: str | None, device: str) -> str | None:
    """`made_by` for operators of built-in networks, as planning for these imports no torch; None: ask the kernels.

    A test compares them: tests/graph/test_layer.py.
    """
    read = {spec.dtype for spec in specs}
    if autocast is None or weights != "float32" or read not in ({"float32"}, {autocast}):
        return None
    if isinstance(op, Conv | ConvTranspose | Linear):
        return autocast
    keeps: bool = isinstance(op, BatchNorm | Concat | Dropout)
    keeps |= isinstance(op, Unary) and op.fn in KEEPING
    keeps |= isinstance(op, Binary) and op.fn in KEEPING and op.parameter is None
    keeps |= isinstance(op, Pool | AdaptivePool) and device == "cuda"  # a CPU computes some of them in float32
    return specs[0].dtype if keeps else None


@contextmanager
def _autocast(device: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Enters torch.autocast, which does nothing for CUDA without a GPU. None: turns it off."""
    import torch

    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled(device, dtype is not None)
    torch.set_autocast_dtype(device, before[1] if dtype is None else dtype)
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])
        torch.set_autocast_cache_enabled(before[2])
