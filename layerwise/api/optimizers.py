"""Optimizers: what the user gives becomes an optimizer of this rank's parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn
from torch.optim import Optimizer

from layerwise.cost.compute import OPTIMIZERS as PLANNED
from layerwise.errors import LayerwiseError
from layerwise.run.module import ParallelModule
from layerwise.run.train import OPTIMIZERS, Settings

Wanted = str | Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer]
WHOLE = ("Adafactor", "LBFGS", "Muon", "SparseAdam")  # need more of a parameter than a box of it


def build(wanted: Wanted, model: object, module: ParallelModule) -> Optimizer:
    """An optimizer over the module's parameters.

    wanted: a name (its usual learning rate), a function of the parameters, or an optimizer over `model`'s parameters
    that has not taken a step: its groups and settings are carried over. LayerwiseError for what is none of these, and
    for optimizers that are not element-wise.
    """
    if isinstance(wanted, str):
        if wanted not in OPTIMIZERS:
            raise LayerwiseError(f"unknown optimizer {wanted!r}: there are {', '.join(OPTIMIZERS)}")
        made = Settings(wanted).build(module.parameters())
    elif isinstance(wanted, Optimizer):
        made = _carried(wanted, model, module)
    elif callable(wanted):
        made = wanted(module.parameters())
    else:
        raise LayerwiseError(f"optimizer is of type {type(wanted).__name__}: give a name, a function, or an optimizer")
    if type(made).__name__ in WHOLE:
        raise LayerwiseError(
            f"{type(made).__name__} needs whole parameters, but a rank holds a part of each: take an element-wise "
            "optimizer such as SGD or AdamW"
        )
    return made


def planned(wanted: Wanted) -> str:
    """The optimizer that memory is planned for: Adam's for those that are not known."""
    name = wanted if isinstance(wanted, str) else type(wanted).__name__.lower()
    if isinstance(wanted, Optimizer) and name == "sgd" and wanted.defaults["momentum"]:
        return "momentum"
    return name if name in PLANNED else "adam"


def _carried(given: Optimizer, model: object, module: ParallelModule) -> Optimizer:
    if given.state:
        raise LayerwiseError("the optimizer has taken steps already: give one that is new, or a function that makes it")
    named = dict(model.named_parameters()) if isinstance(model, nn.Module) else {}
    names = {id(p): name for name, p in named.items()}
    held, groups = dict(module.named_parameters()), []
    for group in given.param_groups:
        strange = next((p for p in group["params"] if id(p) not in names), None)
        if strange is not None:
            raise LayerwiseError(
                f"the optimizer has a parameter of shape {tuple(strange.shape)} that is not the model's: build it over "
                "model.parameters(), or give a function of the parameters"
            )
        mine = [held[names[id(p)]] for p in group["params"] if names[id(p)] in held]
        groups.append({key: value for key, value in group.items() if key != "params"} | {"params": mine})
    if not any(group["params"] for group in groups):
        groups[0]["params"] = list(module.parameters())
    return type(given)(groups)  # type: ignore[call-arg]  # every subclass has its defaults
