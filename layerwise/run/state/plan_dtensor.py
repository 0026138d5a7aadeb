"""PlanDTensor: a parameter of a split plan, or what is computed of some, in every rank's hands.

It is a DTensor that does right what DTensor (torch 2.11 to 2.15) does wrong without a word, or not at all:

- `item`, `float` and `bool` of a number that is the sum (maximum, ...) of all ranks' shards give the rank's own part.
- GradScaler looks for infinities over the mesh axes that cut the first gradient, not over those that cut others.
- Random numbers on a CPU are drawn by each rank for its own shard: here they are refused.
- A sum or a mean (Adafactor's, for one) that is written to raises, as it is not added up over the ranks yet.
- A DTensor of a sub-mesh, of a layer on some of the ranks, is computed with there alone: elsewhere sums and norms are
  zeros, `full_tensor()` is empty, and tensors of two meshes do not mix. Here what is a number, or is asked for as a
  full tensor, is every rank's.

Element-wise operations, as optimizers have them, go to the local tensors at once, which takes less than DTensor's way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from layerwise.errors import LayerwiseError

ALIGNMENT = 16  # bytes: of tensors that travel together
ALONE = 2  # users of a tensor's memory: the tensor, and the object by which one asks
NUMBER = torch.ops.aten._local_scalar_dense.default
CAT = torch.ops.aten.cat.default
UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default

_all_ranks: dict[DeviceMesh, DeviceMesh] = {}  # by sub-mesh: the mesh of all ranks


def register(mesh: DeviceMesh, all_ranks: DeviceMesh) -> None:
    """Says which mesh has all ranks, of which `mesh` has some."""
    _all_ranks[mesh] = all_ranks


class PlanDTensor(DTensor):
    """A DTensor of a plan's mesh, of all ranks or of some. What is computed of it alone is one again.

    Of tensors of several meshes, numbers and full tensors are brought to the mesh of the others; what is left is
    brought to all ranks. All ranks compute the same, so that those which have a value can send it.
    """

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        """Returns what the operation makes of local tensors, where these lie alike; else what DTensor does."""
        kwargs = kwargs or {}
        if _writes(func) and isinstance(args[0], cls) and args[0]._is_view():
            _check_view(args[0])
        if _elementwise(func) and (columns := _aligned(args, kwargs)) is not None:
            return _run_locally(func, args, kwargs, columns)
        if _writes(func) and _of_numbers(args, kwargs):  # an optimizer's own, which are no DTensors
            return func(*_each(lambda x: _number(x) if isinstance(x, DTensor) else x, args), **kwargs)
        if func is NUMBER:
            return func(_number(args[0]))
        if func is UNSCALE:
            return _unscale(*args)
        if func.namespace == "c10d" or (func is CAT and not all(isinstance(x, DTensor) for x in args[0])):
            raise LayerwiseError(
                "parameters that the plan splits were to be sent as they are, as DistributedDataParallel does around a "
                "module that holds the parallel one: leave it out, or, where that module has other parameters, name "
                "those of the parallel one in its `_ddp_params_and_buffers_to_ignore` first"
            )
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise LayerwiseError(
                "random numbers were asked for of a parameter that the plan splits, and would be other ones than one "
                "device's: initialise the model before, or by model.apply(fn), or give load_state_dict the values"
            )
        given: list[DTensor] = []
        _each(lambda x: given.append(x) if isinstance(x, DTensor) else None, (*args, *kwargs.values()))
        if len({x.device_mesh for x in given}) > 1 and any(x.device_mesh in _all_ranks for x in given):
            if func._schema.name.startswith(("aten::_foreach_", "aten::_fused_")) and len(_by_mesh(args)) > 1:
                return _mesh_by_mesh(func, args, kwargs)
            instead = _brought_together(func, given)
            args = _each(lambda x: instead.get(id(x), x), args)
        same: dict[int, Tensor] = {}

        def plain(x: Any) -> Any:
            if isinstance(x, cls):
                made = _plain(x)
                same[id(made)] = x
                return made
            return x

        def marked(x: Any) -> Any:
            if id(x) in same:
                return same[id(x)]
            return _marked(x, given[0]._local_tensor.device) if isinstance(x, DTensor) else x

        named = dict(zip(kwargs, _each(plain, kwargs.values()), strict=True))
        try:
            made = func(*_each(plain, args), **named)
        except RuntimeError as error:
            if "placement changes" not in str(error) or not _settled(args[0]):
                raise
            return cls.__torch_dispatch__(func, types, args, kwargs)
        return _each(marked, (made,))[0]

    if torch.__version__ < "2.13":  # its C++ takes an object of a subclass for a DTensor, and does not come here

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            """Returns what `func` makes of it, with this class's way to run operations."""
            with torch._C.DisableTorchFunctionSubclass():
                if getattr(func, "__name__", "") == "__get__":
                    return func(*args, **(kwargs or {}))
                kwargs = kwargs or {}
                given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, DTensor)]
                if torch.is_grad_enabled() and len({x.device_mesh for x in given}) > 1:  # back, nothing dispatches
                    some = (x for x in given if x.device_mesh in _all_ranks and x.requires_grad)
                    instead = {id(x): _OnAllRanks.apply(x) for x in some}  # type: ignore[no-untyped-call]
                    args, kwargs = tree_map(lambda x: instead.get(id(x), x), (args, kwargs))
                with _Dispatch():  # type: ignore[no-untyped-call]
                    return func(*args, **kwargs)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The full tensor, on every rank. All ranks call it."""
        return self.redistribute(placements=(Replicate(),) * self.device_mesh.ndim).to_local(
            grad_placements=grad_placements
        )

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **options: Any
    ) -> DTensor:
        """Redistributes it; one of some ranks is on all ranks where it is to be replicated, or of another mesh."""
        mesh, wanted = device_mesh or self.device_mesh, placements or self.placements
        replicated = all(isinstance(one, Replicate) for one in wanted)
        if self.device_mesh not in _all_ranks or (mesh == self.device_mesh and not replicated):
            made: DTensor = _Marked.apply(super().redistribute(mesh, wanted, **options))  # type: ignore[no-untyped-call]
            return made
        everywhere: DTensor = _OnAllRanks.apply(self)  # type: ignore[no-untyped-call]
        same = mesh in (self.device_mesh, everywhere.device_mesh) and replicated
        return everywhere if same else everywhere.redistribute(mesh, wanted, **options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Returns what pickle writes of it: this rank's shard, which `_shard_of` gives to no other rank."""
        if _replicated(self) and self.device_mesh not in _all_ranks:
            return _plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        return _shard_of, (torch.distributed.get_rank(), _plain(self))

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

    def bring(self, gradient: DTensor) -> DTensor:
        """A gradient of it, however it lies, as this lies."""
        mesh, device = self.device_mesh, self._local_tensor.device
        here = gradient if gradient.device_mesh == mesh else _on(mesh, _full(gradient))
        plain = _plain(here)
        return _marked(plain.redistribute(mesh, self.placements), device)


