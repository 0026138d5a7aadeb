"""A row of docs/how-to/training_loops.md is a function, by its docstring; `loops` has all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import SGD, Optimizer

from tests.loops.setting import Setting, whole

Numbers = Mapping[str, Any]
Loop = Callable[[Setting], Numbers]
LOOPS: list[Loop] = []


def row(loop: Loop) -> Loop:
    LOOPS.append(loop)
    return loop


def train(
    setting: Setting,
    model: Any,
    optimizer: Optimizer | None = None,
    *,
    after: Callable[[int], None] = lambda _: None,
    before_step: Callable[[], None] = lambda: None,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
) -> dict[str, Any]:
    """The usual loop."""
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9) if optimizer is None else optimizer
    losses = []
    for step, (x, y) in enumerate(setting.batches()):
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        before_step()
        optimizer.step()
        losses.append(value.detach())
        after(step)
    return {"mean.losses": torch.stack(losses), **whole(model)}
