"""An operation of PyTorch: what it reads and writes, whether it goes element by element, or makes one number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from layerwise.run.state.meshes import all_ranks, all_reduce, is_first

SAME_PLACES = frozenset(("detach", "alias", "clone", "_to_copy", "zero_", "fill_", "copy_", "record_stream"))
OF_SHAPE = frozenset(("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided"))
OF_LISTS = ("_foreach_", "_fused_")
NUMBERS = ("_foreach_norm", "_foreach_max", "_foreach_powsum")  # of lists, that are not element by element


def name_of(func: Any) -> str:
    """Returns an operation's name."""
    name: str = func._schema.name
    return name.removeprefix("aten::")


def each(act: Callable[[Any], Any], values: Iterable[Any]) -> tuple[Any, ...]:
    """Returns what `act` makes of an operation's arguments or results, and of those in lists."""
    return tuple(type(v)(map(act, v)) if type(v) in (list, tuple) else act(v) for v in values)


def each_of(act: Callable[[Any], Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns what `act` makes of both kinds of an operation's arguments."""
    return each(act, args), dict(zip(kwargs, each(act, kwargs.values()), strict=True))


@cache
def elementwise(func: Any) -> bool:
    """True if each element of the result is made of the elements in its place."""
    name = name_of(func)
    if name.startswith(OF_LISTS):
        return not name.startswith(NUMBERS)
    pointwise = torch.Tag.pointwise in func.tags or name in SAME_PLACES or name.endswith("_like")
    tensors = all(str(made.type) == "Tensor" for made in func._schema.returns)  # `equal` makes one bool of all
    return pointwise and tensors and torch.Tag.nondeterministic_seeded not in func.tags


@cache
def is_view(func: Any) -> bool:
    """True if the result is in the memory of an argument."""
    return any(a.alias_info and not a.alias_info.is_write for a in func._schema.arguments)


@cache
def _outputs(func: Any) -> tuple[int | str, ...]:
    """Returns the arguments that an operation writes to, by place, or by name as `out=` is."""
    arguments = enumerate(func._schema.arguments)
    return tuple(a.name if a.kwarg_only else i for i, a in arguments if a.alias_info and a.alias_info.is_write)


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns the values of the arguments that an operation writes to."""
    return [kwargs.get(at) if isinstance(at, str) else args[at] for at in _outputs(func)]


def is_mask(target: Tensor, places: Sequence[Tensor | None], value: Tensor, accumulate: bool = False) -> bool:
    """True if a number is put where a mask of the tensor's shape is true."""
    mask = places[0] if len(places) == 1 and not (accumulate or value.dim()) else None
    return mask is not None and mask.dtype is torch.bool and mask.shape == target.shape


Number = tuple[str, float]  # "sum", "mean", "max", "min", "all", "any", or "norm" and its p


def one_number(func: Any, args: Sequence[Any]) -> Number | None:
    """Returns what an operation makes of all elements of a tensor; None where it makes something else."""
    name, overload = name_of(func), func._schema.overload_name
    if name in ("sum", "mean", "max", "min", "all", "any") and not overload:
        return name, 0.0
    if name == "norm" and overload in ("Scalar", "ScalarOpt_dtype"):
        return "norm", float(2 if len(args) < 2 or args[1] is None else args[1])
    if name == "linalg_vector_norm" and (len(args) < 3 or args[2] is None) and not (len(args) > 3 and args[3]):
        return "norm", float(args[1] if len(args) > 1 else 2)
    return None


def reduced(what: Number, tensors: Sequence[DTensor], dtype: torch.dtype | None) -> list[Tensor]:
    """Returns the number that each tensor makes, alike on all ranks, by one message a kind of mesh and type."""
    places, made = dict[tuple[DeviceMesh, torch.dtype], list[int]](), dict[int, Tensor]()
    for i, x in enumerate(tensors):
        places.setdefault((all_ranks(x), x.dtype), []).append(i)
    for (mesh, _), where in places.items():
        local = _of_shards(what, [tensors[i] for i in where], dtype)
        rows = local[0].new_zeros(mesh.size(), len(local))  # a row a rank: what is no number stays so, also in extrema
        rows[int((mesh.mesh.flatten() == torch.distributed.get_rank()).nonzero())] = torch.stack(local)
        all_reduce(rows, mesh)
        made |= dict(zip(where, _of_rows(what, rows).unbind(), strict=True))
    numbers = [made[i] for i in range(len(tensors))]
    if what[0] == "mean":
        return [number / x.numel() for x, number in zip(tensors, numbers, strict=True)]
    return numbers


def _of_shards(what: Number, tensors: Sequence[DTensor], dtype: torch.dtype | None) -> list[Tensor]:
    """Returns what this rank's shards make, where it is the first that has them, and else what changes nothing."""
    kind, p = what
    shards = [x._local_tensor if is_first(x) else x._local_tensor.new_empty(0) for x in tensors]
    if kind in ("all", "any"):
        return [getattr(shard.bool(), kind)().to(torch.uint8) for shard in shards]
    if kind in ("sum", "mean"):
        return [shard.sum(dtype=dtype) for shard in shards]
    some = [shard for shard in shards if shard.numel()]
    if kind == "norm":
        made = iter(torch._foreach_norm(some, p, dtype=dtype) if some else ())
    else:
        made = iter([shard.max() if kind == "max" else shard.min() for shard in some])
    return [next(made) if shard.numel() else _neutral(what, shard, dtype) for shard in shards]


def _neutral(what: Number, shard: Tensor, dtype: torch.dtype | None) -> Tensor:
    kind, p = what
    if kind == "norm":
        return shard.abs().new_full((), inf if p < 0 else 0.0, dtype=dtype)
    if shard.is_floating_point():
        return shard.new_full((), -inf if kind == "max" else inf)
    limits = torch.iinfo(shard.dtype)
    return shard.new_full((), limits.min if kind == "max" else limits.max)


def _of_rows(what: Number, rows: Tensor) -> Tensor:
    kind, p = what
    if kind == "norm" and p:
        norms: Tensor = torch.linalg.vector_norm(rows, p, dim=0)
        return norms
    if kind in ("max", "min"):
        return rows.amax(0) if kind == "max" else rows.amin(0)
    if kind in ("all", "any"):
        return rows.all(0) if kind == "all" else rows.any(0)
    return rows.sum(0)
