"""Operations of PyTorch: what one reads and writes, and whether it is element-wise or a reduction to a number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from layerwise.run.state.meshes import all_ranks, all_reduce, is_first

SAME_PLACES = frozenset(("detach", "alias", "clone", "_to_copy", "zero_", "fill_", "copy_", "record_stream"))
OF_SHAPE = frozenset(("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided"))
OF_LISTS = ("_foreach_", "_fused_")
NUMBERS = ("_foreach_norm", "_foreach_max", "_foreach_powsum")  # of lists, but not element-wise


class Operation(NamedTuple):
    """The properties of an operation that are known before it runs."""

    name: str
    of_lists: bool
    elementwise: bool  # whether each element of the result depends only on the elements at its position
    outputs: tuple[int | str, ...]  # the arguments that it writes to, by index, or by name like `out=`
    view: bool  # whether the result shares the memory of an argument

    def written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Returns the values of the arguments that it writes to."""
        return [kwargs.get(at) if isinstance(at, str) else args[at] for at in self.outputs]


@cache
def operation(func: Any) -> Operation:
    """Returns the properties of an operation."""
    schema = func._schema
    name, arguments = schema.name.removeprefix("aten::"), schema.arguments
    writes = [(i, a) for i, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write]
    of_lists = name.startswith(OF_LISTS)
    pointwise = torch.Tag.pointwise in func.tags or name in SAME_PLACES or name.endswith("_like")
    tensors = all(str(made.type) == "Tensor" for made in schema.returns)  # `equal` returns a bool
    return Operation(
        name,
        of_lists,
        not name.startswith(NUMBERS)
        if of_lists
        else pointwise and tensors and torch.Tag.nondeterministic_seeded not in func.tags,
        tuple(a.name if a.kwarg_only else i for i, a in writes),
        any(a.alias_info and not a.alias_info.is_write for a in arguments),
    )


def each(act: Callable[[Any], Any], values: Iterable[Any]) -> tuple[Any, ...]:
    """Returns `act` of an operation's arguments or results, and of those in lists."""
    return tuple(type(v)(map(act, v)) if isinstance(v, list | tuple) else act(v) for v in values)


Number = tuple[str, float]  # "sum", "mean", "max", "min", "all", "any", or "norm" and its p
NEUTRAL = {"max": -inf, "min": inf, "all": 1.0}  # the neutral element, if it is not 0
ACROSS = {"mean": "sum", "max": "amax", "min": "amin"}  # how the ranks' numbers are combined


def one_number(func: Any, args: Sequence[Any]) -> Number | None:
    """Returns which number an operation reduces a tensor to; None if it returns anything else."""
    name, overload = operation(func).name, func._schema.overload_name
    if name in ("sum", "mean", "max", "min", "all", "any") and not overload:
        return (name, 0.0) if name not in ("max", "min") or args[0].is_floating_point() else None
    if name == "norm" and overload in ("Scalar", "ScalarOpt_dtype"):
        return _norm(2 if len(args) < 2 or args[1] is None else args[1])
    if name == "linalg_vector_norm" and (len(args) < 3 or args[2] is None) and not (len(args) > 3 and args[3]):
        return _norm(args[1] if len(args) > 1 else 2)
    return None


def _norm(p: float) -> Number | None:
    return ("norm", float(p)) if p > 0 else None


def reduced(what: Number, tensors: Sequence[DTensor], dtype: torch.dtype | None) -> list[Tensor]:
    """Returns the number of each tensor, equal on all ranks, with one message for each kind of mesh and type."""
    places, made = dict[tuple[DeviceMesh, torch.dtype], list[int]](), dict[int, Tensor]()
    for i, x in enumerate(tensors):
        places.setdefault((all_ranks(x), x.dtype), []).append(i)
    kind, p = what
    for (mesh, _), where in places.items():
        shards = [_shard(tensors[i], NEUTRAL.get(kind, 0.0)) for i in where]
        if kind == "norm":
            local = list(torch._foreach_norm(shards, p, dtype=dtype))
        elif kind in ("sum", "mean"):
            local = [shard.sum(dtype=dtype) for shard in shards]
        else:
            local = [getattr(shard, kind)() for shard in shards]
        of_type = torch.uint8 if local[0].dtype is torch.bool else local[0].dtype
        rows = local[0].new_zeros(mesh.size(), len(local), dtype=of_type)  # a row a rank, so that nan stays nan
        rows[int((mesh.mesh.flatten() == torch.distributed.get_rank()).nonzero())] = torch.stack(local)
        all_reduce(rows, mesh)
        rows = rows.to(local[0].dtype)
        all_of = (
            torch.linalg.vector_norm(rows, p, dim=0) if kind == "norm" else getattr(rows, ACROSS.get(kind, kind))(0)
        )
        made |= dict(zip(where, all_of.unbind(), strict=True))
    return [made[i] / x.numel() if kind == "mean" else made[i] for i, x in enumerate(tensors)]


def _shard(tensor: DTensor, neutral: float) -> Tensor:
    """Returns this rank's shard if it is the first to hold it, else the neutral element."""
    shard = tensor._local_tensor
    return shard if is_first(tensor) and shard.numel() else shard.new_full((1,), neutral)
