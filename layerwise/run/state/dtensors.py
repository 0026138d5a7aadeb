"""The parameters of a split plan as DTensors, so that PyTorch's own functions see full parameters on every rank.

A DTensor lies on a mesh of ranks. Each mesh axis shards one dimension or none, the outermost axis first.

Import this only if a plan needs it: `torch.distributed.tensor` takes 0.7 s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from layerwise.geometry import Box, prime_factors
from layerwise.partition.place import Each
from layerwise.run.local_tensor import like
from layerwise.run.state.meshes import ALL_RANKS, box_at
from layerwise.run.state.plan_dtensor import PlanDTensor

Ranks = NDArray[np.int64]  # of a mesh, with the mesh's axes


# For one parameter: the ranks that hold some of it, and its placement for each axis of their mesh.
Placed = tuple[Ranks, tuple[Placement, ...]]


def placement(each: Each, shape: tuple[int, ...], order: Sequence[int]) -> Placed | None:
    """Returns how one parameter is sharded; None if its boxes are not those of any DTensor.

    The axes are the prime factors of the number of ranks that hold some of it, in the order of the devices: ascending,
    so that all parameters of the same ranks share a mesh, unless only another order of the factors gives the boxes.
    """
    holders = [rank for rank in order if each[rank] is not None]
    for axes in dict.fromkeys(permutations(prime_factors(len(holders)) or (1,))):
        ranks = np.array(holders, np.int64).reshape(axes)
        # torch sorts the ranks of a process group, so a shard's index must be its rank's index in the group.
        if all((np.diff(ranks, axis=axis) > 0).all() for axis in range(ranks.ndim)):
            placements = _placements(ranks, each)
            if placements is not None and all(
                box_at(shape, axes, where, placements) == each[rank] for where, rank in np.ndenumerate(ranks)
            ):
                return ranks, placements
    return None


def _placements(ranks: Ranks, each: Each) -> tuple[Placement, ...] | None:
    """Returns, by axis, a shard of the dimension in which its last box differs from the first; None if several do."""
    first, placements = each[int(ranks.flat[0])], list[Placement]()
    for axis in range(ranks.ndim):
        last = each[int(ranks[tuple(-1 if i == axis else 0 for i in range(ranks.ndim))])]
        assert first is not None
        assert last is not None
        ends = zip(first.lo, first.hi, last.lo, last.hi, strict=True)
        differing = [k for k, (a, b, c, d) in enumerate(ends) if (a, b) != (c, d)]
        if len(differing) > 1:
            return None
        placements.append(Shard(differing[0]) if differing else Replicate())
    return tuple(placements)


@dataclass(frozen=True, slots=True)
class MeshSharding:
    """The placements of one parameter on a mesh of processes."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]  # of the full parameter

    def wrap(self, local: Tensor) -> DTensor:
        """Returns the DTensor whose local tensor on this rank is `local`, in the same memory."""
        stride = tuple(prod(self.shape[i + 1 :]) for i in range(len(self.shape)))
        meta = TensorMeta(torch.Size(self.shape), stride, local.dtype)
        spec = DTensorSpec(self.mesh, self.placements, meta)
        # As FSDP2 builds it; `from_local` would go through autograd.
        return PlanDTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]

    def says(self, tensor: Tensor) -> bool:
        """True if a DTensor has this mesh and these placements."""
        assert isinstance(tensor, DTensor)
        return tensor.device_mesh == self.mesh and tensor.placements == self.placements


def shardings(
    boxes: Mapping[str, Each], shapes: Mapping[str, tuple[int, ...]], order: Sequence[int], comm: Comm
) -> dict[str, MeshSharding]:
    """Returns the placements of all parameters, on new meshes; none if `comm` has no mesh. All ranks must call this.

    boxes: by rank. order: the rank of each device of the plan. Raises LayerwiseError if boxes are those of no DTensor.
    """
    everyone = placement((Box((), ()),) * comm.size, (), order)
    placed = {name: one for name, each in boxes.items() if (one := placement(each, shapes[name], order)) is not None}
    if everyone is None or len(placed) < len(boxes):
        raise LayerwiseError(
            f"the plan's devices are ranks {tuple(order)}, and PyTorch cannot shard the parameters in that order: "
            "number the ranks of a node consecutively, as torchrun does"
        )
    meshes: dict[str, DeviceMesh | None] = {}
    for ranks, _ in (everyone, *placed.values()):
        if str(ranks.tolist()) not in meshes:
            meshes[str(ranks.tolist())] = comm.device_mesh(ranks)
    all_ranks, on_meshes = meshes[str(everyone[0].tolist())], dict[str, MeshSharding]()
    for name, (ranks, placements) in placed.items():
        mesh = meshes[str(ranks.tolist())]
        if mesh is None or all_ranks is None:
            return {}
        if ranks.size < comm.size:
            ALL_RANKS[mesh] = all_ranks
        on_meshes[name] = MeshSharding(mesh, placements, shapes[name])
    return on_meshes


def move(tensor: Tensor, local: Tensor) -> None:
    """Replaces the local tensor of a DTensor that others refer to: for another type, or another device."""
    assert isinstance(tensor, DTensor)
    moved: Any = like(tensor, local)
    with torch._C.DisableTorchFunctionSubclass():
        tensor.data = moved
    tensor._local_tensor, tensor._spec = local, moved._spec
