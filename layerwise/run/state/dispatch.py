"""How PyTorch's operations treat PlanDTensors: on this rank's shards, or on full tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from layerwise.errors import LayerwiseError
from layerwise.run.guards.hooks import in_backward
from layerwise.run.local_tensor import like
from layerwise.run.state.meshes import all_ranks, check_alike, everywhere, of_rank, shard_of
from layerwise.run.state.operations import each, operation, reduced

SHARED = list[tuple[Any, Tensor]]()  # the base of the last operation's view, and the full tensor


def full_of(x: Any) -> Any:
    """Returns the full tensor of a DTensor, and anything else unchanged."""
    return everywhere(x) if isinstance(x, DTensor) else x


def _beside(x: Any, target: DTensor) -> Any:
    """Returns this rank's part of an argument beside its part of `target`; NotImplemented if it does not fit."""
    if not isinstance(x, Tensor):
        return x
    if isinstance(x, DTensor):
        own, spec = x._spec, target._spec
        if own is spec or (own.placements == spec.placements and own.mesh == spec.mesh and own.shape == spec.shape):
            return x._local_tensor
        x = everywhere(x)
    if not x.dim():
        return x
    try:
        return shard_of(x.expand(target.shape), target)
    except RuntimeError:
        return NotImplemented


def _plain(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Returns the plain tensors (no DTensors) among an operation's arguments, including those in lists."""
    plain = []
    for x in (*args, *kwargs.values()):
        for one in x if isinstance(x, list | tuple) else (x,):
            if isinstance(one, Tensor) and not isinstance(one, DTensor):
                plain.append(one)
    return plain


def _check_written(plain: Iterable[Tensor], target: DTensor) -> None:
    """Raises LayerwiseError if plain tensors written into a DTensor differ between ranks.

    Numbers are checked only if gradients are on, as optimizers use theirs within no_grad. In autograd's formulas a
    plain tensor is the mean over the ranks.
    """
    least = 0 if torch.is_grad_enabled() else 1
    looked_at = [x for x in plain if x.numel() > least]
    if looked_at and not in_backward():
        check_alike(looked_at, all_ranks(target))


def locally(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns an element-wise operation's result on this rank's shards; NotImplemented if that would be wrong."""
    outputs, target = operation(func).outputs, None
    if outputs:
        target = kwargs[outputs[0]] if isinstance(outputs[0], str) else args[outputs[0]]
        if not isinstance(target, DTensor):
            return NotImplemented
    else:
        for x in (*args, *kwargs.values()):
            if isinstance(x, DTensor) and (target is None or x.dim() > target.dim()):
                target = x
    assert target is not None
    if plain := _plain(args, kwargs):
        if outputs:
            _check_written(plain, target)
        elif not in_backward() and any(x.numel() > 1 for x in plain):
            return NotImplemented  # each rank may have a different one
    local_args = [_beside(x, target) if isinstance(x, Tensor) else x for x in args]
    named = {key: _beside(x, target) for key, x in kwargs.items()}
    for x in (*local_args, *named.values()):
        if x is NotImplemented:
            return NotImplemented
    result = func(*local_args, **named)
    if outputs:
        return target
    return like(target, result) if isinstance(result, Tensor) else result


def of_lists(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns an operation's result on lists of tensors: PlanDTensors and others are computed separately."""
    of, first, made = operation(func), args[0], dict[int, Any]()
    dtensors = [i for i, x in enumerate(first) if isinstance(x, DTensor)]
    others = [i for i, x in enumerate(first) if not isinstance(x, DTensor)]
    for written in of.written(args, kwargs):
        if written and len(written) == len(first) and any(not isinstance(written[i], DTensor) for i in dtensors):
            return in_full(func, args, kwargs)  # an optimizer's state is that of one device: full tensors
    p = float(args[1] if len(args) > 1 else 2) if of.name == "_foreach_norm" else 0.0
    if p > 0 and dtensors:
        made = dict(zip(dtensors, reduced(("norm", p), [first[i] for i in dtensors], kwargs.get("dtype")), strict=True))
        dtensors = []
    elif not of.elementwise:
        dtensors, others = [], list(range(len(first)))
    elif dtensors:
        _check_written(_plain(args[1:], kwargs), first[dtensors[0]])
    for where in filter(None, (dtensors, others)):
        local = where is dtensors

        def some(x: Any, where: Sequence[int] = where, local: bool = local) -> Any:
            if isinstance(x, list | tuple) and len(x) == len(first):
                return [_beside(x[i], first[i]) if local else full_of(x[i]) for i in where]
            return full_of(x)

        result = func(*map(some, args), **{key: some(x) for key, x in kwargs.items()})
        for i, x in zip(where, result or (), strict=False):
            made[i] = like(first[i], x) if local else x
    return [made[i] for i in range(len(first))] if made else None


def in_full(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns an operation's result on full tensors, on all ranks; DTensors that it writes to get their shards.

    All ranks must call this. Raises LayerwiseError if it would change a shape.
    """
    of = operation(func)
    if torch.Tag.inplace_view in func.tags:
        raise LayerwiseError(
            f"{of.name}() would change, in place, the shape of a parameter that the plan splits, or of its gradient: "
            f"use the result of {of.name.removesuffix('_')}() instead"
        )
    written = [x for x in tree_leaves(of.written(args, kwargs)) if isinstance(x, DTensor)]
    if written:
        _check_written(_plain(args, kwargs), written[0])
    fulls: dict[int, tuple[DTensor, Tensor]] = {}

    def full(x: Any) -> Any:
        if isinstance(x, DTensor) and id(x) not in fulls:
            value = everywhere(x)
            shares = value is x._local_tensor and (of.view or any(x is one for one in written))
            fulls[id(x)] = x, value.clone() if shares else value
        return fulls[id(x)][1] if isinstance(x, DTensor) else x

    result = func(*each(full, args), **dict(zip(kwargs, each(full, kwargs.values()), strict=True)))
    one = next(x for x, _ in fulls.values())
    if torch.Tag.nondeterministic_seeded in func.tags:
        mesh = all_ranks(one)
        rank = int(mesh.mesh.flatten()[0])
        for x in written:
            fulls[id(x)][1].copy_(of_rank(fulls[id(x)][1], rank, mesh))
        if not written:
            result = each(lambda x: of_rank(x, rank, mesh) if isinstance(x, Tensor) else x, (result,))[0]
    stands_for = {id(fulls[id(x)][1]): x for x in written}
    for x in written:
        x._local_tensor.copy_(shard_of(fulls[id(x)][1], x))
    if of.view:
        SHARED[:] = [(one, fulls[id(one)][1])]
    return each(lambda x: stands_for.get(id(x), x) if isinstance(x, Tensor) else x, (result,))[0]
