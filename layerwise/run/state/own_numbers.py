"""Numbers of split parameters, such as a penalty on weights, are plain beside a rank's own tensor, such as its loss.

So the loss is a plain tensor, too. As a DTensor it would not be sent as others are, nor taken by the backward pass of a
cross entropy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from layerwise.errors import LayerwiseError
from layerwise.run.state.meshes import ALL_RANKS, everywhere, on_mesh
from layerwise.run.state.operations import own_tensors


def _assigning(name: str) -> Callable[[Any, Any], Any]:
    """Returns the operator that writes to a number, or makes another one of it and of a rank's own number."""

    def act(number: Any, other: Any) -> Any:
        another = own_tensors([other]) and not (number.is_leaf and number.requires_grad)
        return getattr(number, name if another else f"{name}_")(other)

    return act


class NumberBesideOwn(Tensor):
    """A DTensor without dimensions that is a plain number to functions that are given plain tensors, too."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Returns what `func` makes of it, or of the plain number."""
        name: str = getattr(func, "__name__", "")
        kwargs = kwargs or {}
        if name in ("__set__", "grad") or not own_tensors([*args, *kwargs.values()]):
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        in_place = name.endswith("_") and not name.endswith("__")
        if any(isinstance(x, DTensor) for x in tree_leaves(args[:1] if in_place else kwargs.get("out"))):
            if torch.is_grad_enabled():
                raise LayerwiseError(
                    f"{name}() would write a number of this rank's own to one that all ranks have, as of a penalty on "
                    "weights: make another, loss + penalty"
                )
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = tree_map(lambda x: _OwnNumber.apply(x) if isinstance(x, cls) else x, (args, kwargs))  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)

    # Of `loss += x` what this returns goes on.
    __iadd__, __isub__, __imul__, __itruediv__ = map(_assigning, ("add", "sub", "mul", "div"))

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)


class _OwnNumber(torch.autograd.Function):
    """A DTensor's number as a plain one; its gradient is the mean over the ranks, as those of parameters are."""

    @staticmethod
    def forward(ctx: Any, number: DTensor) -> Tensor:
        ctx.kind, ctx.mesh = type(number), number.device_mesh
        return everywhere(number).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> DTensor:
        mesh = ALL_RANKS.get(ctx.mesh, ctx.mesh)
        mean = gradient / mesh.size()
        for axis in range(mesh.ndim):
            torch.distributed.all_reduce(mean, group=mesh.get_group(axis))
        everywhere_mean = on_mesh(ctx.mesh, mean)
        number: DTensor = ctx.kind(everywhere_mean._local_tensor, everywhere_mean._spec, requires_grad=False)
        return number
