"""DTensors on several meshes, of all ranks and of some: the plain tensors that all ranks get from them.

If a layer is on some of the ranks, only these hold its parameters, as DTensors on a sub-mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.run.local_tensor import digest

UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
ALL_RANKS: dict[DeviceMesh, DeviceMesh] = {}  # sub-mesh -> the mesh of all ranks


def plain_dtensor(tensor: DTensor) -> DTensor:
    """Returns PyTorch's own DTensor in the same memory."""
    plain: DTensor = DTensor(tensor._local_tensor, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return plain


@cache  # many parameters have the same shape, and a large mesh has many coordinates
def box_at(shape: tuple[int, ...], axes: tuple[int, ...], at: tuple[int, ...], cuts: tuple[Placement, ...]) -> Box:
    """Returns the box of a DTensor of this shape at a coordinate `at` of a mesh with these axes."""
    extents, lo = _compute_local_shape_and_global_offset(shape, axes, list(at), cuts)
    return Box(lo, tuple(a + n for a, n in zip(lo, extents, strict=True)))


def shard_of(full: Tensor, like: DTensor) -> Tensor:
    """Returns this rank's shard of a full tensor, placed like `like`; an empty one if this rank has none."""
    spec = like._spec
    at = spec.mesh.get_coordinate()
    if at is None:
        return full.new_empty(0) if like._local_tensor.shape == (0,) else full
    if spec.is_replicated():
        return full
    return full[box_at(tuple(like.shape), tuple(spec.mesh.shape), tuple(at), spec.placements).slices()]


def all_ranks(tensor: DTensor) -> DeviceMesh:
    """Returns the mesh of all ranks."""
    return ALL_RANKS.get(tensor.device_mesh, tensor.device_mesh)


def all_reduce(tensor: Tensor, mesh: DeviceMesh, kind: ReduceOp.RedOpType = ReduceOp.SUM) -> None:
    """Reduces over all ranks of a mesh, in place."""
    for axis in range(mesh.ndim):
        torch.distributed.all_reduce(tensor, kind, mesh.get_group(axis))


def is_first(tensor: DTensor) -> bool:
    """True if no lower rank has the same shard."""
    at = tensor.device_mesh.get_coordinate()
    return at is not None and not any(i for i, p in zip(at, tensor.placements, strict=True) if not p.is_shard())


def everywhere(tensor: DTensor) -> Tensor:
    """Returns the full tensor on every rank, even of a DTensor on some ranks. All ranks must call this."""
    mesh = tensor.device_mesh
    if mesh not in ALL_RANKS:
        if tensor._spec.is_replicated():
            return tensor._local_tensor
        full = plain_dtensor(tensor).full_tensor()
        return full if full.stride() == tensor.stride() else full.contiguous()  # as views of it expect
    if mesh.get_coordinate() is None:
        full = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor._local_tensor.device)
    else:
        full = plain_dtensor(tensor).full_tensor().detach().contiguous()
    return of_rank(full, int(mesh.mesh.flatten()[0]), ALL_RANKS[mesh])


def of_rank(tensor: Tensor, rank: int, mesh: DeviceMesh) -> Tensor:
    """Returns one rank's tensor on all ranks, bit by bit: the others add zeros."""
    same = tensor.detach().clone(memory_format=torch.contiguous_format)
    bits = same.view(-1).view(torch.uint8)
    if torch.distributed.get_rank() != rank:
        bits.zero_()
    all_reduce(bits, mesh)
    return same


def check_alike(tensors: Iterable[Tensor], mesh: DeviceMesh) -> None:
    """Raises LayerwiseError if plain tensors differ between ranks. All ranks of the mesh must call it."""
    number = sum((i + 1) * digest(x) for i, x in enumerate(tensors)) % 2**62
    most = torch.tensor([number, -number], device=mesh.device_type)
    all_reduce(most, mesh, ReduceOp.MAX)
    if most[0] != -most[1]:
        raise LayerwiseError(
            "a tensor that differs between ranks, such as noise or a loss, was written to a parameter that the plan "
            "splits, or to its gradient: make it equal on all ranks first"
        )


def unscale(gradients: Sequence[Tensor], infinite: Tensor, scale: Tensor) -> None:
    """Divides gradients by GradScaler's scale; an infinity on any rank is reported on all."""
    dtensors = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    if len(dtensors) < len(gradients):
        raise LayerwiseError(
            "GradScaler got an optimizer with both the parallel model's parameters and others: use a separate "
            "optimizer for each"
        )
    UNSCALE([gradient._local_tensor for gradient in dtensors], infinite, scale)
    for mesh in dict.fromkeys(map(all_ranks, dtensors)):
        all_reduce(infinite, mesh, ReduceOp.MAX)
