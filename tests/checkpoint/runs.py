"""Modules that train a few steps, save, and go on from what was saved, under any plan."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from layerwise.checkpoint import load, save
from layerwise.comm.solo import SoloComm
from layerwise.errors import LayerwiseError
from tests.comm.thread import ThreadComm, run_threads
from tests.run.cut_modules import CutModule, cutting, tensors

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.99), amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1, t0=1.0),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
}


UNTRAINED = "conv.bias"  # it never gets a gradient, so it has no state


def gradients(step: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    whole = tensors(1000 + step, dtype)
    return {name: t for name, t in whole.items() if t.is_floating_point() and name != UNTRAINED}


def train(module: CutModule, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        module.set_gradients(gradients(module.steps_done, module.whole["scale"].dtype))
        optimizer.step()
        module.steps_done += 1


def trained(folder: Path, make: Make, ranks: int, seed: int, steps: int, dtype: torch.dtype) -> list[CutModule]:
    """Trains `steps` on so many ranks, and saves."""

    def run(comm: ThreadComm) -> CutModule:
        whole = tensors(0, dtype)
        module = CutModule(comm, whole, cutting(whole, ranks, seed))
        optimizer = make(module.parameters())
        train(module, optimizer, steps)
        save(folder, module, optimizer, {"epoch": 2})
        return module

    return run_threads(ranks, run)


def resumed(folder: Path, make: Make, ranks: int, seed: int, steps: int, dtype: torch.dtype) -> list[CutModule]:
    """Loads into other values on so many ranks, and trains `steps` more."""

    def run(comm: ThreadComm) -> CutModule:
        whole = tensors(1, dtype)
        module = CutModule(comm, whole, cutting(whole, ranks, seed))
        optimizer = make(module.parameters())
        assert load(folder, module, optimizer) == {"epoch": 2}
        train(module, optimizer, steps)
        return module

    return run_threads(ranks, run)


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def alone(seed: int = 0, steps: int = 0, **changes: Any) -> CutModule:
    """A module on one rank."""
    whole = tensors(seed)
    return CutModule(SoloComm(), whole, cutting(whole, 1, 0), steps, **changes)


def saved(folder: Path, seed: int = 0, steps: int = 7, make: Make | None = None) -> CutModule:
    """A module on one rank that has a checkpoint."""
    module = alone(seed, steps)
    save(folder, module, make(module.parameters()) if make else None, {"epoch": 1})
    return module


def refused(folder: Path, module: CutModule | None = None, optimizer: torch.optim.Optimizer | None = None) -> str:
    """Why it cannot be loaded; nothing has changed then."""
    module = module or alone(1)
    before = {name: tensor.detach().clone() for name, tensor in module.held.items()}
    with pytest.raises(LayerwiseError) as error:
        load(folder, module, optimizer)
    assert equal(dict(module.held), before)
    return str(error.value)
