"""What an nn.Module can and a parallel one, or a part of it, cannot: each is refused with a sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torch import nn

from layerwise.errors import LayerwiseError
from layerwise.run.compiling import refuse


def _called(*_: Any, **__: Any) -> NoReturn:
    raise LayerwiseError(
        "the parallel module computes its layers by itself, none is called as a module: a hook of one, or a call, "
        "is not supported; let the model return what it is for, or parallelize with strategy='data'"
    )


def _moved(*_: Any, **__: Any) -> NoReturn:
    raise LayerwiseError(
        "to(), float(), half() and the like of a part of the parallel module are not supported: call them on the whole "
        "model, or before it is made parallel"
    )


def _loaded(*_: Any, **__: Any) -> NoReturn:
    raise LayerwiseError(
        "load_state_dict of a part of the parallel module is not supported: give the whole model's, with strict=False, "
        "these values under their whole names, or load them before it is made parallel"
    )


# Methods of a part of the parallel module, which stand on the instance in place of its class's.
REFUSED: Mapping[str, Callable[..., NoReturn]] = {
    "forward": _called,
    "register_forward_hook": _called,
    "register_forward_pre_hook": _called,
    "register_full_backward_hook": _called,
    "register_full_backward_pre_hook": _called,
    "register_backward_hook": _called,
    "compile": _called,
    "_apply": _moved,
    "load_state_dict": _loaded,
}


class Refusing(nn.Module):
    """What else an nn.Module can, and a parallel one cannot."""

    @property
    def _initialize_hook(self) -> NoReturn:  # what torch.compile asks a module for
        refuse()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise LayerwiseError(
            "the parallel module cannot be pickled: layerwise.save(model, file) writes the whole model's state dict"
        )
