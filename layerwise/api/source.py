"""Source: what the user calls a model (module, exported program, file) becomes a Network at the global batch.

Of calls where no dimension of a tensor is the samples, as of torchvision's detection models or of texts, `unbatched`
says how these are counted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from layerwise.importers.as_written import as_written, as_written_unbatched
from layerwise.importers.load import Network, load_network, network_of, network_with
from layerwise.importers.torch.from_torch import import_torch
from layerwise.importers.torch.read.arguments import Call, call_of, listed_samples
from layerwise.ops.base import Role
from layerwise.run.guards.hooks import without_hooks
from layerwise.tensorfile import dtype_name

ExampleInputs = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]
Model = nn.Module | ExportedProgram | str | os.PathLike[str]
LISTS = list, tuple


@dataclass(frozen=True, slots=True)
class Unbatched:
    """The samples of such calls: why none is cut, how a rank counts its own, and how many all ranks have."""

    why: str
    counted: Literal["items", "ranks"]
    samples: int


NO_TENSOR = (
    "its inputs hold no tensor, of which samples could be cut or counted: every rank's loss counts alike in the mean"
)
ITEMS = "its samples are the items of lists, each of a size of its own"


def arguments_of(call: Call) -> list[Any]:
    """Returns the arguments of a call, those by position first."""
    return [*call[0], *call[1].values()]


def unbatched(call: Call, comm: Comm) -> Unbatched | None:
    """Returns None where the samples are a dimension of tensors. Ranks, which have unlike lists, agree on it."""
    lists = [x for x in arguments_of(call) if isinstance(x, LISTS)]
    if not lists:
        return None if _tensors(call) else Unbatched(NO_TENSOR, "ranks", comm.size)
    samples, shapes = listed_samples(arguments_of(call)), str([tuple(x.shape) for x in _tensors(call)])
    unlike = samples is not None and _unlike(samples, lists)
    told = comm.all_gather_object(
        {"shapes": shapes, "unlike": unlike, "count": None if samples is None else len(samples)}
    )
    if all(one["shapes"] == "[]" for one in told):
        return Unbatched(NO_TENSOR, "ranks", comm.size)
    differ = any(one["shapes"] != told[0]["shapes"] for one in told)
    if all(one["count"] is not None for one in told) and (differ or any(one["unlike"] for one in told)):
        return Unbatched(ITEMS, "items", sum(one["count"] for one in told))
    if differ:
        raise LayerwiseError(
            "the tensors in the lists of example_inputs have other shapes on other ranks: give equal ones"
        )
    return None


def _unlike(samples: Sequence[Any], lists: Sequence[Sequence[Any]]) -> bool:
    """True if these items can be no batch: each has a dict beside it, or they are tensors of unlike extents."""
    described = any(
        x is not samples and len(x) == len(samples) and all(isinstance(item, Mapping) for item in x) for x in lists
    )
    return (
        described
        or isinstance(samples[0], Mapping)
        or len({item.shape[:1] for item in samples if isinstance(item, Tensor)}) > 1
    )


def _tensors(call: Call) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(call) if isinstance(x, Tensor)]


def examples_of(example_inputs: object, model: object) -> tuple[Call, tuple[Tensor, ...]]:
    """Returns what one rank calls the model with, and the tensors in that. LayerwiseError for anything else."""
    if example_inputs is None and not isinstance(model, nn.Module):
        return ((), {}), ()
    call = call_of(model, example_inputs)
    values = pytree.tree_leaves(call)
    odd = [x for x in values if not isinstance(x, Tensor | int | float | str | NoneType)]
    tensors = tuple(x for x in values if isinstance(x, Tensor))
    if odd or not values or not (tensors or isinstance(model, nn.Module)):
        what = f"example_inputs has a {type(odd[0]).__name__}" if odd else "example_inputs has no tensor"
        raise LayerwiseError(f"{what}: give the tensor that one rank calls the model with, or a tuple of such tensors")
    if tensors and (tensors[0].dim() == 0 or tensors[0].shape[0] < 1):
        raise LayerwiseError("example_inputs has no samples: its first tensor needs a first dimension of at least 1")
    return call, tensors


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


def network(model: Model, call: Call, batch: int, whole: Sequence[str] = (), *, partly: bool = False) -> Network:
    """Returns the network at `batch` samples of all ranks together. call: what one rank calls the model with.

    whole, partly: as `network_of` has them.

    A module keeps its tensors: `Network.stored` reads the model's own. A file (.onnx, .pt2) comes with its weights.
    """
    if isinstance(model, nn.Module):
        positional, named = _there(model, call)
        imported = network_of(model, positional, batch, type(model).__name__, named, whole=whole, partly=partly)
        _check_types(imported)
        return imported
    if whole:
        raise LayerwiseError("whole= names modules of an nn.Module, and the model is none")
    if isinstance(model, ExportedProgram):
        graph, stored = import_torch(model, name="exported program")
        return network_with(graph, stored, model.state_dict, model.state_dict, batch)
    if not isinstance(model, str | os.PathLike):
        raise LayerwiseError(
            f"the model is of type {type(model).__name__}: give an nn.Module, an ExportedProgram, or the path of an "
            ".onnx or .pt2 file"
        )
    return load_network(os.fspath(model), batch)


def network_as_written(
    model: nn.Module, call: Call, batch: int, why: LayerwiseError, lists: Unbatched | None
) -> Network:
    """Returns the model as one layer, which is not split: see `importers.as_written`."""
    with without_hooks(model):
        call = _there(model, call)
        if lists is not None:
            return replace(as_written_unbatched(model, call, batch, lists.counted, why), itself=True)
        return replace(as_written(model, call, batch, why), itself=True)


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
