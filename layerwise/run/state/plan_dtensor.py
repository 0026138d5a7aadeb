"""PlanDTensor: a parameter of a split plan, its gradient, or its optimizer state. Everything else is a plain tensor.

Results computed from PlanDTensors are plain tensors, equal on all ranks, unless the operation is element-wise:

- Element-wise operations run on the local tensors and return a PlanDTensor. Numbers are used as they are, and of
  a plain tensor that is written into a PlanDTensor each rank takes its part. If a plain tensor is read, the result is a
  full tensor.
- Sums, means, norms, maxima: computed on each rank's shards, then combined by one message of all ranks.
- Everything else is computed on full tensors, which all ranks gather. PlanDTensors that it writes to get their shards.
- Random numbers are rank 0's.

The gradient of such a plain tensor is the mean over the ranks, like the model's gradients. All ranks must run the same
operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from layerwise.errors import LayerwiseError
from layerwise.run.guards.replaced import ReplacedParameter
from layerwise.run.local_tensor import like
from layerwise.run.state.dispatch import SHARED, full_of, in_full, locally, of_lists
from layerwise.run.state.meshes import (
    UNSCALE,
    all_ranks,
    all_reduce,
    check_alike,
    everywhere,
    plain_dtensor,
    shard_of,
    unscale,
)
from layerwise.run.state.operations import OF_SHAPE, one_number, operation, reduced

COMPUTED = frozenset(("data", "T", "mT", "H", "mH"))  # attributes that are tensors
DISPATCHES = torch.__version__ >= "2.13"  # to the class: before, C++ takes an object of a subclass for a DTensor
ASKS = frozenset(("grad", "backward"))  # functions that ask for its gradient


class _Kind(torch._C._TensorMeta):
    """The metaclass of PlanDTensor, which equals DTensor in the lists of types that PyTorch's functions accept."""

    def __eq__(cls, other: object) -> bool:  # noqa: N805
        return cls is other or other is DTensor

    __hash__ = type.__hash__


