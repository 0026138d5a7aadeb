"""What a loop changes in parameters after the model was made parallel, and would not be followed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from layerwise.errors import LayerwiseError
from layerwise.run.guards.boxes import plain
from layerwise.run.parts import is_dtensor, local_part


class Places:
    """Where a tree's parameters stand, and their memory, to notice when others do."""

    def __init__(self, tree: nn.Module) -> None:
        held = (module._parameters for module in tree.modules())
        self._slots = [(slots, key, p, _storage(p)) for slots in held for key, p in slots.items() if p is not None]

    def check(self) -> None:
        """LayerwiseError where a DTensor was given other memory, or a parameter another's place."""
        if any(is_dtensor(p) and _storage(p) != storage for *_, p, storage in self._slots):
            raise LayerwiseError(
                "p.data = x was written of a parameter that the plan splits over the ranks, and has no effect on a "
                "DTensor: write p.data.copy_(x), or give load_state_dict the values"
            )
        if any(slots.get(key) is not p for slots, key, p, _ in self._slots):
            raise LayerwiseError(
                "the parallel module's parameters are others than it was made with, as torch.func.functional_call has "
                "it: the plan splits them over the ranks; give load_state_dict the values"
            )


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