class _Dispatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which operations of any PlanDTensor run as its class says."""

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        """Returns what that class makes of these, and PyTorch of tensors of which none is one."""
        kwargs = kwargs or {}
        some = any(isinstance(x, PlanDTensor) for x in tree_leaves((args, kwargs)))
        return PlanDTensor.__torch_dispatch__(func, types, args, kwargs) if some else func(*args, **kwargs)


def _shard_of(rank: int, tensor: DTensor) -> DTensor:
    """A shard that rank `rank` has pickled. LayerwiseError in another rank's hands, which would take it for its own."""
    if torch.distributed.is_initialized() and torch.distributed.get_rank() == rank:
        return tensor
    raise LayerwiseError(
        f"the file has the shards of rank {rank} alone, as torch.save(model.state_dict()) writes them where a plan "
        "splits layers: save model.full_state_dict(), which every rank calls, or with layerwise.save or "
        "torch.distributed.checkpoint"
    )


torch.serialization.add_safe_globals([_shard_of])  # as PyTorch does for its own DTensors


def _plain(tensor: DTensor) -> DTensor:
    """Returns it as PyTorch's own DTensor, in the same memory."""
    made: DTensor = DTensor(tensor._local_tensor, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return made


def wrap(local: Tensor, spec: DTensorSpec) -> PlanDTensor:
    """The DTensor that has this local tensor. As FSDP2 makes them; `from_local` goes through autograd."""
    made: PlanDTensor = PlanDTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return made


def _each(act: Callable[[Any], Any], values: Iterable[Any]) -> tuple[Any, ...]:
    """Returns what `act` makes of an operation's arguments or results, and of those in lists."""
    return tuple(type(v)(map(act, v)) if type(v) in (list, tuple) else act(v) for v in values)


# ---- element-wise operations ----


@cache
def _elementwise(func: Any) -> bool:
    """True if each element of the result is made of the elements in its place."""
    name: str = func._schema.name.removeprefix("aten::")
    if name.startswith(("_foreach_", "_fused_")):
        return name.endswith("_") or name == "_foreach_sqrt"  # of Adam; others may reduce
    pointwise: bool = torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags
    return pointwise or name in ("zero_", "fill_", "copy_")


def _aligned(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[DTensor] | None:
    """The tensors of the first argument, where those of all others lie as they do, one by one, or are numbers."""
    first = args[0] if args else None
    columns: list[Any] = list(first) if isinstance(first, list | tuple) else [first]
    if not all(isinstance(x, DTensor) and not any(p.is_partial() for p in x._spec.placements) for x in columns):
        return None

    def alike(x: Any, column: DTensor) -> bool:
        if not isinstance(x, DTensor):
            return not isinstance(x, Tensor) or x.dim() == 0
        mine, spec = x._spec, column._spec
        if mine is spec or (mine.placements == spec.placements and mine.mesh == spec.mesh and mine.shape == spec.shape):
            return True
        return x.dim() == 0 and mine.mesh == spec.mesh and _replicated(x)

    for arg in (*args[1:], *kwargs.values()):
        if not isinstance(arg, list | tuple):
            if not all(alike(arg, column) for column in (columns if isinstance(arg, DTensor) else columns[:1])):
                return None
        elif any(isinstance(x, Tensor) for x in arg) and not (
            len(arg) == len(columns) and all(map(alike, arg, columns))
        ):
            return None
    return columns


def _run_locally(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], columns: Sequence[DTensor]) -> Any:
    """Returns what an element-wise operation makes of local tensors."""

    def local(x: Any) -> Any:
        return x._local_tensor if isinstance(x, DTensor) else x

    named = dict(zip(kwargs, _each(local, kwargs.values()), strict=True))
    made = func(*_each(local, args), **named)
    if func._schema.is_mutable:
        return args[0] if isinstance(args[0], Tensor) else None
    if not isinstance(made, Tensor):
        return [wrap(one, column._spec) for one, column in zip(made, columns, strict=True)]
    spec = columns[0]._spec
    meta = spec.tensor_meta
    if meta is not None and meta.dtype != made.dtype:
        spec = DTensorSpec(spec.mesh, spec.placements, TensorMeta(meta.shape, meta.stride, made.dtype))
    return wrap(made, spec)


# ---- numbers, and tensors of several meshes ----


@cache
def _writes(func: Any) -> bool:
    """True if the operation writes to its first argument."""
    first = func._schema.arguments[0].alias_info if func._schema.arguments else None
    return first is not None and first.is_write


def _of_numbers(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether plain tensors of one number are written to, and DTensors of one number are read."""
    written, *read = (list(x) if isinstance(x, list | tuple) else [x] for x in args)
    tensors = [x for xs in read for x in xs if isinstance(x, DTensor)]
    plain = all(type(x) is Tensor and x.numel() == 1 for x in written)
    named = any(isinstance(x, DTensor) for x in kwargs.values())
    return plain and bool(tensors) and not named and all(x.numel() == 1 for x in tensors)


def _check_view(view: PlanDTensor) -> None:
    """LayerwiseError where a part of a DTensor is to be written to, which DTensor has brought together elsewhere."""
    base: Any = view._base
    if isinstance(base, DTensor):
        here, there = (x._local_tensor.untyped_storage()._cdata for x in (view, base))
        if here != there and base._local_tensor.numel():  # a rank outside of a sub-mesh has nothing to write to
            raise LayerwiseError(
                "a part of a parameter that the plan splits, such as p[0], was written to, and would stay as it is: "
                "write before the model is made parallel, or by model.apply(fn), or all of p: p.copy_(x), p.mul_(mask)"
            )


def _settled(tensor: Any) -> bool:
    """Makes parts of a sum over the ranks the sum, in the tensor itself; False where it has none.

    Nor where another tensor has the same memory, a view or what `detach` returns: it would go on with the part.
    """
    if not isinstance(tensor, PlanDTensor) or not any(p.is_partial() for p in tensor.placements):
        return False
    storage = tensor._local_tensor.untyped_storage()
    if torch._C._storage_Use_Count(storage._cdata) > ALONE:
        return False
    made = _plain(tensor).redistribute(placements=(Replicate(),) * tensor.device_mesh.ndim)
    tensor._local_tensor, tensor._spec = made._local_tensor, made._spec
    return True


def _number(tensor: DTensor) -> Tensor:
    """A tensor of one element as every rank has it."""
    if tensor.device_mesh in _all_ranks:
        return full_tensors([tensor])[0]
    partial = any(isinstance(p, Partial) for p in tensor.placements)
    return tensor.full_tensor() if partial else tensor._local_tensor


def _unscale(gradients: Sequence[DTensor], found: Tensor, scale: Tensor) -> None:
    """GradScaler's: divides gradients by the scale; an infinity of any rank is found on all."""
    if not all(isinstance(gradient, DTensor) for gradient in gradients):
        raise LayerwiseError(
            "GradScaler was given the parallel model's parameters together with others, in one optimizer: give each an "
            "optimizer of its own"
        )
    UNSCALE([gradient._local_tensor for gradient in gradients], found, scale)
    for mesh in dict.fromkeys(_all_ranks.get(g.device_mesh, g.device_mesh) for g in gradients):
        for axis in range(mesh.ndim):
            torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, mesh.get_group(axis))


def full_tensors(tensors: Iterable[DTensor]) -> list[Tensor]:
    """The full tensors of these on every rank, in one message from those that have them. All ranks call this."""
    fulls, sizes, mine = list[Tensor](), list[int](), list[bool]()
    for one in tensors:
        mesh, plain = one.device_mesh, _plain(one)
        if mesh.get_coordinate() is None:
            full = torch.empty(one.shape, dtype=one.dtype, device=one._local_tensor.device)
        else:
            full = plain.full_tensor().detach().contiguous()
        fulls.append(full)
        sizes.append(-(-full.nbytes // ALIGNMENT) * ALIGNMENT)
        mine.append(int(mesh.mesh.flatten()[0]) == torch.distributed.get_rank())
        all_ranks = _all_ranks[mesh]
    flat = torch.zeros(sum(sizes), dtype=torch.uint8, device=fulls[0].device)
    parts = [part[: full.nbytes] for part, full in zip(torch.split(flat, sizes), fulls, strict=True)]
    for part, full, first in zip(parts, fulls, mine, strict=True):
        if first:
            part.copy_(full.reshape(-1).view(torch.uint8))
    for axis in range(all_ranks.ndim):  # one rank has what all others have zeros of
        torch.distributed.all_reduce(flat, group=all_ranks.get_group(axis))
    return [part.view(full.dtype).view(full.shape) for part, full in zip(parts, fulls, strict=True)]


def _on(mesh: DeviceMesh, value: Tensor) -> DTensor:
    """A tensor that all ranks have, replicated on a mesh."""
    meta = TensorMeta(value.shape, value.stride(), value.dtype)
    spec = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, meta)
    here = value if mesh not in _all_ranks or mesh.get_coordinate() is not None else value.new_empty(0)
    return wrap(here, spec)


def _full(tensor: DTensor) -> Tensor:
    """The full tensor of one of all ranks."""
    return tensor._local_tensor if _replicated(tensor) else tensor.full_tensor()


def _replicated(tensor: DTensor) -> bool:
    return all(isinstance(one, Replicate) for one in tensor.placements)


def _marked(made: DTensor, device: torch.device) -> DTensor:
    """Returns what was computed as a PlanDTensor. device: of what it was computed of."""
    local = made._local_tensor
    if local.device != device and made.device_mesh.get_coordinate() is None:  # PyTorch makes these on the CPU
        local = local.to(device)
    return wrap(local, made._spec)


def _by_mesh(args: Sequence[Any]) -> dict[DeviceMesh | None, list[int]]:
    """The places in the first list of tensors, by their mesh."""
    first = next((arg for arg in args if isinstance(arg, list | tuple)), ())
    places: dict[DeviceMesh | None, list[int]] = {}
    for i, x in enumerate(first):
        places.setdefault(x.device_mesh if isinstance(x, DTensor) else None, []).append(i)
    return places


def _mesh_by_mesh(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
    """Computes lists of tensors, mesh by mesh."""
    places = _by_mesh(args)
    count, made = sum(map(len, places.values())), dict[int, Any]()

    def some(x: Any, where: Sequence[int]) -> Any:
        return [x[i] for i in where] if isinstance(x, list | tuple) and len(x) == count else x

    for where in places.values():
        given = {key: some(x, where) for key, x in kwargs.items()}
        result = func(*(some(x, where) for x in args), **given)
        made |= dict(zip(where, result or (), strict=False))
    return [made[i] for i in range(count)] if made else None


def _brought_together(func: Any, given: Sequence[DTensor]) -> dict[int, DTensor]:
    """Returns, by id, what stands for tensors that are not on the mesh of the computation.

    LayerwiseError where that cannot be written to.
    """
    of_some = [x for x in given if x.device_mesh in _all_ranks]
    meshes, others = {x.device_mesh for x in of_some}, [x for x in given if x.device_mesh not in _all_ranks]
    numbers = all(not x.dim() for x in given)
    if len(meshes) == 1 and not numbers and all(not x.dim() or _replicated(x) for x in others):
        (mesh,) = meshes
        return {id(x): _on(mesh, _full(x)) for x in others}
    if func._schema.is_mutable:
        raise LayerwiseError(
            f"{func._schema.name.removeprefix('aten::')}() would write what is computed of tensors of other ranks to a "
            "parameter or gradient of a layer that is on some ranks only: give it numbers"
        )
    mesh = others[0].device_mesh if others else _all_ranks[of_some[0].device_mesh]
    values = full_tensors(of_some)
    return {id(x): _on(mesh, value) for x, value in zip(of_some, values, strict=True)}


class _OnAllRanks(torch.autograd.Function):
    """A tensor of some ranks becomes one that is replicated on all."""

    @staticmethod
    def forward(ctx: Any, tensor: PlanDTensor) -> DTensor:
        ctx.mesh = tensor.device_mesh
        return _on(_all_ranks[ctx.mesh], full_tensors([tensor])[0])

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> DTensor:
        return _on(ctx.mesh, _full(gradient))


class _Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> DTensor:
        return _marked(tensor, tensor._local_tensor.device)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> DTensor:
        return gradient
