"""The parameters of a split plan as DTensors, so that PyTorch's own functions see full parameters on every rank.

Imported where a plan needs it only: `torch.distributed.tensor` takes 0.7 s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

from layerwise.comm.base import Comm
from layerwise.geometry import Box
from layerwise.run.state.placements import Placements
from layerwise.run.state.plan_dtensor import register, wrap


@dataclass(frozen=True, slots=True)
class MeshSharding:
    """How one parameter lies on a mesh of processes."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]  # of the full parameter

    def wrap(self, local: Tensor) -> DTensor:
        """The DTensor of which this rank has `local`, in the same memory."""
        stride = tuple(prod(self.shape[i + 1 :]) for i in range(len(self.shape)))
        meta = TensorMeta(torch.Size(self.shape), stride, local.dtype)
        return wrap(local, DTensorSpec(self.mesh, self.placements, meta))

    def says(self, tensor: Tensor) -> bool:
        """Whether a DTensor lies so."""
        assert isinstance(tensor, DTensor)
        return tensor.device_mesh == self.mesh and tensor.placements == self.placements

    @property
    def box(self) -> Box:
        """This rank's, as torch says it."""
        sizes, offsets = compute_local_shape_and_global_offset(self.shape, self.mesh, self.placements)
        return Box(tuple(offsets), tuple(a + b for a, b in zip(offsets, sizes, strict=True)))


def shardings(placed: Mapping[str, Placements], everyone: Placements, comm: Comm) -> dict[str, MeshSharding]:
    """On meshes that are made now, one of each kind; nothing where `comm` has none. All ranks call this.

    everyone: of something that all ranks have.
    """
    meshes: dict[str, DeviceMesh | None] = {}
    for one in (everyone, *placed.values()):
        key = str(one.ranks.tolist())
        if key not in meshes:
            meshes[key] = comm.device_mesh(one.ranks)
    all_ranks = meshes[str(everyone.ranks.tolist())]
    made = {}
    for name, one in placed.items():
        mesh = meshes[str(one.ranks.tolist())]
        if mesh is None or all_ranks is None:
            return {}
        if one.ranks.size < everyone.ranks.size:
            register(mesh, all_ranks)
        cuts = tuple(Replicate() if k is None else Shard(k) for k in one.cuts)
        made[name] = MeshSharding(mesh, cuts, one.shape)
    return made


def move(tensor: Tensor, local: Tensor) -> None:
    """Gives a DTensor, which others refer to, another local tensor: of another type, or on another device."""
    assert isinstance(tensor, DTensor)
    old = tensor._spec
    meta = TensorMeta(old.tensor_meta.shape, old.tensor_meta.stride, local.dtype)  # type: ignore[union-attr]
    spec = DTensorSpec(old.mesh, old.placements, meta)
    tensor.data = wrap(local, spec)
    tensor._local_tensor, tensor._spec = local, spec
