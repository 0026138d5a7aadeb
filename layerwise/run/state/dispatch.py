"""What PyTorch's operations make of PlanDTensors: of this rank's shards, or of full tensors."""

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
from layerwise.run.state.operations import each, each_of, elementwise, is_view, name_of, reduced, written_by

SHARED = list[tuple[Any, Tensor]]()  # what the last operation has made a view of, and the full tensor


def full_of(x: Any) -> Any:
    """Returns the full tensor of a DTensor, and anything else as it is."""
    return everywhere(x) if isinstance(x, DTensor) else x


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
    try:
        return shard_of(x.expand(target.shape), target)
    except RuntimeError:
        return NotImplemented


def _check_written(values: Iterable[Any], target: DTensor) -> None:
    """LayerwiseError where plain tensors beside what is written to are others on other ranks.

    Numbers are looked at where gradients are on, as optimizers have theirs within no_grad. In autograd's formulas what
    is plain is the mean over the ranks.
    """
    least = 0 if torch.is_grad_enabled() else 1
    plain = [x for x in values if isinstance(x, Tensor) and not isinstance(x, DTensor) and x.numel() > least]
    if plain and not in_backward():
        check_alike(plain, all_ranks(target))


def locally(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns what an element-wise operation makes of this rank's shards; NotImplemented where that is not right."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    written = written_by(func, args, kwargs)
    if written and not isinstance(written[0], DTensor):
        return NotImplemented
    target = written[0] if written else max((x for x in tensors if isinstance(x, DTensor)), key=lambda x: x.dim())
    if any(x.dim() > target.dim() for x in tensors):
        return NotImplemented
    if written:
        _check_written(tensors, target)
    elif not in_backward() and any(x.numel() > 1 and not isinstance(x, DTensor) for x in tensors):
        return NotImplemented  # each rank may have another one
    local = {id(x): _beside(x, target) for x in tensors}
    if any(x is NotImplemented for x in local.values()):
        return NotImplemented
    local_args, named = each_of(lambda x: local.get(id(x), x) if isinstance(x, Tensor) else x, args, kwargs)
    result = func(*local_args, **named)
    if written:
        return written[0]
    return like(target, result) if isinstance(result, Tensor) else result


def of_lists(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns what an operation makes of lists of tensors: of PlanDTensors and of others, each by themselves."""
    first, made = args[0], dict[int, Any]()
    dtensors = [i for i, x in enumerate(first) if isinstance(x, DTensor)]
    others = [i for i, x in enumerate(first) if not isinstance(x, DTensor)]
    written = [x[i] for x in written_by(func, args, kwargs) if x and len(x) == len(first) for i in dtensors]
    if any(isinstance(x, Tensor) and not isinstance(x, DTensor) for x in written):
        return in_full(func, args, kwargs)  # an optimizer's state is one device's: full tensors
    p = float(args[1] if len(args) > 1 else 2) if name == "_foreach_norm" else 0.0
    if p > 0 and dtensors:
        number = "norm", p
        made = dict(zip(dtensors, reduced(number, [first[i] for i in dtensors], kwargs.get("dtype")), strict=True))
        dtensors = []
    elif not elementwise(func):
        dtensors, others = [], list(range(len(first)))
    elif dtensors:
        _check_written(tree_leaves((args[1:], dict(kwargs))), first[dtensors[0]])
    for where in filter(None, (dtensors, others)):
        beside = _beside if where is dtensors else lambda x, _: full_of(x)

        def some(x: Any, where: Sequence[int] = where, beside: Any = beside) -> Any:
            if type(x) in (list, tuple) and len(x) == len(first):
                return [beside(x[i], first[i]) for i in where]
            return full_of(x)

        result = func(*map(some, args), **{key: some(x) for key, x in kwargs.items()})
        for i, x in zip(where, result or (), strict=False):
            made[i] = like(first[i], x) if where is dtensors else x
    return [made[i] for i in range(len(first))] if made else None


def in_full(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
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
    if written:
        _check_written(tree_leaves((args, dict(kwargs))), written[0])
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
        mesh = all_ranks(one)
        rank = int(mesh.mesh.flatten()[0])
        for x in written:
            fulls[id(x)][1].copy_(of_rank(fulls[id(x)][1], rank, mesh))
        if not written:
            result = each(lambda x: of_rank(x, rank, mesh) if isinstance(x, Tensor) else x, (result,))[0]
    stands_for = {id(fulls[id(x)][1]): x for x in written}
    for x in written:
        x._local_tensor.copy_(shard_of(fulls[id(x)][1], x))
    if is_view(func):
        SHARED[:] = [(one, fulls[id(one)][1])]
    return each(lambda x: stands_for.get(id(x), x) if isinstance(x, Tensor) else x, (result,))[0]
