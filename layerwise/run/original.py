"""Original: what the user's model has beside its layers, for the parallel one to have, too."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from layerwise.run.guards.code import written
from layerwise.run.state.tree import is_plain


class Original:
    """Attributes without tensors, and methods, which then see the parallel module as `self`."""

    def __init__(self, module: nn.Module) -> None:
        self.kind, self._written = type(module), written(type(module))
        lost = {"training", *self._written}
        public = {name: value for name, value in vars(module).items() if not name.startswith("_") and name not in lost}
        self.attributes = {name: value for name, value in public.items() if is_plain(value)}

    def get(self, name: str, owner: nn.Module) -> Any:
        """The attribute, or a property's value or a method of `owner`. AttributeError where the model has none."""
        if name in self.attributes:
            return self.attributes[name]
        if name in self._written:
            raise AttributeError(
                f"{name!r} is what the forward pass of {self.kind.__name__} keeps in an attribute, and the parallel "
                "module does not call it: let the model return it"
            )
        known = inspect.getattr_static(self.kind, name, None)
        if known is None or name.startswith("_"):
            raise AttributeError(f"neither the parallel module nor {self.kind.__name__} has {name!r}")
        return known.__get__(owner, self.kind) if hasattr(known, "__get__") else known
