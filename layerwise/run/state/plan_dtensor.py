"""PlanDTensor: a parameter of a split plan, its gradient, what an optimizer keeps of it.

What is computed of some is a plain tensor, alike on all ranks, but for what goes element by element:

- Element-wise operations go to the local tensors, and make a PlanDTensor. A plain tensor beside it is a full one, of
  which the rank takes its part; one that has a PlanDTensor of another plan's mesh beside it, too.
- Sums, means, norms, maxima: each rank's own part, then one message of all ranks.
- Everything else is computed of full tensors, which all ranks put together. What it writes to has its part of it.
- Random numbers are rank 0's.

Gradients of what is computed so are the means over the ranks, as those of the model are. All ranks compute the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._foreach_utils import _foreach_supported_types
from torch.utils._pytree import tree_leaves, tree_map

from layerwise.errors import LayerwiseError
from layerwise.run.state.meshes import (
    UNSCALE,
    all_reduce,
    everyone,
    everywhere,
    of_rank,
    part_of,
    plain_dtensor,
    unscale,
)
from layerwise.run.state.operations import (
    OF_SHAPE,
    each,
    each_of,
    elementwise,
    is_mask,
    is_view,
    name_of,
    one_number,
    own_tensors,
    reduced,
    written_by,
)

COMPUTED = frozenset(("data", "T", "mT", "H", "mH"))  # attributes that are further tensors
DISPATCHES = torch.__version__ >= "2.13"
ASKS = frozenset(("grad", "backward"))  # functions that ask for gradients of it
PUT, MASKED = torch.ops.aten.index_put_.default, torch.ops.aten.masked_fill_.Tensor
SHARED = list[tuple["PlanDTensor", Tensor]]()  # the last view that was asked for: of which, and the full tensor


class PlanDTensor(DTensor):
    """A DTensor of a plan's mesh, of all ranks or of some."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Returns what `func` makes of it: where gradients are wanted, one that makes means over the ranks of these."""
        kwargs, name = kwargs or {}, func.__name__
        with torch._C.DisableTorchFunctionSubclass():
            if name == "__get__" and func.__self__.__name__ not in COMPUTED:
                return func(*args, **kwargs)
            if name == "__set__" and func.__self__.__name__ == "data" and isinstance(args[0], cls):
                return _set_data(*args)
            if name in ASKS or (name in ("__get__", "__set__") and func.__self__.__name__ not in COMPUTED):
                return func(*args, **kwargs)
            if name == "__setitem__":
                return _put(*args)
            if not torch.is_grad_enabled() and name[0] == "_" and name[1] == "f":  # _foreach_, _fused_
                return _dispatched(func, args, kwargs)
            leaves = tree_leaves((args, kwargs)) if torch.is_grad_enabled() else ()
            if some := [x for x in leaves if isinstance(x, cls) and x.requires_grad]:
                if any(isinstance(x, Tensor) and not isinstance(x, DTensor) for x in leaves):
                    full = {id(x): _Full.apply(x) for x in {id(x): x for x in some}.values()}  # type: ignore[no-untyped-call]
                    args, kwargs = tree_map(lambda x: full.get(id(x), x), (args, kwargs))
                    return _dispatched(func, args, kwargs)
                mesh = everyone(some[0])
                return tree_map(lambda x: _mean(x, mesh), _dispatched(func, args, kwargs))
            SHARED.clear()
            result = _dispatched(func, args, kwargs)
            if SHARED and type(result) is Tensor:
                return PartView.of(result, *SHARED.pop())
            return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        """Returns what the operation makes: see the module."""
        kwargs = kwargs or {}
        if func is PUT and is_mask(*args):  # p[p < 0] = 0
            func, args = MASKED, (args[0], args[1][0], args[2])
        if func is UNSCALE:
            return unscale(*args)
        if func.namespace == "c10d":
            raise LayerwiseError(
                "parameters that the plan splits were to be sent as they are, as DistributedDataParallel does around a "
                "module that holds the parallel one: leave it out, or, where that module has other parameters, name "
                "those of the parallel one in its `_ddp_params_and_buffers_to_ignore` first"
            )
        name = name_of(func)
        if name == "is_same_size":
            return args[0].shape == args[1].shape
        if name in OF_SHAPE:
            local = func(args[0]._local_tensor, *args[1:], **kwargs)
            if tuple(args[1]) != tuple(args[0].shape):
                return local
            return like_it(args[0], part_of(local, args[0]).contiguous())
        if name.startswith(("_foreach_", "_fused_")):
            return _of_lists(func, name, args, kwargs)
        if elementwise(func):
            written = written_by(func, args, kwargs)
            found = _local(func, args, kwargs, written)
            if found is not NotImplemented:
                return found
        if isinstance(args[0], DTensor) and (number := one_number(func, args, kwargs)) is not None:
            return reduced(number, [args[0]], kwargs.get("dtype"))[0]
        return _in_full(func, args, kwargs)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Returns the full tensor, on every rank. All ranks call it."""
        full: Tensor = _Full.apply(self) if torch.is_grad_enabled() and self.requires_grad else everywhere(self)  # type: ignore[no-untyped-call]
        return full

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **options: Any
    ) -> DTensor:
        """Returns PyTorch's own DTensor of the values, redistributed."""
        if all(isinstance(placement, Replicate) for placement in placements or self.placements):
            mesh = device_mesh if device_mesh not in (None, self.device_mesh) else everyone(self)
            return DTensor.from_local(everywhere(self.detach()), mesh, (Replicate(),) * mesh.ndim, run_check=False)
        return plain_dtensor(self).redistribute(device_mesh, placements, **options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Returns what pickle writes of it: this rank's shard, which `_shard_of` gives to no other rank."""
        if self._spec.is_replicated() and everyone(self) is self.device_mesh:
            return plain_dtensor(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        return _shard_of, (torch.distributed.get_rank(), plain_dtensor(self))

    def numpy(self, *, force: bool = False) -> Any:
        """Returns an array of the full tensor."""
        return everywhere(self.detach() if force else self).numpy(force=force)

    def tolist(self) -> Any:
        """Returns the full tensor as a list."""
        return everywhere(self).tolist()

    def storage(self) -> NoReturn:  # what safetensors and Accelerate know shared memory by
        """LayerwiseError: a file of it would have this rank's part."""
        raise LayerwiseError(
            "the memory of a parameter that the plan splits was asked for, as safetensors and Accelerate's save_model "
            "and save_state do, and each rank has a part of it: give accelerator.save(model.full_state_dict(), file), "
            "or safetensors' save_file model.full_state_dict(), which every rank calls"
        )

    @property
    def _fsdp_orig_uid(self) -> NoReturn:  # what fully_shard asks a parameter for, from torch 2.13 on
        raise LayerwiseError(
            "parameters that the plan splits are shared out already, and fully_shard of a module that holds the "
            "parallel one would share them out once more: leave fully_shard out"
        )

    def bring(self, gradient: Tensor) -> DTensor:
        """Returns a gradient of it as this lies, also a plain one of all of it, as some of autograd's formulas make."""
        full = everywhere(gradient) if isinstance(gradient, DTensor) else gradient
        return like_it(self, part_of(full, self).contiguous())


class PartView(Tensor):
    """A part of a parameter, `p[0]`, or another view: of the full tensor. What is written to it, the parameter has."""

    _of: tuple[PlanDTensor, Tensor]

    @staticmethod
    def of(view: Tensor, p: PlanDTensor, full: Tensor) -> Tensor:
        """Returns one."""
        part = view.as_subclass(PartView)
        part._of = p, full
        return part

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Returns what `func` makes of the plain tensor."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        some = [x for x in tree_leaves((args, kwargs)) if isinstance(x, cls)]
        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = tree_map(lambda x: x.as_subclass(Tensor) if isinstance(x, cls) else x, (args, kwargs))
            result = func(*args, **kwargs)
            for p, full in {id(x): x._of for x in some}.values():
                if name == "__setitem__" or name.endswith("_") or "out" in kwargs:
                    p._local_tensor.copy_(part_of(full, p))
                if type(result) is Tensor and result.untyped_storage()._cdata == full.untyped_storage()._cdata:
                    return cls.of(result, p, full)
            return result


class _Dispatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which operations of any PlanDTensor run as its class says."""

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        """Returns what that class makes of these, and PyTorch of tensors of which none is one."""
        kwargs = kwargs or {}
        some = any(isinstance(x, PlanDTensor) for x in tree_leaves((args, kwargs)))
        return PlanDTensor.__torch_dispatch__(func, types, args, kwargs) if some else func(*args, **kwargs)


def _dispatched(func: Any, args: Any, kwargs: Any) -> Any:
    if DISPATCHES:
        return func(*args, **kwargs)
    with _Dispatch():  # type: ignore[no-untyped-call] # C++ takes an object of a subclass for a DTensor
        return func(*args, **kwargs)


def _shard_of(rank: int, tensor: DTensor) -> DTensor:
    """Returns a shard that rank `rank` has pickled. LayerwiseError on another rank, which would take it for its own."""
    if torch.distributed.is_initialized() and torch.distributed.get_rank() == rank:
        return tensor
    raise LayerwiseError(
        f"the file has the shards of rank {rank} alone, as torch.save(model.state_dict()) writes them where a plan "
        "splits layers: save model.full_state_dict(), which every rank calls, or with layerwise.save or "
        "torch.distributed.checkpoint"
    )


torch.serialization.add_safe_globals([_shard_of])  # as PyTorch does for its own DTensors


def wrap(local: Tensor, spec: DTensorSpec) -> PlanDTensor:
    """Returns the DTensor of this local tensor, made as FSDP2 does; `from_local` goes through autograd."""
    dtensor: PlanDTensor = PlanDTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return dtensor


def like_it(tensor: DTensor, local: Tensor) -> PlanDTensor:
    """Returns a DTensor that lies as another does, maybe of another type."""
    spec, meta = tensor._spec, tensor._spec.tensor_meta
    if meta is not None and meta.dtype != local.dtype:
        spec = DTensorSpec(spec.mesh, spec.placements, TensorMeta(meta.shape, meta.stride, local.dtype))
    return wrap(local, spec)


def _beside(x: Any, target: DTensor) -> Any:
    """Returns what of an argument is this rank's, beside its part of `target`; NotImplemented where it does not fit."""
    if not isinstance(x, Tensor):
        return x
    if isinstance(x, DTensor):
        own, spec = x._spec, target._spec
        if own is spec or (own.placements == spec.placements and own.mesh == spec.mesh and own.shape == spec.shape):
            return x._local_tensor
        x = everywhere(x)
    if not x.dim():
        return x
    if x.shape == target.shape:
        return part_of(x, target)
    try:
        return part_of(x.expand(target.shape), target)
    except RuntimeError:
        return NotImplemented


def _local(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], written: Sequence[Any]) -> Any:
    """Returns what an element-wise operation makes of this rank's parts; NotImplemented where shapes are unlike."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    if written and not isinstance(written[0], DTensor):
        return NotImplemented
    some = [x for x in tensors if isinstance(x, DTensor)]
    target = written[0] if written else max(some, key=lambda x: x.dim())
    if any(x.dim() > target.dim() for x in tensors):
        return NotImplemented
    local = {id(x): _beside(x, target) for x in tensors}
    if any(x is NotImplemented for x in local.values()):
        return NotImplemented
    local_args, named = each_of(lambda x: local.get(id(x), x) if isinstance(x, Tensor) else x, args, kwargs)
    result = func(*local_args, **named)
    if written:
        return written[0]
    return like_it(target, result) if isinstance(result, Tensor) else result


def _of_lists(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns what an operation makes of lists of tensors: of PlanDTensors and of others, each by themselves."""
    first = args[0]
    dtensors = [i for i, x in enumerate(first) if isinstance(x, DTensor)]
    count, made = len(first), dict[int, Any]()

    def rows(x: Any, where: Sequence[int]) -> Any:
        if isinstance(x, Tensor) and isinstance(x, DTensor):
            return everywhere(x)
        if not (isinstance(x, list | tuple) and len(x) == count):
            return x
        if len(where) == count and all(type(y) is PlanDTensor and y._spec is z._spec for y, z in zip(x, first)):
            return [y._local_tensor for y in x]
        return [
            _beside(x[i], first[i]) if isinstance(first[i], DTensor) else everywhere(x[i]) if isinstance(x[i], DTensor) else x[i]
            for i in where
        ]

    if not elementwise(func):
        for i, x in enumerate(first):  # one by one, but for norms
            if name != "_foreach_norm" or not isinstance(x, DTensor):
                made[i] = func([everywhere(x) if isinstance(x, DTensor) else x], *args[1:], **kwargs)[0]
        if name == "_foreach_norm":
            numbers = reduced(("norm", float(args[1] if len(args) > 1 else 2)), [first[i] for i in dtensors], kwargs.get("dtype"))
            made |= dict(zip(dtensors, numbers, strict=True))
        return [made[i] for i in range(count)]
    for where in (dtensors, [i for i in range(count) if i not in set(dtensors)]):
        if where:
            named = {key: rows(x, where) for key, x in kwargs.items()}
            result = func(*(rows(x, where) for x in args), **named)
            for i, x in zip(where, result or (), strict=False):
                made[i] = like_it(first[i], x) if isinstance(first[i], DTensor) else x
    return [made[i] for i in range(count)] if made else None


def _in_full(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns what an operation makes of full tensors, on all ranks; DTensors that it writes to have their part of it.

    All ranks call this. LayerwiseError where it would change a shape.
    """
    if torch.Tag.inplace_view in func.tags:
        name = name_of(func)
        raise LayerwiseError(
            f"{name}() would change the shape of a parameter that the plan splits, or its gradient, in place: take "
            f"what {name.removesuffix('_')}() returns"
        )
    written = [x for x in tree_leaves(written_by(func, args, kwargs)) if isinstance(x, DTensor)]
    fulls: dict[int, tuple[DTensor, Tensor]] = {}

    def full(x: Any) -> Any:
        if isinstance(x, DTensor) and id(x) not in fulls:
            value = everywhere(x)
            shares = value is x._local_tensor and (is_view(func) or any(x is one for one in written))
            fulls[id(x)] = x, value.clone() if shares else value
        return fulls[id(x)][1] if isinstance(x, DTensor) else x

    full_args, named = each_of(full, args, kwargs)
    result = func(*full_args, **named)
    one = next(x for x, _ in fulls.values())
    if torch.Tag.nondeterministic_seeded in func.tags:
        mesh = everyone(one)
        rank = int(mesh.mesh.flatten()[0])
        if written:
            for x in written:
                fulls[id(x)][1].copy_(of_rank(fulls[id(x)][1], rank, mesh))
        else:
            result = each(lambda x: of_rank(x, rank, mesh) if isinstance(x, Tensor) else x, (result,))[0]
    stands_for = {id(fulls[id(x)][1]): x for x in written}
    for x in written:
        x._local_tensor.copy_(part_of(fulls[id(x)][1], x))
    if is_view(func) and isinstance(one, PlanDTensor):
        SHARED[:] = [(one, fulls[id(one)][1])]
    return each(lambda x: stands_for.get(id(x), x) if isinstance(x, Tensor) else x, (result,))[0]


def _put(p: Tensor, where: Any, value: Any) -> None:
    """Writes `p[where] = value`."""
    where, value = tree_map(lambda x: everywhere(x) if isinstance(x, DTensor) else x, (where, value))
    if isinstance(p, DTensor):
        full = everywhere(p).detach().clone()
        full[where] = value
        p.copy_(full)
    else:
        p[where] = value


def _set_data(p: PlanDTensor, value: Tensor) -> None:
    """Writes `p.data = value`, in the memory of before. LayerwiseError for another shape or type."""
    if value.shape != p.shape or value.dtype != p.dtype:
        raise LayerwiseError(
            "p.data = x was written of a parameter that the plan splits over the ranks, with another shape or type: "
            "give load_state_dict the values, and change types by model.to()"
        )
    p._local_tensor.copy_(_beside(value.detach(), p))


def _mean(x: Any, mesh: DeviceMesh) -> Any:
    return _Mean.apply(x, mesh) if type(x) is Tensor and x.requires_grad else x  # type: ignore[no-untyped-call]


class _Mean(torch.autograd.Function):
    """What all ranks have alike; its gradient is the mean over the ranks, as those of parameters are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _mean_over(ctx.mesh, gradient), None


class _Full(torch.autograd.Function):
    """The full tensor of a PlanDTensor; the gradient is the rank's part of the mean over the ranks."""

    @staticmethod
    def forward(ctx: Any, p: PlanDTensor) -> Tensor:
        ctx.like = like_it(p, p._local_tensor.detach())
        full = everywhere(p)
        return full.clone() if full is p._local_tensor else full

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> DTensor:
        mean = _mean_over(everyone(ctx.like), gradient)
        return like_it(ctx.like, part_of(mean, ctx.like).contiguous())


def _mean_over(mesh: DeviceMesh, gradient: Tensor) -> Tensor:
    mean = gradient / mesh.size()
    all_reduce(mean, mesh)
    return mean


_foreach_supported_types.append(PlanDTensor)  # type: ignore[arg-type] # clip_grad_norm_ and optimizers take lists then
