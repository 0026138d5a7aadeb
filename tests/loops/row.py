"""A row of docs/how-to/training_loops.md is a function, by its docstring; `loops` has all of them."""

from collections.abc import Callable, Mapping
from functools import wraps
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


def changed(change: Callable[[Any], None]) -> Loop:
    """The row of the usual loop after a change of the parallel model."""

    @wraps(change)
    def loop(setting: Setting) -> Numbers:
        model = setting.net()
        change(model)
        return train(setting, model)

    return row(loop)


def minimise(setting: Setting, model: Any, loss: Callable[[Tensor, Tensor], Tensor], lr: float = 0.1) -> dict[str, Any]:
    """Steps of SGD on a loss of inputs and targets; the state."""
    optimizer = SGD(model.parameters(), lr=lr)
    for x, y in setting.batches():
        optimizer.zero_grad()
        loss(x, y).backward()
        optimizer.step()
    return whole(model)


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
