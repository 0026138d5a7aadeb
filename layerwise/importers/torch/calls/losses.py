"""Losses inside a model: a number a sample here, of which the mean (or sum) over all samples is taken last.

So a model may do with its loss only what commutes with that: scale it, add losses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from layerwise.importers.torch.ops.table import base_name
from layerwise.importers.torch.ops.views import UNCHANGED
from layerwise.importers.torch.program import Node, Ref

SCALING = (*UNCHANGED, "detach", "neg")


def follows(node: Node, losses: Mapping[str, str], elements: Callable[[Ref], int]) -> str | None:
    """The reduction of what a call makes of losses, which are named with theirs; None where it makes something else.

    elements: of a tensor. With one that has several a loss makes as many numbers, which are no loss.
    """
    first, *rest = node.arguments.values()
    if any(isinstance(v, Ref) and v.name not in losses and elements(v) != 1 for v in (first, *rest[:1])):
        return None
    taken = [losses.get(v.name, "") if isinstance(v, Ref) else "" for v in (first, *rest[:1])]
    reductions = {reduction for reduction in taken if reduction}
    if len(reductions) != 1:
        return None
    (reduction,) = reductions
    both, name = all(taken), base_name(node.target)
    if name in SCALING:
        allowed = True
    elif name in ("add", "sub", "rsub"):
        allowed = both or reduction == "mean"  # a number more for every sample changes a sum
    elif name == "mul":
        allowed = not both
    else:
        allowed = name == "div" and not both and bool(taken[0]) and node.arguments.get("rounding_mode") is None
    return reduction if allowed else None
