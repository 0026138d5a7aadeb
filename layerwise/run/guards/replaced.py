"""Parameters that nobody trains: any use of them that would go unnoticed raises a sentence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from layerwise.errors import LayerwiseError
from layerwise.run.local_tensor import is_dtensor

NOW = "_layerwise_now"  # the attribute of a replaced parameter that has the one in its place


class ReplacedParameter(nn.Parameter):
    """A parameter that the model has had: others are in its place, which an optimizer or a list of before lacks."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """LayerwiseError."""
        raise LayerwiseError(
            "a parameter was used that is the model's no more, as parallelize and apply() put others in its place: "
            "take those from model.parameters(), and build the optimizer over the returned model's parameters"
        )


def replace_parameter(p: object, now: nn.Parameter) -> None:
    """Has any use of a parameter raise, as the model has another one now, and frees its memory."""
    kind = type(p)
    if (
        isinstance(p, nn.Parameter) and issubclass(kind, nn.Parameter) and kind is not ReplacedParameter
    ):  # once, if tied
        p.data, p.grad = p.data.new_empty(0), None
        p.requires_grad_(False).__class__ = ReplacedParameter
        p.__dict__[NOW] = now


def parameter_now(p: nn.Parameter) -> nn.Parameter:
    """Returns the parameter that the model has now in the place of one of before."""
    now: nn.Parameter = p.__dict__.get(NOW, p)
    return now


class UnkeptTensor(Tensor):
    """A stand-in of a tensor that the forward pass sets on a layer, as weight_norm does, and the run does not."""

    is_leaf = True  # for copies of the model

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """LayerwiseError."""
        raise LayerwiseError(
            "a tensor that the model's forward pass sets on a layer, as weight_norm and prune do, was used, and a plan "
            "that splits layers does not set it: let the model return what it is for, or, to prune it or to remove "
            "these, call layerwise.restore(model) and then the model once"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> UnkeptTensor:
        return self


class UnreadParameter(nn.Parameter):
    """A parameter that the model's forward pass does not read, so that no plan's layer has it, and nobody trains it."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Returns what `func` makes of it. LayerwiseError where a gradient would be wanted of that."""
        kwargs = kwargs or {}
        if any(isinstance(x, Tensor) and is_dtensor(x) for x in tree_leaves((args, kwargs))):
            if not torch.is_grad_enabled():
                return NotImplemented  # it is a full tensor beside those
            raise _unread()
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if any(isinstance(x, Tensor) and x.grad_fn is not None for x in tree_leaves(result)):
            raise _unread()
        return result


def _unread() -> LayerwiseError:
    return LayerwiseError(
        "a parameter that the model's forward pass does not read was used outside of it, and would not be trained "
        "where a plan splits layers: let the model return what it is for, or make it a parameter of the loop's own"
    )