class PlanDTensor(DTensor, metaclass=_Kind):
    """A DTensor on a mesh of a plan, of all ranks or of some."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Returns `func`'s result, which autograd tracks if gradients are wanted."""
        kwargs, name = kwargs or {}, func.__name__
        with torch._C.DisableTorchFunctionSubclass():
            if name in ASKS or (name in ("__get__", "__set__") and func.__self__.__name__ not in COMPUTED):
                return func(*args, **kwargs)
            if len(types) > 1 and ReplacedParameter in types:
                return NotImplemented
            if name == "__set__" and isinstance(args[0], cls):  # p.data = x
                return _set_data(*args)
            if name == "__setitem__":
                return _put(*args)
            if torch.is_grad_enabled() and not _writes(name, kwargs):
                tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
                if any(x.requires_grad for x in tensors):
                    return _followed(func, args, kwargs, tensors)
            return _dispatched(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        """Returns the operation's result: see the module."""
        kwargs, of = kwargs or {}, operation(func)
        if of.elementwise and not of.of_lists and (found := locally(func, args, kwargs)) is not NotImplemented:
            return found
        if func is UNSCALE:
            return unscale(*args)
        if func.namespace == "c10d":
            raise LayerwiseError(
                "a collective outside layerwise, or DistributedDataParallel around a module that holds the parallel "
                "model, tried to send parameters that the plan splits: remove it, as gradients are summed already and "
                "p.full_tensor() returns a full parameter. If that module has other parameters, list the parallel "
                "model's in its `_ddp_params_and_buffers_to_ignore` first"
            )
        if of.name == "is_same_size":
            return args[0].shape == args[1].shape
        if of.name in OF_SHAPE:
            made = func(args[0]._local_tensor, *args[1:], **kwargs)
            return like(args[0], shard_of(made, args[0]).contiguous()) if made.shape == args[0].shape else made
        if of.of_lists:
            return of_lists(func, args, kwargs)
        if isinstance(args[0], DTensor) and (number := one_number(func, args)) is not None:
            return reduced(number, [args[0]], kwargs.get("dtype"))[0]
        return in_full(func, args, kwargs)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Returns the full tensor, on every rank. All ranks must call it."""
        full: Tensor = _Full.apply(self) if torch.is_grad_enabled() and self.requires_grad else everywhere(self)  # type: ignore[no-untyped-call]
        return full

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **options: Any
    ) -> DTensor:
        """Returns PyTorch's own DTensor with the values redistributed."""
        if all(isinstance(placement, Replicate) for placement in placements or self.placements):
            mesh = device_mesh if device_mesh not in (None, self.device_mesh) else all_ranks(self)
            return DTensor.from_local(full_of(self.detach()), mesh, (Replicate(),) * mesh.ndim, run_check=False)
        return plain_dtensor(self).redistribute(device_mesh, placements, **options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Returns what pickle writes: this rank's shard, which `_shard_of` loads on no other rank."""
        if self._spec.is_replicated() and all_ranks(self) is self.device_mesh:
            return plain_dtensor(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        return _shard_of, (torch.distributed.get_rank(), plain_dtensor(self))

    def numpy(self, *, force: bool = False) -> Any:
        """Returns the full tensor as an array."""
        return full_of(self.detach() if force else self).numpy(force=force)

    def tolist(self) -> Any:
        """Returns the full tensor as a list."""
        return everywhere(self).tolist()

    def storage(self) -> NoReturn:  # by which safetensors and Accelerate detect shared memory
        """Raises LayerwiseError: a file would contain this rank's shard only."""
        raise LayerwiseError(
            "safetensors, or Accelerate's save_model or save_state, asked for the memory of a parameter that the plan "
            "splits, where each rank has only a shard: call accelerator.save(model.full_state_dict(), file), or "
            "safetensors' save_file with model.full_state_dict(), on every rank"
        )

    @property
    def _fsdp_orig_uid(self) -> NoReturn:  # read by fully_shard from torch 2.13 on
        raise LayerwiseError(
            "fully_shard of a module that holds the parallel model would shard again parameters that the plan already "
            "splits: remove fully_shard"
        )

    def bring(self, gradient: Tensor) -> Tensor:
        """Returns a gradient placed like this tensor; `gradient` may be plain and full, as some formulas return it."""
        full = everywhere(gradient) if isinstance(gradient, DTensor) else gradient
        return like(self, shard_of(full, self).contiguous())

    def retire(self) -> None:
        """Makes any use of it raise, as the model has other parameters now."""
        self.__class__ = RetiredDTensor


class RetiredDTensor(PlanDTensor):
    """A former parameter of a model that is no longer parallel."""

    __torch_function__ = ReplacedParameter.__torch_function__


class PartView(Tensor):
    """A view of a parameter, such as `p[0]`, within a full tensor; writes to it also go to the parameter."""

    _of: tuple[PlanDTensor, Tensor]

    @staticmethod
    def of(view: Tensor, p: PlanDTensor, full: Tensor) -> Tensor:
        """Returns a PartView of p."""
        part = view.as_subclass(PartView)
        part._of = p, full
        return part

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Returns `func`'s result on the plain tensor."""
        kwargs = kwargs or {}
        some = [x for x in tree_leaves((args, kwargs)) if isinstance(x, cls)]
        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = tree_map(lambda x: x.as_subclass(Tensor) if isinstance(x, cls) else x, (args, kwargs))
        result = func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            for p, full in {id(x): x._of for x in some}.values():
                if _writes(func.__name__, kwargs):
                    check_alike([full], all_ranks(p))
                    p._local_tensor.copy_(shard_of(full, p))
                if type(result) is Tensor and _shared(result, full):
                    return cls.of(result, p, full)
        return result


class _Dispatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which operations on any PlanDTensor run as its class defines."""

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        """Returns that class's result, or PyTorch's if no argument is a PlanDTensor."""
        kwargs = kwargs or {}
        some = any(isinstance(x, PlanDTensor) for x in tree_leaves((args, kwargs)))
        return PlanDTensor.__torch_dispatch__(func, types, args, kwargs) if some else func(*args, **kwargs)


def _dispatched(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns `func`'s result; a view of a PlanDTensor writes to it too."""
    SHARED.clear()
    if DISPATCHES:
        result = func(*args, **kwargs)
    else:
        with _Dispatch():  # type: ignore[no-untyped-call]
            result = func(*args, **kwargs)
    if not SHARED or type(result) is not Tensor:
        return result
    p, full = SHARED.pop()  # with several operations, such as a norm of a view, the result may not be a view
    return PartView.of(result, p, full) if _shared(result, full) else result


def _shared(x: Tensor, full: Tensor) -> bool:
    return bool(x.untyped_storage()._cdata == full.untyped_storage()._cdata)


def _writes(name: str, kwargs: Mapping[str, Any]) -> bool:
    """True if a function writes to its first argument or to `out=`: x.add_(1), x += 1, x[0] = 1."""
    special = name.startswith("__") and name.endswith("__")
    return kwargs.get("out") is not None or (name in INPLACE if special else name.endswith("_"))


OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "div", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
INPLACE = frozenset(("__setitem__", *(f"__i{operator}__" for operator in OPERATORS)))


def _followed(func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Any:
    """Returns `func`'s result for autograd to track, on full tensors beside plain ones, which may differ by rank."""
    if any(not isinstance(x, DTensor) for x in tensors):
        return _in_full(func, args, kwargs, tensors)
    first = next(x for x in tensors if isinstance(x, PlanDTensor))
    before = [] if DISPATCHES else _random_states(first.device, args, kwargs)
    result, mesh, mean = _dispatched(func, args, kwargs), all_ranks(first), cast(Any, _Mean.apply)
    if not DISPATCHES and any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(result)):
        if not all(map(torch.equal, before, _random_states(first.device, args, kwargs))):
            raise LayerwiseError(
                f"{func.__name__} draws random numbers beside a parameter that the plan splits, whose gradient needs "
                f"PyTorch 2.13, and this is {torch.__version__}: update it, or draw without the parameter"
            )
        return _in_full(func, args, kwargs, tensors)  # autograd's formulas would not come to the class
    return tree_map(lambda x: mean(x, mesh) if type(x) in (Tensor, PartView) and x.requires_grad else x, result)


def _in_full(func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Any:
    full = {id(x): _Full.apply(x) for x in tensors if isinstance(x, PlanDTensor)}  # type: ignore[no-untyped-call]
    args, kwargs = tree_map(lambda x: full.get(id(x), x), (args, kwargs))
    return func(*args, **kwargs)


def _random_states(device: torch.device, args: Any, kwargs: Any) -> list[Tensor]:
    """Returns the states of the generators that a function may draw from."""
    default = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.random.get_rng_state()
    return [default, *(x.get_state() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Generator))]


def _shard_of(rank: int, tensor: DTensor) -> DTensor:
    """Returns a shard that rank `rank` has pickled. Raises LayerwiseError on another rank, whose it is not."""
    if torch.distributed.is_initialized() and torch.distributed.get_rank() == rank:
        return tensor
    raise LayerwiseError(
        f"the file has only rank {rank}'s shards, as torch.save(model.state_dict()) writes them if a plan splits "
        "layers: save model.full_state_dict(), called on every rank, or use layerwise.save or "
        "torch.distributed.checkpoint"
    )


torch.serialization.add_safe_globals([_shard_of])  # PyTorch does the same for its own DTensors


def _put(p: Tensor, where: Any, value: Any) -> None:
    """Writes `p[where] = value`."""
    where, value = tree_map(full_of, (where, value))
    if not isinstance(p, DTensor):
        p[where] = value
        return
    full = everywhere(p).detach().clone()
    full[where] = value
    _dispatched(torch.Tensor.copy_, (p, full), {})


def _set_data(p: PlanDTensor, value: Tensor) -> None:
    """Writes `p.data = value` into the existing memory. Raises LayerwiseError for another shape or type."""
    if value.shape != p.shape or value.dtype != p.dtype:
        raise LayerwiseError(
            "p.data = x changes the shape or type of a parameter that the plan splits over the ranks: pass values to "
            "load_state_dict, and convert types with model.to()"
        )
    with torch.no_grad():
        _dispatched(torch.Tensor.copy_, (p, value), {})


class _Mean(torch.autograd.Function):
    """A tensor that is equal on all ranks; its gradient is the mean over the ranks, like parameters' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _mean_over(ctx.mesh, gradient), None


class _Full(torch.autograd.Function):
    """The full tensor of a PlanDTensor; the gradient is this rank's part of the mean over the ranks."""

    @staticmethod
    def forward(ctx: Any, p: PlanDTensor) -> Tensor:
        ctx.like = like(p, p._local_tensor.detach())
        full = everywhere(p)
        return full.clone() if full is p._local_tensor else full

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        mean = _mean_over(all_ranks(ctx.like), gradient)
        return like(ctx.like, shard_of(mean, ctx.like).contiguous())


def _mean_over(mesh: DeviceMesh, gradient: Tensor) -> Tensor:
    mean = gradient / mesh.size()
    all_reduce(mean, mesh)
    return mean
