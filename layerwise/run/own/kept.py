"""What a model keeps in attributes, beside what it returns: an auxiliary loss, such as a router's."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.utils import _pytree as pytree


def treat_kept(module: nn.Module, treat: Callable[[Tensor], Tensor]) -> None:
    """Puts `treat` of the differentiable tensors that are in attributes in their places."""
    for owner in module.modules():
        for name, value in list(vars(owner).items()):
            holds = isinstance(value, Tensor | list | tuple | dict) and not name.startswith("_")
            if holds and any(isinstance(x, Tensor) and x.grad_fn is not None for x in pytree.tree_leaves(value)):
                owner.__dict__[name] = pytree.tree_map_only(Tensor, treat, value)
