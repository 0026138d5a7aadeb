"""What a loop changes in the modules of a tree, beside their tensors: it would not be followed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from layerwise.errors import LayerwiseError
from layerwise.run.guards.code import reads
from layerwise.run.guards.refusing import REFUSED
from layerwise.run.state.tree import FRESH, Names, is_plain

_MISSING: Any = object()


class Attributes:
    """Of all modules of a tree, as they are now; and the modes of those that compute something else in evaluation."""

    def __init__(self, root: nn.Module) -> None:
        modules = list(root.named_modules())
        self._rows = [(name, module, dict(vars(module)), dict(vars(module))) for name, module in modules]
        kinds = {type(module) for _, module in modules}
        modal = {kind for kind in kinds if kind is Names or reads(kind, "training", torchs=True)}
        self._modes = [(name, vars(module)) for name, module in modules if type(module) in modal]

    def check(self, *, training: bool) -> None:
        """LayerwiseError where one is not as it was, or has another mode than the whole model."""
        for name, now in self._modes:
            if now["training"] is not training:
                raise LayerwiseError(
                    f"module {name!r} is in {_mode(not training)} mode and the parallel module in {_mode(training)}, "
                    "which has one mode for all of its layers: call train() or eval() of the whole model, or "
                    "parallelize with strategy='data'"
                )
        for name, module, first, last in self._rows:
            if not _equal(vars(module), last):  # quick where nothing was set: then all values are the same objects
                _compare(name, module, first)
                last.clear()
                last.update(vars(module))


def _compare(name: str, module: nn.Module, first: Mapping[str, Any]) -> None:
    """LayerwiseError where an attribute is not as at first, or a new one is of a name that the module's class reads."""
    now = vars(module)
    for key in dict.fromkeys((*first, *now)):
        before, after = first.get(key, _MISSING), now.get(key, _MISSING)
        if key == "training" or after is before or (before is _MISSING and not reads(type(module), key, torchs=True)):
            continue
        if before is _MISSING or after is _MISSING or not (type(before) is type(after) and _equal(before, after)):
            change = "was set" if before is _MISSING else "was deleted" if after is _MISSING else "was changed"
            raise LayerwiseError(
                f"{key!r} of module {name!r} {change} after the model was made parallel, and its plan goes on as it "
                "was traced: do it before, or parallelize with strategy='data'"
            )


def _equal(before: object, after: object) -> bool:
    try:
        return bool(before == after)
    except Exception:  # of arrays, or of a user's class
        return False


def carry(module: nn.Module, to: nn.Module) -> None:
    """What a loop has changed in a module's attributes and mode is the same in a copy of it."""
    known = {*FRESH, *REFUSED, "apply"} - {"training"}
    to.__dict__.update({key: value for key, value in vars(module).items() if key not in known and is_plain(value)})


def _mode(training: bool) -> str:
    return "training" if training else "evaluation"
