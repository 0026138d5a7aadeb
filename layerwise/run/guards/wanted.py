"""Gradients of some tensors only: torch.autograd.grad, and loss.backward(inputs=...).

A plan that runs layers one by one on several ranks computes with leaves in the parameters' place. PyTorch would find no
way to the parameters, and give None, or nothing at all, where a loop has `allow_unused=True` or `inputs=`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.weak import WeakIdKeyDictionary

from layerwise.errors import LayerwiseError

_names = WeakIdKeyDictionary()  # of parameters that have leaves in their place
_leaves = WeakIdKeyDictionary()  # these


def refuse_alone(p: Tensor, name: str) -> None:
    """From now on a pass that is for this parameter is refused where it would lack what layers made of it."""
    _names[p] = name
    before_every_pass(_check)


def stands_in(leaf: Tensor) -> None:
    """Layers compute with this one in a parameter's place."""
    _leaves[leaf] = True


@cache
def before_every_pass(check: Callable[[Sequence[Any], Sequence[Any]], None]) -> None:
    """Calls `check(outputs, inputs)` before each pass of autograd, from now on; once, however often it is given."""
    room: Any = torch.autograd
    run = room._engine_run_backward  # what both go through, under whatever name a loop has imported them

    @wraps(run)
    def checked(
        outputs: Sequence[Any], gradients: Any, retain: Any, create: Any, inputs: Any, *rest: Any, **how: Any
    ) -> Any:
        if inputs:
            check(outputs, inputs)
        return run(outputs, gradients, retain, create, inputs, *rest, **how)

    room._engine_run_backward = checked


def _check(outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
    name = next((_names[p] for one in inputs if (p := _leaf(one)) is not None and p in _names), None)
    if name is not None and _reaches_layers(outputs):
        raise LayerwiseError(
            f"the gradient of parameter {name!r} was asked for by torch.autograd.grad or by inputs= of backward(), "
            "which do not find it where a plan runs layers one by one: call loss.backward(), which averages over the "
            "ranks, and take its .grad"
        )


def _leaf(one: Any) -> Tensor | None:
    """The leaf that a pass is asked for, if it is one."""
    return getattr(one.node, "variable", None) if isinstance(one, GradientEdge) else one


def _reaches_layers(outputs: Iterable[Any]) -> bool:
    """Whether their graph comes to what layers compute with."""
    edges = (one if isinstance(one, GradientEdge) else get_gradient_edge(one) for one in outputs)
    nodes = [edge.node for edge in edges]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None and leaf in _leaves:
            return True
        following = {one for one, _ in node.next_functions if one is not None} - seen
        seen |= following
        nodes += following
    return False
