"""Parameters that nobody trains: any use of them raises, so that none goes unnoticed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from layerwise.errors import LayerwiseError
from layerwise.run.local_tensor import is_dtensor

NOW = "_layerwise_now"  # a replaced parameter's attribute that holds its successor


class ReplacedParameter(nn.Parameter):
    """A former parameter of the model. Others are in its place, but an optimizer or a list may still hold it."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Raises LayerwiseError."""
        raise LayerwiseError(
            "a parameter was used that is no longer the model's, because parallelize or apply() replaced it: take "
            "parameters from model.parameters(), and build the optimizer after parallelize returns"
        )


def replace_parameter(p: object, now: nn.Parameter) -> None:
    """Makes any use of a parameter raise, as `now` has replaced it in the model, and frees its memory."""
    kind = type(p)
    if (
        isinstance(p, nn.Parameter) and issubclass(kind, nn.Parameter) and kind is not ReplacedParameter
    ):  # once, if tied
        p.data, p.grad = p.data.new_empty(0), None
        p.requires_grad_(False).__class__ = ReplacedParameter
        p.__dict__[NOW] = now


def parameter_now(p: nn.Parameter) -> nn.Parameter:
    """Returns the parameter that has replaced a former one in the model."""
    now: nn.Parameter = p.__dict__.get(NOW, p)
    return now


class UnkeptTensor(Tensor):
    """A stand-in for a tensor that the forward pass sets on a layer, as weight_norm does, but the run does not."""

    is_leaf = True  # for copies of the model

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Raises LayerwiseError."""
        raise LayerwiseError(
            "a tensor was used that the model's forward pass sets on a layer, as weight_norm and prune do, but a plan "
            "that splits layers does not set: return what you need from the model, or, to prune or to remove these, "
            "call layerwise.restore(model) and then run the model once"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> UnkeptTensor:
        return self


class UnreadParameter(nn.Parameter):
    """A parameter that the model's forward pass does not read: no layer of the plan has it, and nobody trains it."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Returns `func` of it. Raises LayerwiseError if the result would need a gradient."""
        kwargs = kwargs or {}
        if any(isinstance(x, Tensor) and is_dtensor(x) for x in tree_leaves((args, kwargs))):
            if not torch.is_grad_enabled():
                return NotImplemented  # it is a full tensor, as the others are
            raise _unread()
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if any(isinstance(x, Tensor) and x.grad_fn is not None for x in tree_leaves(result)):
            raise _unread()
        return result


def _unread() -> LayerwiseError:
    return LayerwiseError(
        "a parameter that the model's forward pass does not read was used outside it, and would not be trained if the "
        "plan splits layers: return what you need from the model, or make it a parameter of your loop"
    )
