"""Original: what the user's model has beside its layers, for the parallel one to have, too."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


class Original:
    """Attributes without tensors, and methods, which then see the parallel module as `self`."""

    def __init__(self, module: nn.Module) -> None:
        self.kind = type(module)
        self.attributes = {name: value for name, value in vars(module).items() if _plain(name, value)}

    def get(self, name: str, owner: nn.Module) -> Any:
        """The attribute, or a property's value or a method of `owner`. AttributeError where the model has none."""
        if name in self.attributes:
            return self.attributes[name]
        known = inspect.getattr_static(self.kind, name, None)
        if known is None or name.startswith("_"):
            raise AttributeError(f"neither the parallel module nor {self.kind.__name__} has {name!r}")
        return known.__get__(owner, self.kind) if hasattr(known, "__get__") else known


def _plain(name: str, value: object) -> bool:
    if name.startswith("_") or name == "training":
        return False
    return not any(isinstance(leaf, torch.Tensor | nn.Module) for leaf in pytree.tree_leaves(value))
