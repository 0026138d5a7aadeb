"""Numbers that a model reads through a dict, a configuration, a class or a global: changing one later is noticed."""

import argparse
import dataclasses
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import layerwise
from layerwise import LayerwiseError, ParallelOptions
from layerwise.comm.base import Comm
from layerwise.run.guards.reached import Reached
from tests.comm.thread import run_threads

X = torch.randn(4, 6)
TAU = 1.0
GLOBAL = {"tau": 1.0}


@dataclasses.dataclass(slots=True)
class Slotted:
    tau: float = 1.0


class Config:
    tau = 1.0

    def scale(self) -> float:
        return self.tau


class Adapter(nn.Module):
    kept = 1.0

    def __init__(self, read: Callable[["Adapter"], Any], **attributes: Any) -> None:
        super().__init__()
        self.lin, self.read = nn.Linear(6, 4), read
        for name, value in attributes.items():
            setattr(self, name, value)

    @property
    def tau(self) -> Any:
        return self.read(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) / self.tau


def _global(_: Any) -> float:
    return TAU


def _set_global(_: Any) -> None:
    globals()["TAU"] = 0.5


def _closed_over() -> tuple[Callable[[Any], float], Callable[[Any], None]]:
    tau = 1.0

    def read(_: Any) -> float:
        return tau

    def write(_: Any) -> None:
        nonlocal tau
        tau = 0.5

    return read, write


def _default(_: Any, known: dict[str, float] = {"tau": 1.0}) -> float:  # noqa: B006
    return known["tau"]


closed = _closed_over()
WAYS: dict[str, tuple[Callable[[], Adapter], Callable[[Any], Any]]] = {
    "a dict": (lambda: Adapter(lambda m: m.cfg["tau"], cfg={"tau": 1.0}), lambda m: m.cfg.update(tau=0.5)),
    "a list": (lambda: Adapter(lambda m: m.taus[0], taus=[1.0]), lambda m: m.taus.__setitem__(0, 0.5)),
    "a dict in a list": (lambda: Adapter(lambda m: m.a[0]["b"], a=[{"b": 1.0}]), lambda m: m.a[0].update(b=0.5)),
    "a list in a tuple": (lambda: Adapter(lambda m: m.a[0][0], a=([1.0],)), lambda m: m.a[0].__setitem__(0, 0.5)),
    "a namespace": (
        lambda: Adapter(lambda m: m.c.tau, c=types.SimpleNamespace(tau=1.0)), lambda m: setattr(m.c, "tau", 0.5),
    ),
    "arguments": (
        lambda: Adapter(lambda m: m.c.a.tau, c=types.SimpleNamespace(a=argparse.Namespace(tau=1.0))),
        lambda m: setattr(m.c.a, "tau", 0.5),
    ),
    "slots": (lambda: Adapter(lambda m: m.c.tau, c=Slotted()), lambda m: setattr(m.c, "tau", 0.5)),
    "a method": (lambda: Adapter(lambda m: m.c.scale(), c=Config()), lambda m: setattr(m.c, "tau", 0.5)),
    "a configuration's getattr": (
        lambda: Adapter(lambda m: getattr(m.c, "tau", 2.0), c=Config()), lambda m: setattr(m.c, "tau", 0.5),
    ),
    "its own class": (lambda: Adapter(lambda m: m.kept), lambda m: setattr(Adapter, "kept", 0.5)),
    "another class": (lambda: Adapter(lambda m: Config.tau), lambda m: setattr(Config, "tau", 0.5)),
    "a global": (lambda: Adapter(_global), _set_global),
    "a global dict": (lambda: Adapter(lambda m: GLOBAL["tau"]), lambda m: GLOBAL.update(tau=0.5)),
    "a closure": (lambda: Adapter(closed[0]), closed[1]),
    "a default argument": (lambda: Adapter(_default), lambda m: _default.__defaults__[0].update(tau=0.5)),
    "an array": (lambda: Adapter(lambda m: float(m.a[0]), a=np.ones(1)), lambda m: m.a.fill(0.5)),
    "a tensor in a dict": (lambda: Adapter(lambda m: m.a["b"], a={"b": torch.ones(1)}), lambda m: m.a["b"].fill_(0.5)),
    "a set": (lambda: Adapter(lambda m: 1.0 if "warm" in m.a else 0.5, a={"warm"}), lambda m: m.a.clear()),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_temperature_that_the_loop_changes_through(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((Adapter, "kept"), (Config, "tau")):
        monkeypatch.setattr(owner, name, 1.0)
    monkeypatch.setitem(globals(), "TAU", 1.0)
    monkeypatch.setitem(GLOBAL, "tau", 1.0)
    own = WAYS[way][0]()
    reached = Reached(own)
    assert reached.changed() is None
    WAYS[way][1](own)
    assert reached.changed() is not None


def split(model: nn.Module, comm: Comm) -> nn.Module:
    options = ParallelOptions(measure_s=0, verbose=False, comm=comm)
    return layerwise.parallelize(model, X, strategy={"lin": {"c": 2}}, options=options)


def test_a_plan_that_splits_layers_says_what_the_loop_has_changed() -> None:
    def stepped(comm: Comm) -> str:
        own = Adapter(lambda m: m.cfg["tau"], cfg={"tau": 1.0})
        model = split(own, comm)
        model(X).sum().backward()
        model.cfg["tau"] = 0.5
        with pytest.raises(LayerwiseError) as error:
            model(X)
        return str(error.value)

    for text in run_threads(2, stepped):
        assert "cfg['tau'], which the model's forward reads and which changed after the model was made" in text
        assert "in a parameter with requires_grad=False" in text


def test_peft_scales_its_adapter_anew() -> None:
    peft = pytest.importorskip("peft")
    own = peft.get_peft_model(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), peft.LoraConfig(target_modules=["0"], r=2))
    reached = Reached(own)
    assert reached.changed() is None
    next(m for m in own.modules() if hasattr(m, "scaling")).scaling["default"] = 3.0
    assert "scaling['default']" in str(reached.changed())


class Logs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.history, self.step = nn.Linear(6, 4), [], {"n": 0}

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


def test_what_no_layer_reads_may_change() -> None:
    own = Logs()
    reached = Reached(own)
    own.history.append(1.0)
    own.step["n"] += 1
    assert reached.changed() is None


@pytest.mark.parametrize("shape", [(), (1,), (4,)])
def test_a_temperature_in_a_frozen_parameter_is_followed(shape: tuple[int, ...]) -> None:
    class Soft(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.tau = nn.Linear(6, 4), nn.Parameter(torch.ones(shape), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.lin(x) / self.tau

    def stepped(comm: Comm) -> None:
        model = split(Soft(), comm)
        before = model(X)
        model.tau.data.fill_(0.5)
        torch.testing.assert_close(model(X), 2 * before)

    run_threads(2, stepped)
