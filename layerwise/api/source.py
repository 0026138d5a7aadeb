"""Source: what the user calls a model (module, exported program, file) becomes a Network at the global batch."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from layerwise.errors import LayerwiseError
from layerwise.importers.load import Network, load_network, network_of, network_with, refused
from layerwise.importers.torch.program import import_program
from layerwise.importers.torch.read.arguments import Call, call_of
from layerwise.ops.base import Role
from layerwise.tensorfile import dtype_name

ExampleInputs = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]
Model = nn.Module | ExportedProgram | str | os.PathLike[str]


def examples_of(example_inputs: object, model: object) -> tuple[Call, tuple[Tensor, ...]]:
    """Returns what one rank calls the model with, and the tensors in that. LayerwiseError for anything else."""
    if example_inputs is None and not isinstance(model, nn.Module):
        return ((), {}), ()
    if isinstance(model, nn.Module):
        every = (*model.named_parameters(), *model.named_buffers())
        if made_within := next((name for name, tensor in every if tensor.is_inference()), None):
            raise LayerwiseError(
                f"{made_within!r} was made within torch.inference_mode(): build the model outside of it"
            )
    call = pytree.tree_map_only(Tensor, _outside_inference, call_of(model, example_inputs))
    values = pytree.tree_leaves(call)
    odd = [x for x in values if not isinstance(x, Tensor | int | float | str | NoneType)]
    tensors = tuple(x for x in values if isinstance(x, Tensor))
    if odd or not values or not (tensors or isinstance(model, nn.Module)):
        what = f"example_inputs has a {type(odd[0]).__name__}" if odd else "example_inputs has no tensor"
        raise LayerwiseError(f"{what}: give the tensor that one rank calls the model with, or a tuple of such tensors")
    if tensors and (tensors[0].dim() == 0 or tensors[0].shape[0] < 1):
        raise LayerwiseError("example_inputs has no samples: its first tensor needs a first dimension of at least 1")
    return call, tensors


def _outside_inference(x: Tensor) -> Tensor:
    """Returns a tensor that autograd takes, which none is that was made within torch.inference_mode()."""
    return x.clone() if x.is_inference() else x


def device_of(model: object, examples: tuple[Tensor, ...]) -> torch.device:
    """Returns the device of the model or its example inputs, else the CPU, as with DistributedDataParallel."""
    tensors = list(examples)
    if isinstance(model, nn.Module):
        tensors += [*model.parameters(), *model.buffers()]
    elif isinstance(model, ExportedProgram):
        tensors += list(model.state_dict.values())
    return next((t.device for t in tensors if t.device.type not in ("cpu", "meta")), torch.device("cpu"))


def dtype_of(network: Network) -> torch.dtype:
    """Returns the element type of the parameters (they must have one), else the network's."""
    names: dict[torch.dtype, str] = {}
    for layer in network.graph.layers:
        for name in (name for name, p in layer.own_parameters() if p.trainable or name in layer.frozen):
            value = network.value(name)
            if isinstance(value, Tensor) and value.is_floating_point():
                names.setdefault(value.dtype, name)
    if len(names) > 1:
        (a, first), (b, second) = list(names.items())[:2]
        raise LayerwiseError(
            f"parameter {first!r} is {dtype_name(a)} and {second!r} is {dtype_name(b)}: bring them to one type with "
            "model.to(...)"
        )
    dtype: torch.dtype = next(iter(names), getattr(torch, network.graph.dtype))
    return dtype


def network(
    model: Model,
    call: Call,
    batch: int,
    shared: Collection[str] | None = None,
    *,
    together: bool = False,
    as_called: bool = False,
) -> Network:
    """Returns the network at `batch` samples of all ranks together. call: what one rank calls the model with.

    shared, together, as_called: as `network_of` has them. A module keeps its tensors: `Network.stored` reads the
    model's own. An .onnx file comes with its weights.
    """
    if isinstance(model, nn.Module):
        positional, named = _there(model, call)
        with refused():
            imported = network_of(
                model,
                positional,
                None if as_called else batch,
                type(model).__name__,
                named,
                shared=shared,
                together=together,
                as_called=as_called,
            )
        _check_types(imported)
        return imported
    if isinstance(model, ExportedProgram):
        graph, stored = import_program(model, "exported program")
        return network_with(graph, stored, model.state_dict, model.state_dict, batch)
    if not isinstance(model, str | os.PathLike):
        raise LayerwiseError(
            f"the model is of type {type(model).__name__}: give an nn.Module, an ExportedProgram, or the path of an "
            ".onnx file"
        )
    return load_network(os.fspath(model), batch)


def _there(model: nn.Module, call: Call) -> Call:
    """Returns the call where the model is: on the meta device, where a part of it is."""
    call_devices = (x.device for x in pytree.tree_leaves(call) if isinstance(x, Tensor))
    devices = [t.device for t in (*model.parameters(), *model.buffers())] or [next(call_devices, torch.device("cpu"))]
    where = next((device for device in devices if device.type == "meta"), devices[0])

    def there(x: Tensor) -> Tensor:
        if x.is_meta:  # no numbers at random: labels would be none of the classes
            return torch.zeros((), dtype=x.dtype, device=where).expand(x.shape)
        return x.to(where)

    moved: Call = pytree.tree_map_only(Tensor, there, call)
    return moved


def _check_types(imported: Network) -> None:
    """LayerwiseError where whole numbers meet weights: the trace takes that, the kernels do not."""
    for layer in imported.graph.inner:
        weights = any(p.trainable or name in layer.frozen for name, p in layer.own_parameters())
        if weights and layer.role is not Role.TIED and not layer.out.differentiable:
            raise LayerwiseError(
                f"layer {layer.name!r} is given {layer.specs[0].dtype}, but its weights need floating-point numbers: "
                "give example_inputs of the type that the model is called with"
            )
