"""The parameters of a split plan as DTensors, so that PyTorch's own functions see whole parameters.

Imported where a plan needs it only: `torch.distributed.tensor` takes 0.7 s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.run.parts import local_part
from layerwise.run.state.placements import Placements
from layerwise.run.state.submesh import SubmeshDTensor, of_all, register

_MESHES: set[DeviceMesh | None] = set()  # of plans


@dataclass(frozen=True, slots=True)
class Sharding:
    """How one parameter lies on a mesh of processes."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]  # of all of it
    kind: type[DTensor]

    def wrap(self, local: Tensor) -> DTensor:
        """The DTensor of which this rank has `local`, in the same memory."""
        stride = tuple(prod(self.shape[i + 1 :]) for i in range(len(self.shape)))
        spec = DTensorSpec(self.mesh, self.placements, TensorMeta(torch.Size(self.shape), stride, local.dtype))
        # As FSDP2 makes them; `from_local` goes through autograd.
        return self.kind(local, spec, requires_grad=False)

    def says(self, tensor: Tensor) -> bool:
        """Whether a DTensor lies so."""
        assert isinstance(tensor, DTensor)
        return tensor.device_mesh == self.mesh and tensor.placements == self.placements

    @property
    def box(self) -> Box:
        """This rank's, as torch says it."""
        sizes, offsets = compute_local_shape_and_global_offset(self.shape, self.mesh, self.placements)
        return Box(tuple(offsets), tuple(a + b for a, b in zip(offsets, sizes, strict=True)))


def shardings(placed: Mapping[str, Placements], everyone: Placements, comm: Comm) -> dict[str, Sharding]:
    """On meshes that are made now, one of each kind; nothing where `comm` has none. All ranks call this.

    everyone: of something that all ranks have.
    """
    install()
    meshes: dict[str, DeviceMesh | None] = {}
    for one in (everyone, *placed.values()):
        key = str(one.ranks.tolist())
        if key not in meshes:
            meshes[key] = comm.device_mesh(one.ranks)
            _MESHES.add(meshes[key])
    all_ranks = meshes[str(everyone.ranks.tolist())]
    made = {}
    for name, one in placed.items():
        mesh, some = meshes[str(one.ranks.tolist())], one.ranks.size < everyone.ranks.size
        if mesh is None or all_ranks is None:
            return {}
        if some:
            register(mesh, all_ranks)
        cuts = tuple(Replicate() if k is None else Shard(k) for k in one.cuts)
        made[name] = Sharding(mesh, cuts, one.shape, SubmeshDTensor if some else DTensor)
    return made


def move(tensor: Tensor, local: Tensor) -> None:
    """Gives a DTensor, which others refer to, another local part: of another type, or on another device."""
    assert isinstance(tensor, DTensor)
    old = tensor._spec
    meta = TensorMeta(old.tensor_meta.shape, old.tensor_meta.stride, local.dtype)  # type: ignore[union-attr]
    spec = DTensorSpec(old.mesh, old.placements, meta)
    tensor.data = type(tensor)(local, spec, requires_grad=False)
    tensor._local_tensor, tensor._spec = local, spec


@cache
def install() -> None:
    """Makes right, for tensors on meshes of plans, what DTensor (torch 2.11 to 2.15) does wrong without a word.

    `item`, `float` and `bool` of a number that is the sum (maximum, ...) of all ranks' parts give the rank's own part.
    GradScaler looks for infinities over the axes that cut the first gradient, not over those that cut others.
    Random numbers on a CPU are drawn by each rank for its own part. Tensors on other meshes are left to PyTorch.

    A subclass of DTensor would do without PyTorch's table, but operations of it miss DTensor's way through C++: a step
    of AdamW over 160 parameters takes the host 14 ms instead of 7 (59 ms instead of 35 where it loops over them).
    """
    handlers = DTensor._op_dispatcher._custom_op_handlers
    scalar, unscale = (
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default,
    )
    ours = {scalar: _number, unscale: _unscale, **dict.fromkeys(DTensor._op_dispatcher._random_ops, _drawn)}
    for op, handle in ours.items():
        handlers[op] = partial(_of_plans, handle, handlers.get(op))


def _of_plans(handle: Any, before: Any, op: Any, args: tuple[Any, ...], named: dict[str, object]) -> object:
    """What `handle` makes of tensors on meshes of plans, and PyTorch of others. before: its own handler, if any."""
    tensors = (x for arg in args for x in (arg if isinstance(arg, list | tuple) else (arg,)))
    if any(isinstance(x, DTensor) and x.device_mesh in _MESHES for x in tensors):
        return handle(op, args, named)
    if before is not None:
        return before(op, args, named)
    handlers = DTensor._op_dispatcher._custom_op_handlers
    mine = handlers.pop(op)
    try:
        return op(*args, **named)
    finally:
        handlers[op] = mine


def _number(op: Any, args: Sequence[DTensor], _: Any) -> object:
    tensor = args[0]
    return op(tensor.full_tensor() if any(isinstance(p, Partial) for p in tensor.placements) else local_part(tensor))


def _drawn(*_: Any) -> NoReturn:
    raise LayerwiseError(
        "random numbers were asked for of a parameter that the plan splits, and would be other ones than one "
        "device's: initialise the model before, or by model.apply(fn), or give load_state_dict the values"
    )


def _unscale(op: Any, args: tuple[Sequence[DTensor], Tensor, Tensor], _: Any) -> None:
    gradients, found, scale = args
    if not all(isinstance(gradient, DTensor) for gradient in gradients):
        raise LayerwiseError(
            "GradScaler was given the parallel model's parameters together with others, in one optimizer: give each an "
            "optimizer of its own"
        )
    op([local_part(gradient) for gradient in gradients], found, scale)
    for mesh in dict.fromkeys(of_all(gradient.device_mesh) for gradient in gradients):
        for axis in range(mesh.ndim):
            torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, mesh.get_group(axis))
