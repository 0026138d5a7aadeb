"""SubmeshDTensor: a parameter of a layer on some of the ranks, in every rank's hands; the others have no part of it.

PyTorch computes with a DTensor of a sub-mesh on its ranks alone: elsewhere sums and norms are zeros, `full_tensor()` is
empty, and tensors of two meshes do not mix. Here whatever is a number, or is asked for as a whole, is every rank's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.optim.optimizer import _foreach_supported_types
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from layerwise.errors import LayerwiseError

ALIGNMENT = 16  # bytes: of tensors that travel together

_everyone: dict[DeviceMesh, DeviceMesh] = {}  # by sub-mesh: that of all ranks


def register(mesh: DeviceMesh, everyone: DeviceMesh) -> None:
    """Says which mesh has all ranks, of which `mesh` has some."""
    _everyone[mesh] = everyone
    spec = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, TensorMeta(torch.Size((0,)), (1,), torch.float32))
    probe = _dtensor(SubmeshDTensor, torch.empty(0), spec)
    if type(probe.detach()) is DTensor:  # torch 2.11: its way through C++ is every subclass's
        SubmeshDTensor.__torch_function__ = classmethod(_by_mode)  # type: ignore[assignment,method-assign]


def of_all(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of all ranks, of which this one has some or all."""
    return _everyone.get(mesh, mesh)


class SubmeshDTensor(DTensor):
    """A DTensor of some ranks, on every rank. What is computed of it alone is one again.

    Of tensors of several meshes, numbers and whole tensors are brought to the mesh of the others; what is left is
    brought to all ranks. All ranks compute the same, so that those which have a value can send it.
    """

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        """What DTensor computes, as far as the tensors are of one mesh."""
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            return func(values_of(args)[0])
        scaler = func is torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default  # local, of any meshes
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, DTensor)]
        if not scaler and len({x.device_mesh for x in given}) > 1:
            if func._schema.name.startswith(("aten::_foreach_", "aten::_fused_")) and len(_by_mesh(args)) > 1:
                return _one_by_one(func, args, kwargs)
            instead = _brought_together(func, given)
            args, kwargs = tree_map(lambda x: instead.get(id(x), x), (args, kwargs))
        same: dict[int, Tensor] = {}

        def plain(x: Any) -> Any:
            if isinstance(x, cls):
                made = x.plain()
                same[id(made)] = x
                return made
            return x

        def marked(x: Any) -> Any:
            if id(x) in same:
                return same[id(x)]
            return _marked(x, given[0]._local_tensor.device) if isinstance(x, DTensor) else x

        args, kwargs = tree_map(plain, (args, kwargs))
        return tree_map(marked, func(*args, **kwargs))

    def plain(self) -> DTensor:
        """The same for PyTorch alone, in the same memory."""
        return _dtensor(DTensor, self._local_tensor, self._spec)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """All of it, on every rank. All ranks call it."""
        made: DTensor = _OnAll.apply(self)  # type: ignore[no-untyped-call]
        return made.to_local(grad_placements=grad_placements)

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **options: Any
    ) -> DTensor:
        """As DTensors are; on all ranks where it is to be replicated, or of another mesh."""
        mesh, wanted = device_mesh or self.device_mesh, placements or self.placements
        if mesh == self.device_mesh and not all(isinstance(one, Replicate) for one in wanted):
            cut = super().redistribute(mesh, wanted, **options)
            made: DTensor = _Marked.apply(cut)  # type: ignore[no-untyped-call]
            return made
        everywhere: DTensor = _OnAll.apply(self)  # type: ignore[no-untyped-call]
        same = mesh in (self.device_mesh, everywhere.device_mesh) and all(isinstance(one, Replicate) for one in wanted)
        return everywhere if same else everywhere.redistribute(mesh, wanted, **options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def bring(self, gradient: DTensor) -> DTensor:
        """A gradient of it, however it lies, as this lies."""
        mesh, device = self.device_mesh, self._local_tensor.device
        here = gradient if gradient.device_mesh == mesh else _on(mesh, _value(gradient))
        plain = _dtensor(DTensor, here._local_tensor, here._spec)
        return _marked(plain.redistribute(mesh, self.placements), device)


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls a SubmeshDTensor's own `__torch_dispatch__`, which torch 2.11 passes over."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(x, SubmeshDTensor) for x in tree_leaves((args, kwargs))):
            return SubmeshDTensor.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def _by_mode(_: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """What a function makes of a SubmeshDTensor, as its `__torch_function__`: its operators go through `_Mode`.

    Where autograd records, tensors of several meshes are brought together before: no mode is on in its backward pass.
    """
    with torch._C.DisableTorchFunctionSubclass(), _Mode():  # type: ignore[no-untyped-call]
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, DTensor)]
        if torch.is_grad_enabled() and len({x.device_mesh for x in given}) > 1:
            some = (x for x in given if isinstance(x, SubmeshDTensor) and x.requires_grad)
            instead = {id(x): _OnAll.apply(x) for x in some}  # type: ignore[no-untyped-call]
            args, kwargs = tree_map(lambda x: instead.get(id(x), x), (args, kwargs))
        return func(*args, **kwargs)


# Optimizers take their fast way for these types only; DTensor adds itself in the same way.
_foreach_supported_types.append(SubmeshDTensor)


