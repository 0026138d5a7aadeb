"""DTensors of several meshes, of all ranks and of some: as numbers, full tensors and lists, in every rank's hands.

A layer on some of the ranks has its parameters there alone, as DTensors of a sub-mesh. DTensor's own arithmetic does
not mix meshes, and makes zeros and empty tensors on ranks outside of one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from layerwise.errors import LayerwiseError

ALIGNMENT = 16  # bytes: of tensors that travel together
UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default

ALL_RANKS: dict[DeviceMesh, DeviceMesh] = {}  # by sub-mesh: the mesh of all ranks


def plain_dtensor(tensor: DTensor) -> DTensor:
    """Returns it as PyTorch's own DTensor, in the same memory."""
    plain: DTensor = DTensor(tensor._local_tensor, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return plain


def full(tensor: DTensor) -> Tensor:
    """Returns the full tensor of a DTensor that lies on all ranks."""
    return tensor._local_tensor if tensor._spec.is_replicated() else plain_dtensor(tensor).full_tensor()


def everywhere(tensor: DTensor) -> Tensor:
    """Returns the full tensor, on every rank, also of a DTensor that lies on some. All ranks call this alike."""
    return full_tensors([tensor])[0] if tensor.device_mesh in ALL_RANKS else full(tensor)


def check_alike(own: Sequence[Tensor], mesh: DeviceMesh) -> None:
    """LayerwiseError where numbers differ by rank, beside which DTensors of the mesh are given. All ranks call it."""
    numbers = [x.detach().double().reshape(()) for x in own if x.numel() == 1]
    if not numbers:
        return
    mesh, local = ALL_RANKS.get(mesh, mesh), torch.stack(numbers)
    most = torch.cat([local, -local])
    for axis in range(mesh.ndim):
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, mesh.get_group(axis))
    if not torch.equal(most[: len(local)], -most[len(local) :]):
        raise LayerwiseError(
            "a parameter that the plan splits was computed with a number that is another on each rank, such as a loss: "
            "each rank has a part of the parameter. Make a number of the parameter first: loss * p.pow(2).sum()"
        )


def full_tensors(tensors: Iterable[DTensor]) -> list[Tensor]:
    """Returns the full tensors, on every rank, by one message from those that have them. All ranks call this."""
    fulls, sizes, first = list[Tensor](), list[int](), list[bool]()
    for tensor in tensors:
        mesh, plain = tensor.device_mesh, plain_dtensor(tensor)
        if mesh.get_coordinate() is None:
            full = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor._local_tensor.device)
        else:
            full = plain.full_tensor().detach().contiguous()
        fulls.append(full)
        sizes.append(-(-full.nbytes // ALIGNMENT) * ALIGNMENT)
        first.append(int(mesh.mesh.flatten()[0]) == torch.distributed.get_rank())
        all_ranks = ALL_RANKS[mesh]
    flat = torch.zeros(sum(sizes), dtype=torch.uint8, device=fulls[0].device)
    parts = [part[: full.nbytes] for part, full in zip(torch.split(flat, sizes), fulls, strict=True)]
    for part, full, sends in zip(parts, fulls, first, strict=True):
        if sends:
            part.copy_(full.reshape(-1).view(torch.uint8))
    for axis in range(all_ranks.ndim):  # one rank has what all others have zeros of
        torch.distributed.all_reduce(flat, group=all_ranks.get_group(axis))
    return [part.view(full.dtype).view(full.shape) for part, full in zip(parts, fulls, strict=True)]


def on_mesh(mesh: DeviceMesh, value: Tensor) -> DTensor:
    """Returns a tensor that all ranks have, replicated on a mesh."""
    meta = TensorMeta(value.shape, value.stride(), value.dtype)
    spec = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, meta)
    if mesh in ALL_RANKS and mesh.get_coordinate() is None:
        value = value.new_empty(0) if value.dim() else value.new_zeros(())  # as PyTorch has them outside of a mesh
    replicated_tensor: DTensor = DTensor(value, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return replicated_tensor


def brought_together(func: Any, tensors: Sequence[DTensor], written: Collection[int]) -> dict[int, DTensor]:
    """Returns, by id, what stands for tensors that are not on the mesh of the computation: none that is written to.

    written: the ids of what the operation writes to. LayerwiseError where it writes to a mesh and reads more than that
    has.
    """
    of_some = [x for x in tensors if x.device_mesh in ALL_RANKS]
    meshes, others = {x.device_mesh for x in of_some}, [x for x in tensors if x.device_mesh not in ALL_RANKS]
    numbers, to_all = all(not x.dim() for x in tensors), any(id(x) in written for x in others)
    if len(meshes) == 1 and not (numbers or to_all) and all(not x.dim() or x._spec.is_replicated() for x in others):
        (mesh,) = meshes
        return {id(x): on_mesh(mesh, full(x)) for x in others}
    if any(id(x) in written for x in of_some):
        raise LayerwiseError(
            f"{func._schema.name.removeprefix('aten::')}() would write what is computed of tensors of other ranks to a "
            "parameter or gradient of a layer that is on some ranks only: give it numbers"
        )
    mesh = others[0].device_mesh if others else ALL_RANKS[of_some[0].device_mesh]
    values = full_tensors(of_some)
    return {id(x): on_mesh(mesh, value) for x, value in zip(of_some, values, strict=True)}


def by_mesh(args: Sequence[Any]) -> dict[DeviceMesh | None, list[int]]:
    """Returns the places in the first list of tensors, by their mesh."""
    first = next((arg for arg in args if isinstance(arg, list | tuple)), ())
    places: dict[DeviceMesh | None, list[int]] = {}
    for i, x in enumerate(first):
        places.setdefault(x.device_mesh if isinstance(x, DTensor) else None, []).append(i)
    return places


def mesh_by_mesh(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
    """Returns what an operation makes of lists of tensors, computed mesh by mesh."""
    places = by_mesh(args)
    count, results = sum(map(len, places.values())), dict[int, Any]()

    def some(x: Any, where: Sequence[int]) -> Any:
        return [x[i] for i in where] if isinstance(x, list | tuple) and len(x) == count else x

    for where in places.values():
        named = {key: some(x, where) for key, x in kwargs.items()}
        result = func(*(some(x, where) for x in args), **named)
        results |= dict(zip(where, result or (), strict=False))
    return [results[i] for i in range(count)] if results else None


def unscale(gradients: Sequence[DTensor], infinite: Tensor, scale: Tensor) -> None:
    """Divides gradients by GradScaler's scale; an infinity of any rank is found on all."""
    if not all(isinstance(gradient, DTensor) for gradient in gradients):
        raise LayerwiseError(
            "GradScaler was given the parallel model's parameters together with others, in one optimizer: give each an "
            "optimizer of its own"
        )
    UNSCALE([gradient._local_tensor for gradient in gradients], infinite, scale)
    for mesh in dict.fromkeys(ALL_RANKS.get(g.device_mesh, g.device_mesh) for g in gradients):
        for axis in range(mesh.ndim):
            torch.distributed.all_reduce(infinite, torch.distributed.ReduceOp.MAX, mesh.get_group(axis))
