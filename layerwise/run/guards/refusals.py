"""Refusals: one sentence for each thing in a loop that a plan that splits layers does not support."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import is_
from typing import Any, NoReturn

from torch import nn

from layerwise.errors import LayerwiseError
from layerwise.run.local_tensor import Version, version

AS_WRITTEN = (
    "parallelize with strategy='data', which runs the model as it is written, if each rank has a sample and the model "
    "contains no loss and no functional dropout (otherwise use DistributedDataParallel)"
)


def unsupported(what: str, instead: str) -> LayerwiseError:
    """Returns the error for something that a loop does. instead: what to do, beside a plan that splits samples only."""
    return LayerwiseError(
        f"{what} is not supported if the plan splits layers, which run as they were traced: {instead}, or {AS_WRITTEN}"
    )


def _refusing(what: str, instead: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise unsupported(what, instead)

    return refuse


BEFORE = "change layers before you parallelize the model, or after layerwise.restore(model)"


def _changed(*_: Any, **__: Any) -> NoReturn:
    raise LayerwiseError(
        "a parameter or buffer of one of the parallel model's layers was replaced or added, as prune and weight_norm "
        f"do, but the plan uses the ones it was made with: {BEFORE}"
    )


_CALLED = _refusing("a call or a hook of one of the model's layers", "return what you need from the model")
# Methods set on the instance of each submodule, in place of its class's.
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


class Structure:
    """The parameters and modules in a module (and buffers, if asked), to notice when they are replaced."""

    def __init__(self, module: nn.Module, *, buffers: bool) -> None:
        # Not the modules, which would hold what holds this.
        self._slots = [(m._parameters, m._modules, m._buffers if buffers else {}) for m in module.modules()]
        self.held = self._now()

    def changed(self) -> bool:
        """True if some have been replaced since."""
        now = self._now()
        return len(now) != len(self.held) or not all(map(is_, now, self.held))

    def _now(self) -> list[object]:
        objects: list[object] = []
        for slots in self._slots:
            for each in slots:
                objects += each.values()
        return objects


def versions(parameters: Mapping[str, nn.Parameter]) -> dict[str, Version]:
    """Returns the version of each parameter's values on this rank."""
    return {name: version(p) for name, p in parameters.items()}


def check_unwritten(parameters: Mapping[str, nn.Parameter], before: Mapping[str, Version]) -> None:
    """Raises LayerwiseError if a parameter was written to between a forward pass and its backward pass.

    PyTorch notices that in tensors that kernels have saved, but not in a DTensor's shard nor in recomputation.
    """
    changed = next(
        (name for name, was in before.items() if name in parameters and version(parameters[name]) != was), None
    )
    if changed is not None:
        raise LayerwiseError(
            f"parameter {changed!r} was modified between its forward pass and its backward pass, which needs the old "
            "values: step the optimizer after the backward pass"
        )


def check_frozen(frozen: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raises LayerwiseError if a parameter that was frozen is now trained."""
    thawed = next((name for name, p in frozen if p.requires_grad), None)
    if thawed is not None:
        raise LayerwiseError(
            f"parameter {thawed!r} was frozen when the plan was made, so its gradients would not be summed: set "
            "requires_grad=True first, and parallelize the model again"
        )
