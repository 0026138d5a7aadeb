"""What a loop changes in parameters and layers after the model was made parallel, and would not be followed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import is_

import torch
from torch import Tensor, nn

from layerwise.errors import LayerwiseError
from layerwise.run.parts import Version, is_dtensor, local_part, version


class Structure:
    """What stands where in a module, to notice when others do: parameters and modules, and buffers where said."""

    def __init__(self, module: nn.Module, *, buffers: bool) -> None:
        self._modules, self._buffers = list(module.modules()), buffers
        self.held = self._now()

    def changed(self) -> bool:
        """Whether some are others than when this was made."""
        now = self._now()
        return len(now) != len(self.held) or not all(map(is_, now, self.held))

    def _now(self) -> list[object]:
        held: list[object] = []
        for module in self._modules:
            held += (*module._parameters.values(), *module._modules.values())
            if self._buffers:
                held += module._buffers.values()
        return held


class Places:
    """What stands where in a tree, and the memory of its DTensors, to notice when others do."""

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
    """Of each parameter's values on this rank."""
    return {name: version(p) for name, p in parameters.items()}


def check_unwritten(parameters: Mapping[str, nn.Parameter], before: Mapping[str, Version]) -> None:
    """LayerwiseError where a parameter was written to since the forward pass that a backward pass belongs to.

    PyTorch sees that itself in tensors that kernels have saved, but not in a DTensor's part, nor in what is recomputed.
    """
    changed = next(
        (name for name, one in before.items() if name in parameters and version(parameters[name]) != one), None
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
    """Whether all elements here are equal, of none or several, as zeros_ and constant_ make them: so are the others."""
    flat = local_part(p).detach().reshape(-1)
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
    """That of a DTensor itself, which has no memory: another one after `p.data = x`, which leaves its part as it is."""
    number: int = torch._C.TensorBase.untyped_storage(p)._cdata
    return number
