"""Optimizers: which of them compute rightly with a rank's parts of parameters. A hook asks at their steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from layerwise.errors import LayerwiseError

# torch.optim's that treat every element by itself.
ELEMENT_WISE = frozenset(
    ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)
# By lower-case names, because such classes come from many packages: why a part of a parameter is not enough.
MATRICES, NORMS = "takes a parameter as one matrix", "takes norms of whole parameters"
WHOLE = {
    "adafactor": MATRICES, "muon": MATRICES, "shampoo": MATRICES, "distributedshampoo": MATRICES, "soap": MATRICES,
    "galoreadamw": MATRICES, "lamb": NORMS, "fusedlamb": NORMS, "lars": NORMS, "novograd": NORMS, "prodigy": NORMS,
}  # fmt: skip


# What the ranks hold: all of every trained parameter; DTensors, whose norms PyTorch computes of the whole, while what
# takes them as matrices raises in PyTorch or rounds otherwise (Muon's products are of 16 bits); or tensors of parts.
Form = Literal["whole", "dtensors", "boxes"]

# The parameters of parallel modules, with their form. Optimizers that were asked, and of how many of these.
_forms = WeakIdKeyDictionary()
_asked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()


def watch(parameters: Iterable[nn.Parameter], form: Form) -> None:
    """From now on an optimizer over these that would compute wrongly raises at its step."""
    for p in parameters:
        _forms[p] = form
    before_every_step(_check)


@cache
def before_every_step(check: Callable[..., None]) -> None:
    """Calls `check(optimizer, ...)` before each step of any optimizer, from now on; once, however often it is given."""
    register_optimizer_step_pre_hook(check)


def suits(kind: type[Optimizer], form: Form) -> None:
    """LayerwiseError unless such an optimizer has one device's numbers on several ranks.

    Of parts ("boxes") it must treat every element by itself: torch's own are known, other classes say so by an
    attribute `element_wise = True`.
    """
    names = [base.__name__ for base in kind.__mro__]
    if "LBFGS" in names:
        raise LayerwiseError(
            "LBFGS decides by the loss how many steps it takes, and every rank has the loss of its own samples: take "
            "another optimizer, such as AdamW"
        )
    if form == "whole":
        return
    why = next((WHOLE[name.lower()] for name in names if name.lower() in WHOLE), None)
    if why is not None and (form == "boxes" or why == MATRICES):
        raise LayerwiseError(
            f"{kind.__name__} {why}, but the plan splits the parameters over the ranks: take an "
            "element-wise optimizer such as SGD or AdamW, or parallelize with strategy='data'"
        )
    if form == "dtensors":
        return
    step: Any = kind.step
    known = step.__module__.startswith("torch.optim.") and step.__qualname__.partition(".")[0] in ELEMENT_WISE
    if not known and not getattr(kind, "element_wise", False):
        raise LayerwiseError(
            f"the plan splits the parameters over the ranks, and {kind.__name__} is not known to treat every element "
            f"by itself: if it does, say {kind.__name__}.element_wise = True before its first step; else take one of "
            "torch.optim such as SGD or AdamW, or parallelize with strategy='data'"
        )


def _check(optimizer: Optimizer, *_: Any) -> None:
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if _asked.get(optimizer) == count:
        return
    for form in {_forms[p] for group in optimizer.param_groups for p in group["params"] if p in _forms}:
        suits(type(optimizer), form)
    _asked[optimizer] = count
