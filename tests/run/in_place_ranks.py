"""Called in the ranks of test_in_place: a model is made parallel, and something fails on the way."""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerwise
from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from layerwise.run.load import build_module
from layerwise.run.options import RuntimeOptions
from tests.run.small_modules import SAMPLES, loss, plan_of, traced

FOLDER, BEGINS = "/layerwise/run/", "Before.__init__"


class PlantedError(Exception):
    """Raised where nothing would fail."""


class Net(nn.Module):
    """A tied weight, a batch norm, a parameter and a buffer that nothing reads, a hook, an attribute of its own."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.drop = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.0)
        self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6)
        self.third.weight = self.second.weight
        self.unread = nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.ones(3))
        self.notes, self.kept = {"a": 1}, torch.zeros(())
        self.to(device=device, dtype=torch.float64)
        self.first.weight.register_post_accumulate_grad_hook(lambda _: None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(self.first(x)))
        self.kept = x.square().mean()
        return self.third(torch.tanh(self.second(x)))


def facts(model: nn.Module) -> list[Any]:
    """What a model is, by identity; tensors also by their values."""
    found: list[Any] = [(m, type(m), dict(vars(m))) for m in model.modules()]
    found += [(list(m._parameters.items()), list(m._buffers.items()), list(m._modules)) for m in model.modules()]
    tensors = (*model.parameters(), *model.buffers())
    found += [(t.data_ptr(), t.dtype, t.device, t.requires_grad, type(t), vars(t).copy()) for t in tensors]
    found += [(t._post_accumulate_grad_hooks, None if t.is_meta else t.detach().clone().tolist()) for t in tensors]
    return found


def calls(act: Callable[[], object], fails: str = "") -> list[str]:
    """Calls `act`, within which the first call of a function fails; returns the runtime's functions, in order."""
    names = list[str]()

    def trace(frame: Any, event: str, _: object) -> None:
        if event == "call" and FOLDER in frame.f_code.co_filename:
            names.append(frame.f_code.co_qualname)
            if names[-1] == fails and BEGINS in names:
                raise PlantedError

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return names


def failed_at_every_step(comm: Comm, degrees: dict[str, int] | None, device: str) -> int:
    """How many steps failed, after each of which the model was as before; then it is made parallel, and trained."""
    example = SAMPLES[0].to(device)
    options = RuntimeOptions(torch.device("cpu"), torch.float64)

    def made_of(model: nn.Module) -> Callable[..., list[str]]:
        """Makes it parallel: of one trace, as the model is what it was whenever that fails."""
        own = replace(traced(model, example), itself=True)
        plan = plan_of(own, comm.size, degrees)
        return lambda fails="": calls(lambda: build_module(plan, own, comm, options), fails)

    made_of(Net(device))()  # answers that are cached are not computed again
    names = made_of(Net(device))()
    done = next(i for i, name in enumerate(names) if name.endswith(".keep"))
    steps = list(dict.fromkeys(names[names.index(BEGINS) + 1 : done]))
    model = Net(device)
    before, make = facts(model), made_of(model)
    for step in steps:
        with pytest.raises(PlantedError):
            make(step)
        changed = [pair for pair in zip(before, facts(model), strict=True) if pair[0] != pair[1]]
        assert not changed, (step, changed)
    make()
    x = SAMPLES[0][layerwise.of(model).share()]
    loss(model(x)).backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if name != "unread")
    with pytest.raises(LayerwiseError, match="is already parallel"):
        layerwise.parallelize(model, x, options=layerwise.ParallelOptions(verbose=False))
    return len(steps)
