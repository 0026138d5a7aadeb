"""Memory: no rank ever makes a whole parameter that it does not own, nor while initialising, loading or resuming."""

import copy
import gc
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from layerwise import checkpoint
from layerwise.comm.base import Comm
from layerwise.plan import Plan
from layerwise.run.load import load
from layerwise.run.parallel import ParallelModule
from layerwise.tensorfile import weights_file
from tests.comm.thread import run_threads
from tests.run import small_plans
from tests.run.small_modules import SAMPLES, equal, plan_of, traced

MODEL, RANKS, BATCH = "mlp:1024x2048x1024x10", 4, 8
TINY = "mlp:16x32x16x10"  # as many Python objects, and hardly a buffer
WEIGHT_BYTES = 1024 * 2048 * 4  # of each of the two large ones
BOX_BYTES = WEIGHT_BYTES // RANKS
# The first is cut in output channels, the second in input ones, so that a box is no run of rows of either file.
CUT = {"0": {"c": RANKS}, "2": {"k": RANKS}, "4": {"c": 2}}
WHOLE: dict[str, dict[str, int]] = {"0": {}, "2": {"n": 4}, "4": {}}  # all weights on every rank, or on the first


class Largest(TorchDispatchMode):
    """Remembers the largest memory that a tensor of this thread has had under it; a file that is mapped is none."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[object] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, out)):
            if isinstance(x, Tensor) and x.device.type != "meta":
                memory = x.untyped_storage()
                if memory.nbytes() > self.bytes and not is_file(memory.data_ptr()):
                    self.bytes = memory.nbytes()
        return out


def is_file(address: int) -> bool:
    """Whether this address belongs to a file that the kernel maps, page by page as they are read."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        area, *_, path = line.split(maxsplit=5) if line.count("/") else (line.split()[0], "")
        low, high = (int(end, 16) for end in area.split("-"))
        if low <= address < high:
            return path.startswith("/")
    return False


def plan(degrees: dict[str, dict[str, int]], model: str = MODEL) -> Plan:
    return small_plans.plan(model, BATCH, RANKS, degrees)


def module_of(found: Plan, comm: Comm, weights: Path | None = None) -> ParallelModule:
    given = weights_file(weights) if weights is not None else None
    return load(found, small_plans.network(found.model, BATCH), comm=comm, weights=given)


def train(module: ParallelModule, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    share, width = module.share(), module.layer_graph.layers[0].out.shape[1]
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        x, y = torch.randn(BATCH, width, generator=draw)[share], torch.randint(10, (BATCH,), generator=draw)[share]
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimizer.step()


def adam(module: ParallelModule) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=1e-3)


def buffers(run: Callable[[str], object]) -> int:
    """The most bytes of buffers that Python and numpy hold at once in a run of MODEL, on all ranks; torch's apart.

    What TINY takes is Python's objects. It runs once before: what is imported is not counted, nor is MODEL's trace.
    """
    run(TINY)
    small_plans.network(MODEL, BATCH)
    return peak(partial(run, MODEL)) - peak(partial(run, TINY))


def peak(run: Callable[[], object]) -> int:
    gc.collect()
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_initialising_and_training_make_no_more_than_boxes(tmp_path: Path) -> None:
    def rank(comm: Comm, model: str) -> int:
        with Largest() as largest:
            module = module_of(plan(CUT, model), comm)
            optimizer = adam(module)
            train(module, optimizer)
            checkpoint.save(tmp_path / model[4:], module, optimizer, {})
            checkpoint.load(tmp_path / model[4:], module, optimizer)
        return largest.bytes

    def run(model: str) -> None:
        largest = run_threads(RANKS, lambda comm: rank(comm, model))
        assert model == TINY or largest == [BOX_BYTES] * RANKS

    assert buffers(run) < BOX_BYTES * 3 // 4


class Counted(nn.Module):
    """With all that may hold memory: parameters, one of them not used, counters, a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))
        self.unused, self.scale = nn.Parameter(torch.rand(3)), torch.rand(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.scale


def test_the_model_that_a_rank_has_built_may_go(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    networks = [traced(Counted().double())]
    caplog.clear()  # what tracing logs has tensors in it
    networks.append(replace(networks[0]))
    cut = plan_of(networks[0], 2, {"c": 2})
    assert networks[0].module is not None
    memory = [StorageWeakRef(p.untyped_storage()) for p in networks[0].module.parameters()]

    def rank(comm: Comm) -> None:
        module = load(cut, networks.pop(), comm=comm, dtype=torch.float64)
        comm.handshake({"networks": str(len(networks))})
        if comm.rank == 0:
            gc.collect()
            assert all(ref.expired() for ref in memory)
        module(SAMPLES[0][module.share()]).sum().backward()
        twin = copy.deepcopy(module)
        equal(twin.full_state_dict(), module.full_state_dict())
        x = SAMPLES[1][module.share()].float()
        assert torch.equal(twin.float()(x), module.float()(x))

    run_threads(2, rank, timeout_s=20)


def test_weights_from_a_file_are_read_as_far_as_they_are_owned(tmp_path: Path) -> None:
    shapes = {"0.weight": (2048, 1024), "0.bias": (2048,), "2.weight": (1024, 2048), "2.bias": (1024,)}
    shapes |= {"4.weight": (10, 1024), "4.bias": (10,)}
    whole = {name: torch.randn(shape) for name, shape in shapes.items()}
    save_file(whole, tmp_path / "whole.safetensors")
    found = plan(CUT)

    def run(comm: Comm) -> int:
        with Largest() as largest:
            module = module_of(found, comm, tmp_path / "whole.safetensors")
        for shard in module.shards():
            assert torch.equal(shard.tensor, whole[shard.name][shard.box.slices()])
        return largest.bytes

    assert run_threads(RANKS, run) == [BOX_BYTES] * RANKS


def test_another_plans_checkpoint_is_read_as_far_as_it_is_owned(tmp_path: Path) -> None:
    """Written by ranks that had whole weights."""

    def write(comm: Comm, model: str) -> int:
        with Largest() as largest:
            module = module_of(plan(WHOLE, model), comm)
            optimizer = adam(module)
            train(module, optimizer, 1)
            checkpoint.save(tmp_path / model[4:], module, optimizer, {})
        return largest.bytes

    def read(comm: Comm, model: str) -> int:
        with Largest() as largest:
            module = module_of(plan(CUT, model), comm)
            checkpoint.load(tmp_path / model[4:], module, adam(module))
        return largest.bytes

    def run(model: str) -> None:
        largest = run_threads(RANKS, lambda comm: read(comm, model))
        assert model == TINY or largest == [BOX_BYTES] * RANKS

    run_threads(RANKS, lambda comm: write(comm, TINY))
    assert max(run_threads(RANKS, lambda comm: write(comm, MODEL))) >= WEIGHT_BYTES  # so Largest sees a whole weight
    assert buffers(run) < BOX_BYTES * 3 // 4
