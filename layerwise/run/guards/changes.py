"""What a loop changes in parameters after the model was made parallel, and would not be followed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import is_

import torch
from torch import Tensor, nn

from layerwise.errors import LayerwiseError
from layerwise.run.guards.boxes import plain
from layerwise.run.parts import is_dtensor, local_part


class Places:
    """What stands where in a tree, and the memory of its DTensors, to notice when others do."""

    def __init__(self, tree: nn.Module) -> None:
        self._modules = list(tree.modules())
        self._held = self._now()
        dtensors = (held for held in self._held if isinstance(held, Tensor) and is_dtensor(held))
        self._storages = [(tensor, _storage(tensor)) for tensor in dtensors]

    def check(self) -> None:
        """LayerwiseError where a DTensor was given other memory, or a tensor or module another's place."""
        if any(_storage(tensor) != storage for tensor, storage in self._storages):
            raise LayerwiseError(
                "p.data = x was written of a parameter that the plan splits over the ranks, and has no effect on a "
                "DTensor: write p.data.copy_(x), or give load_state_dict the values"
            )
        now = self._now()
        if len(now) != len(self._held) or not all(map(is_, now, self._held)):
            raise LayerwiseError(
                "the parallel module's parameters, buffers or layers are others than it was made with, as "
                "torch.func.functional_call has it, and its plan goes on with those: give load_state_dict the values, "
                "and change layers before the model is made parallel"
            )

    def _now(self) -> list[object]:
        return [
            held
            for m in self._modules
            for held in (*m._parameters.values(), *m._buffers.values(), *m._modules.values())
        ]


class Structure:
    """A module's parameters and layers, to notice when others stand in their places."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())
        self._held = self._identities()

    def check(self) -> None:
        """LayerwiseError where some are others than when this was made."""
        if self._identities() != self._held:
            raise LayerwiseError(
                "the model has other parameters or layers than when it was made parallel, whose gradients nobody "
                "averages: change the model before, or make it parallel again"
            )

    def _identities(self) -> list[int]:
        return [id(held) for m in self._modules for held in (*m._parameters.values(), *m._modules.values())]


Version = tuple[int, int]


def versions(parameters: Mapping[str, nn.Parameter]) -> dict[str, Version]:
    """Of each parameter's values on this rank."""
    return {name: _version(p) for name, p in parameters.items()}


def _version(p: nn.Parameter) -> Version:
    """Functions of a DTensor count in it alone, those of this rank's part in that."""
    return p._version, local_part(p)._version


def check_values(parameters: Mapping[str, nn.Parameter], initial: Mapping[str, Version]) -> None:
    """LayerwiseError where a parameter has other values than when it had the version `initial` says."""
    others = (name for name, version in initial.items() if _version(parameters[name]) != version)
    changed = next((name for name in others if not _filled(parameters[name])), None)
    if changed is not None:
        raise LayerwiseError(
            f"parameter {changed!r} was given other values after the model was made parallel, but the plan splits "
            "the parameters over the ranks: initialise the model before, or by model.apply(fn), or give "
            "load_state_dict the values"
        )


def _filled(p: nn.Parameter) -> bool:
    """Whether all elements here are equal, of several, as zeros_ and constant_ make them: so are the other parts."""
    flat = plain(p).detach().reshape(-1)
    return flat.numel() > 1 and bool((flat == flat[0]).all())


def check_frozen(frozen: Iterable[tuple[str, nn.Parameter]]) -> None:
    """LayerwiseError where one of the parameters that were frozen is trained."""
    thawed = next((name for name, p in frozen if p.requires_grad), None)
    if thawed is not None:
        raise LayerwiseError(
            f"parameter {thawed!r} was frozen when the plan was made, so nobody adds up its gradients: make the "
            "model parallel again, with requires_grad=True from the beginning"
        )


def _storage(p: Tensor) -> int:
    """That of a DTensor itself, which has no memory: another one after `p.data = x`, which leaves its part as it is."""
    number: int = torch._C.TensorBase.untyped_storage(p)._cdata
    return number
