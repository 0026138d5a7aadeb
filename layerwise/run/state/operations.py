"""An operation of PyTorch: what it reads and writes, whether it goes element by element, or makes one number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.tensor import DTensor

from layerwise.run.state.meshes import all_reduce, everyone, is_first

aten = torch.ops.aten
SAME_PLACES = frozenset(("detach", "alias", "clone", "_to_copy", "zero_", "fill_", "copy_", "record_stream"))
OF_SHAPE = frozenset(("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided"))
OTHERS = ("_foreach_norm", "_foreach_max", "_foreach_powsum")  # that are not element by element


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
    if name.startswith(("_foreach_", "_fused_")):
        return not name.startswith(OTHERS)
    if name in SAME_PLACES or name.endswith("_like"):
        return torch.Tag.nondeterministic_seeded not in func.tags
    pointwise: bool = torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags
    return pointwise and all(str(made.type) == "Tensor" for made in func._schema.returns)


@cache
def is_view(func: Any) -> bool:
    """True if the result is in the memory of an argument."""
    arguments = func._schema.arguments
    return any(a.alias_info and not a.alias_info.is_write for a in arguments)


@cache
def _outputs(func: Any) -> tuple[int | str, ...]:
    """Returns the arguments that an operation writes to, by place, or by name as `out=` is."""
    arguments = enumerate(func._schema.arguments)
    return tuple(a.name if a.kwarg_only else i for i, a in arguments if a.alias_info and a.alias_info.is_write)


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns the values of the arguments that an operation writes to."""
    return [kwargs.get(at) if isinstance(at, str) else args[at] for at in _outputs(func)]


def own_tensors(values: Iterable[Any]) -> list[Tensor]:
    """Returns the plain tensors among values, and in lists."""
    listed = (x for value in values for x in (value if isinstance(value, list | tuple) else (value,)))
    return [x for x in listed if isinstance(x, Tensor) and not isinstance(x, DTensor)]


Numbers = tuple[str, float]  # what is made of all elements: "sum", "mean", "max", "min", "all", "any", "norm", and its p


def one_number(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Numbers | None:
    """Returns what an operation makes of all elements of a tensor; None where it makes something else."""
    name, overload = name_of(func), func._schema.overload_name
    if name in ("sum", "mean", "max", "min", "all", "any") and not overload:
        return name, 0.0
    if name == "norm" and overload in ("Scalar", "ScalarOpt_dtype"):
        return "norm", float(2 if len(args) < 2 or args[1] is None else args[1])
    if name == "linalg_vector_norm" and (len(args) < 3 or args[2] is None) and not (len(args) > 3 and args[3]):
        return "norm", float(args[1] if len(args) > 1 else 2)
    return None


def reduced(what: Numbers, tensors: Sequence[DTensor], dtype: torch.dtype | None) -> list[Tensor]:
    """Returns the number that each tensor makes, alike on all ranks, by one message a kind of mesh and type."""
    kind, p = what
    if kind == "norm":
        here = [x._local_tensor if is_first(x) and x._local_tensor.numel() else None for x in tensors]
        some = [x for x in here if x is not None]
        norms = iter(torch._foreach_norm(some, p, dtype=dtype) if some else ())
        mine = [_of_part(what, x._local_tensor, dtype, here=False) if y is None else next(norms) for x, y in zip(tensors, here, strict=True)]
    else:
        mine = [_of_part(what, x._local_tensor, dtype, here=is_first(x)) for x in tensors]
    power = p if kind == "norm" and p not in (inf, -inf, 0.0, 1.0) else 1.0
    smallest = kind in ("min", "all") or p == -inf
    largest = kind in ("max", "any") or p == inf
    together = ReduceOp.MIN if smallest else ReduceOp.MAX if largest else ReduceOp.SUM
    places: dict[tuple[Any, torch.dtype], list[int]] = {}
    for i, (x, number) in enumerate(zip(tensors, mine, strict=True)):
        places.setdefault((everyone(x), number.dtype), []).append(i)
    for (mesh, _), where in places.items():
        numbers = torch.stack([mine[i] for i in where])
        if power != 1:
            numbers = numbers**power
        all_reduce(numbers, mesh, together)
        if power != 1:
            numbers = numbers ** (1 / power)
        for i, number in zip(where, numbers.split(1), strict=True):
            mine[i] = number.view(())
    if len(tensors) == 1:
        mine = [mine[0].clone()]
    if kind == "mean":
        return [number / x.numel() for x, number in zip(tensors, mine, strict=True)]
    if kind in ("all", "any"):
        return [number.bool() for number in mine]
    return mine


def _of_part(what: Numbers, part: Tensor, dtype: torch.dtype | None, *, here: bool) -> Tensor:
    """Returns what this rank's part adds to the number. here: whether it is this rank that adds it."""
    kind, p = what
    if not (here and part.numel()):
        part = part.new_empty(0)
    if kind in ("all", "any"):
        return (part.bool().all() if kind == "all" else part.bool().any()).to(torch.uint8)
    if kind in ("max", "min"):
        if part.numel():
            return part.max() if kind == "max" else part.min()
        info: Any = torch.finfo(part.dtype) if part.is_floating_point() else torch.iinfo(part.dtype)
        least = -inf if part.is_floating_point() else info.min
        most = inf if part.is_floating_point() else info.max
        return part.new_full((), least if kind == "max" else most)
    if kind == "norm":
        return part.new_full((), 0.0 if p >= 0 else inf, dtype=dtype or part.dtype)
    return part.sum(dtype=dtype)


def is_mask(target: Tensor, places: Sequence[Tensor | None], value: Tensor, accumulate: bool = False) -> bool:
    """True if a number is put where a mask of the tensor's shape is true."""
    mask = places[0] if len(places) == 1 and not (accumulate or value.dim()) else None
    return mask is not None and mask.dtype is torch.bool and mask.shape == target.shape
