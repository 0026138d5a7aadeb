"""Parameters that are not trained: any use of them that would go unnoticed raises a sentence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from layerwise.errors import LayerwiseError


class RefusedParameter(nn.Parameter):
    """A parameter that is not the trained one: any use that its class does not allow raises the sentence of that."""

    sentence: ClassVar[str] = ""

    @classmethod
    def allows(cls, func: Callable[..., Any], args: Sequence[Any]) -> bool:
        """Returns whether a function may have it."""
        return False

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Returns what `func` makes of it. LayerwiseError where that is not allowed."""
        if not cls.allows(func, args):
            raise LayerwiseError(cls.sentence)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


# What may be asked of it as ever; the first ones by load_state_dict.
METADATA = frozenset[Any](
    (
        *(vars(torch._C.TensorBase)[name].__get__ for name in ("shape", "is_meta", "dtype", "device", "ndim")),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.element_size),
    )
)


class UnreadParameter(RefusedParameter):
    """A parameter that the model's forward pass does not read, so that no plan's layer has it, and nobody trains it."""

    sentence = (
        "a parameter that the model's forward pass does not read was used outside of it, and would not be trained "
        "where a plan splits layers: let the model return what it is for, or make it a parameter of the loop's own"
    )

    @classmethod
    def allows(cls, func: Callable[..., Any], args: Sequence[Any]) -> bool:
        """Returns whether no gradient may be wanted of it."""
        return not torch.is_grad_enabled() or func in METADATA
