"""What a plan that splits layers does not support: one sentence says so of each thing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torch import nn

from layerwise.errors import LayerwiseError

AS_WRITTEN = "parallelize with strategy='data', which runs the model as it is written"


def unsupported(what: str, instead: str) -> LayerwiseError:
    """The error for something that a loop does; `instead`: what it can do, beside splitting samples only."""
    return LayerwiseError(
        f"{what} is not supported where a plan splits layers, which run as they were traced: {instead}, or {AS_WRITTEN}"
    )


def _refusing(what: str, instead: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise unsupported(what, instead)

    return refuse


_CALLED = _refusing("a call or a hook of one of the model's layers", "let the model return what it is for")
# Methods of a module of the parallel one, which stand on the instance in place of its class's.
REFUSED: Mapping[str, Callable[..., NoReturn]] = {
    "forward": _CALLED,
    "register_forward_hook": _CALLED,
    "register_forward_pre_hook": _CALLED,
    "register_full_backward_hook": _CALLED,
    "register_full_backward_pre_hook": _CALLED,
    "register_backward_hook": _CALLED,
    "_apply": _refusing("to(), float() and the like of one of the model's layers", "call it on the whole model"),
    "load_state_dict": _refusing(
        "load_state_dict() of one of the model's layers",
        "give the whole model's, with strict=False, these values under their full names",
    ),
    "__reduce_ex__": _refusing("a copy of one of the model's layers", "copy the whole model, or take state_dict()"),
}


class Unchanged:
    """The attributes of all modules below `root`, as they are now: layers go on with these."""

    def __init__(self, root: nn.Module) -> None:
        self._rows = [(name, vars(module), dict(vars(module))) for name, module in root.named_modules()]

    def check(self, *, training: bool) -> None:
        """LayerwiseError where one is another now, or a module has another mode than the whole model."""
        for name, now, before in self._rows:
            before["training"] = training
            if not _equal(now, before):  # quick where nothing was set: all values are the same objects
                keys = dict.fromkeys((*now, *before))
                changed = next(key for key in keys if not _equal(now.get(key, self), before.get(key, self)))
                raise unsupported(
                    f"{changed!r} of module {name!r}, which was set after the model was made parallel,",
                    "set it before, and train() and eval() of the whole model",
                )


def _equal(now: object, before: object) -> bool:
    try:
        return now is before or bool(now == before)
    except Exception:  # of arrays, or of a user's class
        return False
