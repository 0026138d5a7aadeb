"""Checkpoints: what is saved under one plan is loaded under another, bit for bit; crashes and bad files do no harm."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from layerwise.comm.solo import SoloComm
from layerwise.comm.thread import ThreadComm, run_threads
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.graph.load import load_model
from layerwise.run import contribution, storage, tensorfile
from layerwise.run.checkpoint import latest, load, model_digest, save
from tests.run.cut_modules import CutModule, assembled, cutting, tensors

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
        module.set_gradients(gradients(module.steps, module.whole["scale"].dtype))
        optimizer.step()
        module.steps += 1


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


@settings(max_examples=40)
@given(
    ranks=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    seeds=st.tuples(st.integers(0, 2**20), st.integers(0, 2**20)),
    kind=st.sampled_from(sorted(OPTIMIZERS)),
    steps=st.integers(0, 3),
)
def test_another_plan_loads_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory, ranks: tuple[int, int], seeds: tuple[int, int], kind: str, steps: int
) -> None:
    folder, make = tmp_path_factory.mktemp("run"), OPTIMIZERS[kind]
    before = trained(folder, make, ranks[0], seeds[0], steps, torch.float32)
    after = resumed(folder, make, ranks[1], seeds[1], 0, torch.float32)
    assert equal(assembled(after), assembled(before))
    assert {module.steps for module in after} == {steps}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_same_plan_continues_bit_for_bit(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    make = OPTIMIZERS[kind]
    straight = trained(tmp_path / "a", make, 3, 5, 4, dtype)
    trained(tmp_path / "b", make, 3, 5, 2, dtype)
    assert equal(assembled(resumed(tmp_path / "b", make, 3, 5, 2, dtype)), assembled(straight))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_another_plan_continues_as_one_device(tmp_path: Path, kind: str) -> None:
    make = OPTIMIZERS[kind]
    straight = assembled(trained(tmp_path / "a", make, 1, 0, 4, torch.float64))
    trained(tmp_path / "b", make, 4, 1, 2, torch.float64)
    continued = assembled(resumed(tmp_path / "b", make, 5, 2, 2, torch.float64))
    for name, value in straight.items():
        torch.testing.assert_close(continued[name], value, rtol=1e-13, atol=1e-13)


def test_optimizer_is_restored(tmp_path: Path) -> None:
    """Settings, groups, and that a parameter has no state; what the new optimizer did before is forgotten."""
    module = alone()

    def make(lr: float) -> torch.optim.Optimizer:
        first, *others = module.parameters()
        return torch.optim.Adam([{"params": [first]}, {"params": others, "betas": (0.5, 0.6)}], lr=lr)

    optimizer = make(0.25)
    train(module, optimizer, 2)
    optimizer.param_groups[1]["lr"] = 1e-30
    expected = {name: optimizer.state[p] for name, p in module.named_parameters() if p in optimizer.state}
    save(tmp_path, module, optimizer, {})
    other = make(0.5)
    module.set_gradients({UNTRAINED: torch.ones(5)})
    other.step()
    load(tmp_path, module, other)
    assert [(group["lr"], group["betas"]) for group in other.param_groups] == [(0.25, (0.9, 0.999)), (1e-30, (0.5, 0.6))]
    found = {name: other.state[p] for name, p in module.named_parameters() if p in other.state}
    assert found.keys() == expected.keys() == gradients(0).keys()
    for name, state in expected.items():
        assert equal(found[name], state)
        assert {key: value.dtype for key, value in found[name].items()} == {k: v.dtype for k, v in state.items()}


def test_only_what_a_rank_owns_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path, OPTIMIZERS["adam"], 4, 1, 1, torch.float32)
    read: Counter[int] = Counter()

    def run(comm: ThreadComm) -> tuple[int, int]:
        class Counting(storage.Reader):
            def read_data(self, plan: Any, planner: Any) -> Any:
                commit = planner.commit_tensor
                planner.commit_tensor = lambda item, part: read.update({comm.rank: part.numel()}) or commit(item, part)
                return super().read_data(plan, planner)

        monkeypatch.setattr("layerwise.run.checkpoint.Reader", Counting)
        comm.barrier()
        whole = tensors(1)
        module = CutModule(comm, whole, cutting(whole, 3, 2))
        optimizer = OPTIMIZERS["adam"](module.parameters())
        Reader = type("Reader", (Counting,), {})
        return comm.rank, 0