def values_of(tensors: Iterable[DTensor]) -> list[Tensor]:
    """All of each of these on every rank, in one message from those that have them. All ranks call this."""
    wholes, sizes, mine = list[Tensor](), list[int](), list[bool]()
    for one in tensors:
        mesh, plain = one.device_mesh, _dtensor(DTensor, one._local_tensor, one._spec)
        if mesh.get_coordinate() is None:
            whole = torch.empty(one.shape, dtype=one.dtype, device=one._local_tensor.device)
        else:
            whole = plain.full_tensor().detach().contiguous()
        wholes.append(whole)
        sizes.append(-(-whole.nbytes // ALIGNMENT) * ALIGNMENT)
        mine.append(int(mesh.mesh.flatten()[0]) == torch.distributed.get_rank())
        everyone = _everyone[mesh]
    flat = torch.zeros(sum(sizes), dtype=torch.uint8, device=wholes[0].device)
    parts = [part[: whole.nbytes] for part, whole in zip(torch.split(flat, sizes), wholes, strict=True)]
    for part, whole, first in zip(parts, wholes, mine, strict=True):
        if first:
            part.copy_(whole.reshape(-1).view(torch.uint8))
    for axis in range(everyone.ndim):  # one rank has what all others have zeros of
        torch.distributed.all_reduce(flat, group=everyone.get_group(axis))
    return [part.view(whole.dtype).view(whole.shape) for part, whole in zip(parts, wholes, strict=True)]


def _dtensor(kind: type[DTensor], local: Tensor, spec: DTensorSpec) -> DTensor:
    return kind(local, spec, requires_grad=False)


def _on(mesh: DeviceMesh, value: Tensor) -> DTensor:
    """A tensor that all ranks have, replicated on a mesh."""
    meta = TensorMeta(value.shape, value.stride(), value.dtype)
    spec = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, meta)
    here = value if mesh not in _everyone or mesh.get_coordinate() is not None else value.new_empty(0)
    return _dtensor(SubmeshDTensor if mesh in _everyone else DTensor, here, spec)


def _value(tensor: DTensor) -> Tensor:
    """All of a tensor of all ranks."""
    whole = tensor._local_tensor if _is_whole(tensor) else tensor.full_tensor()
    return whole


def _is_whole(tensor: DTensor) -> bool:
    return all(isinstance(one, Replicate) for one in tensor.placements)


def _marked(made: DTensor, device: torch.device) -> DTensor:
    """What was computed, as a SubmeshDTensor where it is of some ranks. device: of what it was computed of."""
    if made.device_mesh not in _everyone:
        return made
    local = made._local_tensor
    if local.device != device and made.device_mesh.get_coordinate() is None:  # PyTorch makes these on the CPU
        local = local.to(device)
    return _dtensor(SubmeshDTensor, local, made._spec)


def _by_mesh(args: Sequence[Any]) -> dict[DeviceMesh | None, list[int]]:
    """The places in the first list of tensors, by their mesh."""
    first = next((arg for arg in args if isinstance(arg, list | tuple)), ())
    places: dict[DeviceMesh | None, list[int]] = {}
    for i, x in enumerate(first):
        places.setdefault(x.device_mesh if isinstance(x, DTensor) else None, []).append(i)
    return places


def _one_by_one(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
    """What is computed of lists of tensors, mesh by mesh."""
    places = _by_mesh(args)
    count, made = sum(map(len, places.values())), dict[int, Any]()

    def some(x: Any, where: Sequence[int]) -> Any:
        return [x[i] for i in where] if isinstance(x, list | tuple) and len(x) == count else x

    for where in places.values():
        given = {key: some(x, where) for key, x in kwargs.items()}
        result = SubmeshDTensor.__torch_dispatch__(func, (), tuple(some(x, where) for x in args), given)
        made |= dict(zip(where, result or (), strict=False))
    return [made[i] for i in range(count)] if made else None


def _brought_together(func: Any, given: Sequence[DTensor]) -> dict[int, DTensor]:
    """By id: what stands for tensors that are not of the mesh on which all are computed with.

    LayerwiseError where that cannot be written to.
    """
    of_some = [x for x in given if x.device_mesh in _everyone]
    meshes, others = {x.device_mesh for x in of_some}, [x for x in given if x.device_mesh not in _everyone]
    numbers = all(not x.dim() for x in given)
    if len(meshes) == 1 and not numbers and all(not x.dim() or _is_whole(x) for x in others):
        (mesh,) = meshes
        return {id(x): _on(mesh, _value(x)) for x in others}
    if func._schema.is_mutable:
        raise LayerwiseError(
            f"{func._schema.name.removeprefix('aten::')}() would write what is computed of tensors of other ranks to a "
            "parameter or gradient of a layer that is on some ranks only: give it numbers"
        )
    mesh = others[0].device_mesh if others else _everyone[of_some[0].device_mesh]
    values = values_of(of_some)
    return {id(x): _on(mesh, value) for x, value in zip(of_some, values, strict=True)}


class _OnAll(torch.autograd.Function):
    """All of it, replicated on all ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: SubmeshDTensor) -> DTensor:
        ctx.mesh = tensor.device_mesh
        return _on(_everyone[ctx.mesh], values_of([tensor])[0])

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> DTensor:
        return _on(ctx.mesh, _value(gradient))


class _Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> DTensor:
        return _marked(tensor, tensor._local_tensor.device)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> DTensor:
        return gradient
