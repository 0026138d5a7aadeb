"""An operation of PyTorch: what it reads and writes, if it goes element by element, and what is right of shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.utils._pytree import tree_leaves

from layerwise.errors import LayerwiseError
from layerwise.run.state.meshes import ALL_RANKS, everywhere, on_mesh


def each(act: Callable[[Any], Any], values: Iterable[Any]) -> tuple[Any, ...]:
    """Returns what `act` makes of an operation's arguments or results, and of those in lists."""
    return tuple(type(v)(map(act, v)) if type(v) in (list, tuple) else act(v) for v in values)


def each_of(act: Callable[[Any], Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns what `act` makes of both kinds of an operation's arguments."""
    return each(act, args), dict(zip(kwargs, each(act, kwargs.values()), strict=True))


def computed_in_full(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], written: Sequence[Any]) -> Any:
    """Returns what an operation makes of full tensors, on all ranks; DTensors that it writes to have their part of it.

    All ranks call this. LayerwiseError where it would write to parts of a sum, or change a shape.
    """
    if torch.Tag.inplace_view in func.tags:
        name = func._schema.name.removeprefix("aten::")
        raise LayerwiseError(
            f"{name}() would change the shape of a parameter that the plan splits, or its gradient, in place: take "
            f"what {name.removesuffix('_')}() returns"
        )
    if any(p.is_partial() for x in written if isinstance(x, DTensor) for p in x.placements):
        raise LayerwiseError(
            f"{func._schema.name.removeprefix('aten::')}() would write to a sum of parameters' parts, which another "
            "tensor shares: write to a clone of it"
        )
    fulls: dict[int, tuple[DTensor, Tensor]] = {}

    def full(x: Any) -> Any:
        if isinstance(x, DTensor) and id(x) not in fulls:
            value = everywhere(x).contiguous() if x.is_contiguous() else everywhere(x)
            fulls[id(x)] = x, value.clone() if any(x is one for one in written) else value
        return fulls[id(x)][1] if isinstance(x, DTensor) else x

    full_args, named = each_of(full, args, kwargs)
    result = func(*full_args, **named)
    mesh = next(ALL_RANKS.get(x.device_mesh, x.device_mesh) for x, _ in fulls.values())
    stands_for = {id(value): x for x, value in fulls.values() if any(x is one for one in written)}
    for x, value in fulls.values():
        if id(value) in stands_for:
            brought = on_mesh(x.device_mesh, value).redistribute(placements=x.placements)
            x._local_tensor.copy_(brought._local_tensor)
    return each(lambda x: stands_for.get(id(x), on_mesh(mesh, x)) if isinstance(x, Tensor) else x, (result,))[0]


TO_TYPE = torch.ops.aten._to_copy.default  # a sum of whole parts is no whole number of the sum
SAME_MEMORY = frozenset((torch.ops.aten.detach.default, torch.ops.aten.alias.default))
# Of the ranks' parts of a norm these make parts of a norm.
OF_NORMS = frozenset(
    (torch.ops.aten.stack.default, torch.ops.aten.linalg_vector_norm.default, torch.ops.aten._foreach_norm.Scalar)
)
# What DTensor makes right of shards of any size, and without a full tensor; so do element-wise operations and lists.
REDUCTIONS = frozenset(("sum", "mean", "norm", "linalg_vector_norm", "max", "amax", "min", "amin", "all", "any"))
OF_SHARDS = REDUCTIONS | frozenset(
    (
        *("detach", "alias", "clone", "_to_copy", "is_same_size", "record_stream"),
        *("zeros_like", "ones_like", "empty_like", "full_like"),
        *("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided"),
        *("mm", "addmm", "bmm", "baddbmm", "dot", "cat", "stack", "split", "split_with_sizes", "select", "slice"),
        *("view", "_unsafe_view", "reshape", "permute", "transpose", "t", "expand"),
        *("unsqueeze", "squeeze", "squeeze_"),
    )
)
# Of what is cut along the first dimension alone, on PyTorch 2.11.
FIRST_ALONE = frozenset(("view", "_unsafe_view") if torch.__version__ < "2.13" else ())


def of_shards(func: Any, args: Sequence[Any]) -> bool:
    """True if DTensor makes right of shards what an operation makes of these."""
    name: str = func._schema.name.removeprefix("aten::")
    if name in FIRST_ALONE:
        return not any(p.is_shard() and not p.is_shard(0) for p in args[0].placements)
    if name in ("max", "min") and func._schema.overload_name:  # of a dimension, with places
        return False
    if name in REDUCTIONS:
        return not any(type(x) in (list, tuple) and not x for x in args[1:])  # no dimension is all, and DTensor's none
    return name in OF_SHARDS or name.startswith(("_foreach_", "_fused_")) or elementwise(func)


def put_together(func: Any, tensor: DTensor, beside: Iterable[DTensor]) -> bool:
    """True if the ranks' parts of a tensor are to be one before an operation, which DTensor makes of the parts.

    Parts of a norm or of `any` are no terms of a sum; what was an element-wise operation with a number before, DTensor
    takes for that again. beside: all that the operation is given.
    """
    parts = [p for p in tensor.placements if isinstance(p, Partial)]
    if not parts or func in SAME_MEMORY:
        return False
    kinds = {p for x in beside for p in x.placements if p.is_partial()}
    if func in OF_NORMS and len(kinds) == 1 and tensor.dtype is not torch.bool:
        return False
    terms = all(p.reduce_op in ("sum", "avg") and getattr(p, "norm_type", 1) == 1 for p in parts)
    return elementwise(func) or func is TO_TYPE or not terms or tensor.dtype is torch.bool


@cache
def elementwise(func: Any) -> bool:
    """True if each element of the result is made of the elements in its place."""
    name: str = func._schema.name.removeprefix("aten::")
    if name.startswith(("_foreach_", "_fused_")):
        return name.endswith("_") or name == "_foreach_sqrt"  # of Adam; others may reduce
    pointwise: bool = torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags
    pointwise &= all(str(made.type) == "Tensor" for made in func._schema.returns)  # `equal` makes one bool of all
    return pointwise or name in ("zero_", "fill_", "copy_")


def aligned(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[DTensor] | None:
    """Returns the tensors of the first argument, where those of the others lie as they do, in turn, or are numbers."""
    first = args[0] if args else None
    columns: list[Any] = list(first) if isinstance(first, list | tuple) else [first]
    if not all(isinstance(x, DTensor) and not any(p.is_partial() for p in x._spec.placements) for x in columns):
        return None

    def alike(x: Any, column: DTensor) -> bool:
        if not isinstance(x, DTensor):
            return not isinstance(x, Tensor) or x.dim() == 0
        own, spec = x._spec, column._spec
        if own is spec or (own.placements == spec.placements and own.mesh == spec.mesh and own.shape == spec.shape):
            return True
        return x.dim() == 0 and own.mesh == spec.mesh and own.is_replicated()

    for arg in (*args[1:], *kwargs.values()):
        if not isinstance(arg, list | tuple):
            if not all(alike(arg, column) for column in (columns if isinstance(arg, DTensor) else columns[:1])):
                return None
        elif any(isinstance(x, Tensor) for x in arg) and not (
            len(arg) == len(columns) and all(map(alike, arg, columns))
        ):
            return None
    return columns


def own_tensors(arguments: Iterable[Any]) -> list[Tensor]:
    """Returns the plain tensors among arguments, and in lists: this rank's own."""
    listed = (x for arg in arguments for x in (arg if isinstance(arg, list | tuple) else (arg,)))
    return [x for x in listed if isinstance(x, Tensor) and not isinstance(x, DTensor)]


def beside_plain(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if DTensors stand beside plain tensors of more than a number."""
    every = [*args, *kwargs.values()]
    return any(x.numel() > 1 for x in own_tensors(every)) and any(isinstance(x, DTensor) for x in tree_leaves(every))


def is_mask(target: Tensor, places: Sequence[Tensor | None], value: Tensor, accumulate: bool = False) -> bool:
    """True if a number is put where a mask of the tensor's shape is true."""
    mask = places[0] if len(places) == 1 and not (accumulate or value.dim()) else None
    return mask is not None and mask.dtype is torch.bool and mask.shape == target.shape


@cache
def _outputs(func: Any) -> tuple[int | str, ...]:
    """Returns the arguments that an operation writes to, by place, or by name as `out=` is."""
    arguments = enumerate(func._schema.arguments)
    return tuple(a.name if a.kwarg_only else i for i, a in arguments if a.alias_info and a.alias_info.is_write)


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns the values of the arguments that an operation writes to."""
    return [kwargs.get(at) if isinstance(at, str) else args[at] for at in _outputs(func)]


def writes_numbers(written: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if plain tensors of one number are written to, and DTensors of one number are read."""
    plain = [x for xs in written for x in (xs if isinstance(xs, list | tuple) else (xs,))]
    if not all(type(x) is Tensor and x.numel() == 1 for x in plain):
        return False
    read = list[DTensor]()
    each_of(lambda x: read.append(x) if isinstance(x, DTensor) else None, args, kwargs)
    return bool(read) and all(x.numel() == 1 for x in read)
