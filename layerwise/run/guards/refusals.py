"""What a loop does that a plan that splits layers does not support, or would not follow: one sentence each."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from operator import is_
from typing import Any, NoReturn

from torch import nn

from layerwise.errors import LayerwiseError
from layerwise.run.local_tensor import Version, version

AS_WRITTEN = (
    "parallelize with strategy='data', which runs the model as it is written where each rank has a sample, and no loss "
    "or functional dropout is inside (DistributedDataParallel runs it with these, too)"
)


def unsupported(what: str, instead: str) -> LayerwiseError:
    """Returns the error for something that a loop does; `instead`: what it can do, beside splitting samples only."""
    return LayerwiseError(
        f"{what} is not supported where a plan splits layers, which run as they were traced: {instead}, or {AS_WRITTEN}"
    )


def _refusing(what: str, instead: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise unsupported(what, instead)

    return refuse


BEFORE = "change layers before the model is made parallel, or after layerwise.restore(model)"


def _changed(*_: Any, **__: Any) -> NoReturn:
    raise LayerwiseError(
        "a parameter or buffer of one of the parallel module's layers was to be replaced or added, as prune, "
        f"weight_norm and their removal do, and its plan goes on with those that it has: {BEFORE}"
    )


_CALLED = _refusing("a call or a hook of one of the model's layers", "let the model return what it is for")
# Methods of a module of the parallel one, which stand on the instance in place of its class's.
REFUSED: Mapping[str, Callable[..., NoReturn]] = {
    "forward": _CALLED,
    "register_forward_hook": _CALLED,
    "register_forward_pre_hook": _CALLED,
    "register_full_backward_hook": _CALLED,
    "register_full_backward_pre_hook": _CALLED,
    "register_backward_hook": _CALLED,
    "register_parameter": _changed,
    "register_buffer": _changed,
    "_apply": _refusing("to(), float() and the like of one of the model's layers", "call it on the whole model"),
    "__reduce_ex__": _refusing("a copy of one of the model's layers", "copy the whole model, or take state_dict()"),
}


class Unchanged:
    """The attributes of all modules below `root`, as they are now: layers go on with these.

    The root may have further ones, of the loop's own.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = weakref.ref(root)
        self._attributes = [(name, vars(m), dict(vars(m))) for name, m in root.named_modules() if m is not root]
        self._own = {name: value for name, value in vars(root).items() if name != "_layerwise"}

    def check(self, *, training: bool) -> None:
        """LayerwiseError where one is another now, or a module has another mode than the whole model."""
        root = vars(self._root())
        for name, now, before in [*self._attributes, ("", {key: root.get(key) for key in self._own}, self._own)]:
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


class Structure:
    """The parameters and modules (buffers: these, too) in their places in a module, to notice when others are there."""

    def __init__(self, module: nn.Module, *, buffers: bool) -> None:
        # Not the modules, which would hold what holds this.
        self._slots = [(m._parameters, m._modules, m._buffers if buffers else {}) for m in module.modules()]
        self.held = self._now()

    def changed(self) -> bool:
        """True if some are others than when this was made."""
        now = self._now()
        return len(now) != len(self.held) or not all(map(is_, now, self.held))

    def _now(self) -> list[object]:
        objects: list[object] = []
        for slots in self._slots:
            for each in slots:
                objects += each.values()
        return objects


def check_places(structure: Structure) -> None:
    """LayerwiseError where a tensor or module of the model was given another's place."""
    if structure.changed():
        raise LayerwiseError(
            "the parallel module's parameters, buffers or layers are others than it was made with, as "
            "torch.func.functional_call and parametrizations have it, and its plan goes on with those: give "
            f"load_state_dict the values, and {BEFORE}"
        )


def versions(parameters: Mapping[str, nn.Parameter]) -> dict[str, Version]:
    """Returns the version of each parameter's values on this rank."""
    return {name: version(p) for name, p in parameters.items()}


def check_unwritten(parameters: Mapping[str, nn.Parameter], before: Mapping[str, Version]) -> None:
    """LayerwiseError where a parameter was written to since the forward pass that a backward pass belongs to.

    PyTorch sees that itself in tensors that kernels have saved, but not in a DTensor's part, nor in what is recomputed.
    """
    changed = next(
        (name for name, was in before.items() if name in parameters and version(parameters[name]) != was), None
    )
    if changed is not None:
        raise LayerwiseError(
            f"parameter {changed!r} was written to between its forward pass and its backward pass, which needs the "
            "values of before: step the optimizer after the backward pass"
        )


def check_frozen(frozen: Iterable[tuple[str, nn.Parameter]]) -> None:
    """LayerwiseError where one of the parameters that were frozen is trained."""
    thawed = next((name for name, p in frozen if p.requires_grad), None)
    if thawed is not None:
        raise LayerwiseError(
            f"parameter {thawed!r} was frozen when the plan was made, so nobody adds up its gradients: make the "
            "model parallel again, with requires_grad=True from the beginning"
        )
