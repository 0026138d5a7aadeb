"""What a loop does that a plan that splits layers does not support, or would not follow: one sentence each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import is_
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from layerwise.errors import LayerwiseError
from layerwise.run.local_tensor import Version, is_dtensor, local_tensor, version

AS_WRITTEN = (
    "parallelize with strategy='data', which runs the model as it is written unless it has a loss or a functional "
    "dropout inside"
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
        self._attributes = [(name, vars(module), dict(vars(module))) for name, module in root.named_modules()]

    def check(self, *, training: bool) -> None:
        """LayerwiseError where one is another now, or a module has another mode than the whole model."""
        for name, now, before in self._attributes:
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
        self._modules, self._buffers = list(module.modules()), buffers
        self.held = self._now()

    def changed(self) -> bool:
        """True if some are others than when this was made."""
        now = self._now()
        return len(now) != len(self.held) or not all(map(is_, now, self.held))

    def _now(self) -> list[object]:
        objects: list[object] = []
        for module in self._modules:
            objects += (*module._parameters.values(), *module._modules.values())
            if self._buffers:
                objects += module._buffers.values()
        return objects


class Places:
    """The tensors and modules of a tree in their places, and the memory of its DTensors, to notice others."""

    def __init__(self, tree: nn.Module) -> None:
        self._structure = Structure(tree, buffers=True)
        dtensors = (held for held in self._structure.held if isinstance(held, Tensor) and is_dtensor(held))
        self._storages = [(tensor, _storage(tensor)) for tensor in dtensors]

    def check(self) -> None:
        """LayerwiseError where a DTensor was given other memory, or a tensor or module another's place."""
        if any(_storage(tensor) != storage for tensor, storage in self._storages):
            raise LayerwiseError(
                "p.data = x was written of a parameter that the plan splits over the ranks, and has no effect on a "
                "DTensor: write p.data.copy_(x), or give load_state_dict the values"
            )
        if self._structure.changed():
            raise LayerwiseError(
                "the parallel module's parameters, buffers or layers are others than it was made with, as "
                "torch.func.functional_call has it, and its plan goes on with those: give load_state_dict the values, "
                "and change layers before the model is made parallel"
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


def check_values(parameters: Mapping[str, nn.Parameter], initial: Mapping[str, Version]) -> None:
    """LayerwiseError where a parameter has other values than when it had the version `initial` says."""
    others = (name for name, before in initial.items() if version(parameters[name]) != before)
    changed = next((name for name in others if not _filled(parameters[name])), None)
    if changed is not None:
        raise LayerwiseError(
            f"parameter {changed!r} was given other values after the model was made parallel, but the plan splits "
            "the parameters over the ranks: initialise the model before, or by model.apply(fn), or give "
            "load_state_dict the values"
        )


def _filled(p: nn.Parameter) -> bool:
    """True if all elements here are equal, of none or several, as zeros_ and constant_ make them: so are the others."""
    flat = local_tensor(p).detach().reshape(-1)
    return flat.numel() != 1 and bool((flat == flat[:1]).all())


def check_frozen(frozen: Iterable[tuple[str, nn.Parameter]]) -> None:
    """LayerwiseError where one of the parameters that were frozen is trained."""
    thawed = next((name for name, p in frozen if p.requires_grad), None)
    if thawed is not None:
        raise LayerwiseError(
            f"parameter {thawed!r} was frozen when the plan was made, so nobody adds up its gradients: make the "
            "model parallel again, with requires_grad=True from the beginning"
        )


def _storage(p: Tensor) -> int:
    """Returns the storage of a DTensor itself, without memory: `p.data = x` makes another beside its local tensor."""
    number: int = torch._C.TensorBase.untyped_storage(p)._cdata
    return number
