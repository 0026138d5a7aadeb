"""PlanDTensor: a parameter of a split plan, or what is computed of some, in every rank's hands.

It is a DTensor that does right what DTensor (torch 2.11 to 2.15) does wrong without a word, or not at all:

- `item`, `float` and `bool` of a number that is the sum (maximum, ...) of all ranks' shards give the rank's own part.
- GradScaler looks for infinities over the mesh axes that cut the first gradient, not over those that cut others.
- Random numbers on a CPU are drawn by each rank for its own shard: here they are refused.
- A sum or a mean (Adafactor's, for one) that is written to raises, as it is not added up over the ranks yet.
- Sums of norms (`p.norm(dim=1).sum()`), or of `any`, add up the ranks' parts like terms of a sum; `p.sum() + q.sum()`
  after `p.sum() + 1.0` raises.
- Functions without a rule raise, wait for ever where some ranks have the parameter alone (`argmax`), or follow rules
  that are wrong of uneven shards (`mse_loss`): here all but a list of functions are made of full tensors.
- A number (a norm, a penalty on weights) beside a rank's own tensor raises: here it is a plain number (`PlanNumber`).
- A DTensor of a sub-mesh, of a layer on some of the ranks, is computed with there alone: elsewhere sums and norms are
  zeros, `full_tensor()` is empty, and tensors of two meshes do not mix. Here what is a number, or is asked for as a
  full tensor, is every rank's.

Element-wise operations, as optimizers have them, go to the local tensors at once, which takes less than DTensor's way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from layerwise.errors import LayerwiseError
from layerwise.run.state.meshes import (
    ALL_RANKS,
    UNSCALE,
    brought_together,
    by_mesh,
    check_alike,
    everywhere,
    full,
    mesh_by_mesh,
    on_mesh,
    plain_dtensor,
    unscale,
)
from layerwise.run.state.operations import (
    aligned,
    beside_plain,
    computed_in_full,
    each,
    each_of,
    elementwise,
    is_mask,
    of_shards,
    own_tensors,
    put_together,
    writes_numbers,
    written_by,
)
from layerwise.run.state.own_numbers import NumberBesideOwn

COMPUTED = frozenset(("data", "T", "mT", "H", "mH"))  # attributes that are further tensors
ALONE = 2  # users of a tensor's memory: the tensor, and the object by which one asks
NO_RULE = "Sharding propagation failed", "does not have a sharding strategy"  # how DTensor says it, alike on all ranks
CAT = torch.ops.aten.cat.default
PUT, MASKED = torch.ops.aten.index_put_.default, torch.ops.aten.masked_fill_.Tensor


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
        if func is PUT and is_mask(*args):  # p[p < 0] = 0
            func, args = MASKED, (args[0], args[1][0], args[2])
        if torch.is_grad_enabled() and (own := own_tensors([*args, *kwargs.values()])):
            check_alike(own, next(x.device_mesh for x in tree_leaves((args, kwargs)) if isinstance(x, DTensor)))
        written = written_by(func, args, kwargs)
        for x in written:
            if isinstance(x, cls) and x._is_view():
                _check_view(x)
        if written and writes_numbers(written, args, kwargs):  # an optimizer's own, which are no DTensors
            args, named = each_of(lambda x: everywhere(x) if isinstance(x, DTensor) else x, args, kwargs)
            return func(*args, **named)
        if elementwise(func) and (columns := aligned(args, kwargs)) is not None:
            return _run_locally(func, args, kwargs, columns)
        if func is UNSCALE:
            return unscale(*args)
        if func.namespace == "c10d" or (func is CAT and not all(isinstance(x, DTensor) for x in args[0])):
            raise LayerwiseError(
                "parameters that the plan splits were to be sent as they are, by a collective of the loop's own, which "
                "is not needed (their gradients are summed, and p.full_tensor() is all of one), or by "
                "DistributedDataParallel around a module that holds the parallel one: leave it out, or, where that "
                "module has other parameters, name those of the parallel one in its "
                "`_ddp_params_and_buffers_to_ignore` first"
            )
        if beside_plain(args, kwargs):
            if torch.is_grad_enabled() or any(isinstance(x, DTensor) for x in tree_leaves(written)):
                raise LayerwiseError(
                    f"{func._schema.name.removeprefix('aten::')}() was given a parameter that the plan splits, or its "
                    "gradient, and a tensor of this rank's own: to read all of it give it p.full_tensor(), to write to "
                    "it give load_state_dict the values"
                )
            args, named = each_of(lambda x: everywhere(x) if isinstance(x, DTensor) else x, args, kwargs)
            return func(*args, **named)
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise LayerwiseError(
                "random numbers were asked for of a parameter that the plan splits, and would be other ones than one "
                "device's: initialise the model before, or by model.apply(fn), or give load_state_dict the values"
            )
        if not of_shards(func, args):
            return _in_full(func, args, kwargs, written)
        dtensors = list[DTensor]()
        each_of(lambda x: dtensors.append(x) if isinstance(x, DTensor) else None, args, kwargs)
        if len({x.device_mesh for x in dtensors}) > 1 and any(x.device_mesh in ALL_RANKS for x in dtensors):
            if func._schema.name.startswith(("aten::_foreach_", "aten::_fused_")) and len(by_mesh(args)) > 1:
                return mesh_by_mesh(func, args, kwargs)
            instead = brought_together(func, dtensors, {id(x) for x in tree_leaves(written)})
            args, kwargs = each_of(lambda x: instead.get(id(x), x), args, kwargs)
        same: dict[int, Tensor] = {}

        def plain(x: Any) -> Any:
            if not isinstance(x, cls):
                return x
            plain_tensor = plain_dtensor(x)
            if put_together(func, x, dtensors) and all(x is not output for output in tree_leaves(written)):
                placements = [Replicate() if p.is_partial() else p for p in x.placements]
                plain_tensor = plain_tensor.redistribute(placements=placements)
            same[id(plain_tensor)] = x
            return plain_tensor

        def marked(x: Any) -> Any:
            if id(x) in same:
                return same[id(x)]
            return _marked(x, dtensors[0]._local_tensor.device) if isinstance(x, DTensor) else x

        plain_args, named = each_of(plain, args, kwargs)
        try:
            result = func(*plain_args, **named)
        except RuntimeError as error:
            if "placement changes" in str(error) and _settled(args[0]):
                return cls.__torch_dispatch__(func, types, args, kwargs)
            if not any(said in str(error) for said in (*NO_RULE, "placement changes")):
                raise
            return _in_full(func, args, kwargs, written)
        if torch.Tag.inplace_view in func.tags:
            args[0]._spec, args[0]._local_tensor = result._spec, result._local_tensor
            return return_and_correct_aliasing(func, args, kwargs, args[0])  # type: ignore[no-untyped-call]
        return each(marked, (result,))[0]

    if torch.__version__ < "2.13":  # its C++ takes an object of a subclass for a DTensor, and does not come here

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            """Returns what `func` makes of it, with this class's way to run operations."""
            with torch._C.DisableTorchFunctionSubclass():
                if getattr(func, "__name__", "") == "__get__" and func.__self__.__name__ not in COMPUTED:
                    return func(*args, **(kwargs or {}))
                kwargs = kwargs or {}
                given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, DTensor)]
                if torch.is_grad_enabled() and len({x.device_mesh for x in given}) > 1:  # back, nothing dispatches
                    some = (x for x in given if x.device_mesh in ALL_RANKS and x.requires_grad)
                    instead = {id(x): _OnAllRanks.apply(x) for x in some}  # type: ignore[no-untyped-call]
                    args, kwargs = tree_map(lambda x: instead.get(id(x), x), (args, kwargs))
                with _Dispatch():  # type: ignore[no-untyped-call]
                    return func(*args, **kwargs)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Returns the full tensor, on every rank. All ranks call it."""
        return self.redistribute(placements=(Replicate(),) * self.device_mesh.ndim).to_local(
            grad_placements=grad_placements
        )

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **options: Any
    ) -> DTensor:
        """Returns it redistributed: from some ranks to all where it is to be replicated, or of another mesh."""
        mesh, wanted = device_mesh or self.device_mesh, placements or self.placements
        gathered = all(isinstance(placement, Replicate) for placement in wanted)
        if self.device_mesh not in ALL_RANKS or (mesh == self.device_mesh and not gathered):
            redistributed: DTensor = _Marked.apply(super().redistribute(mesh, wanted, **options))  # type: ignore[no-untyped-call]
            return redistributed
        everywhere: DTensor = _OnAllRanks.apply(self)  # type: ignore[no-untyped-call]
        same = mesh in (self.device_mesh, everywhere.device_mesh) and gathered
        return everywhere if same else everywhere.redistribute(mesh, wanted, **options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Returns what pickle writes of it: this rank's shard, which `_shard_of` gives to no other rank."""
        if self._spec.is_replicated() and self.device_mesh not in ALL_RANKS:
            return plain_dtensor(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        return _shard_of, (torch.distributed.get_rank(), plain_dtensor(self))

    def numpy(self, *, force: bool = False) -> NoReturn:
        """LayerwiseError: an array of it would have this rank's part."""
        raise LayerwiseError(
            "an array or list was asked for of a parameter that the plan splits: take p.full_tensor(), which every "
            "rank calls"
        )

    tolist = numpy

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
        mesh, device = self.device_mesh, self._local_tensor.device
        if not (isinstance(gradient, DTensor) and gradient.device_mesh == mesh):
            gradient = on_mesh(mesh, full(gradient) if isinstance(gradient, DTensor) else gradient)
        plain = plain_dtensor(gradient)
        return _marked(plain.redistribute(mesh, self.placements), device)


class PlanNumber(NumberBesideOwn, PlanDTensor):
    """A PlanDTensor without dimensions: a norm, a penalty on weights, a learnt scale."""


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
    kind = PlanDTensor if spec.ndim else PlanNumber
    dtensor: PlanDTensor = kind(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return dtensor


def _run_locally(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], columns: Sequence[DTensor]) -> Any:
    """Returns what an element-wise operation makes of local tensors."""

    def local(x: Any) -> Any:
        return x._local_tensor if isinstance(x, DTensor) else x

    local_args, named = each_of(local, args, kwargs)
    results = func(*local_args, **named)
    if written := written_by(func, args, kwargs):
        return written[0] if isinstance(written[0], Tensor) else None
    if not isinstance(results, Tensor):
        return [wrap(local_result, column._spec) for local_result, column in zip(results, columns, strict=True)]
    spec = columns[0]._spec
    meta = spec.tensor_meta
    if meta is not None and meta.dtype != results.dtype:
        spec = DTensorSpec(spec.mesh, spec.placements, TensorMeta(meta.shape, meta.stride, results.dtype))
    return wrap(results, spec)


def _in_full(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], written: Sequence[Any]) -> Any:
    """Returns what an operation makes of full tensors."""
    device = next(x._local_tensor.device for x in tree_leaves((args, kwargs)) if isinstance(x, DTensor))
    result = computed_in_full(func, args, kwargs, tree_leaves(written))
    return each(lambda x: _marked(x, device) if type(x) is DTensor else x, (result,))[0]


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
    settled = plain_dtensor(tensor).redistribute(placements=(Replicate(),) * tensor.device_mesh.ndim)
    tensor._local_tensor, tensor._spec = settled._local_tensor, settled._spec
    return True


def _marked(tensor: DTensor, device: torch.device) -> DTensor:
    """Returns what was computed as a PlanDTensor. device: of what it was computed of."""
    local = tensor._local_tensor
    if local.device != device and tensor.device_mesh.get_coordinate() is None:  # PyTorch makes these on the CPU
        local = local.to(device)
    return wrap(local, tensor._spec)


class _OnAllRanks(torch.autograd.Function):
    """A tensor of some ranks becomes one that is replicated on all."""

    @staticmethod
    def forward(ctx: Any, tensor: PlanDTensor) -> DTensor:
        ctx.mesh = tensor.device_mesh
        return _marked(on_mesh(ALL_RANKS[ctx.mesh], everywhere(tensor)), tensor._local_tensor.device)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> DTensor:
        return _marked(on_mesh(ctx.mesh, full(gradient)), gradient._local_tensor.device)


class _Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> DTensor:
        return _marked(tensor, tensor._local_tensor.device)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> DTensor:
        return gradient
