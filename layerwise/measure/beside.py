"""Measures what computation and messages cost each other while both go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import mean, median

import torch

from layerwise.comm.base import Comm, Handle
from layerwise.machine.curves import Operation, Overlap
from layerwise.measure.timing import Do, stolen_s, timed
from layerwise.measure.topology import RankGroups

# Samples, channels, height and width of the convolution whose gradients are computed beside an operation: some ms.
KERNEL = {"cpu": (2, 64, 16, 16), "cuda": (64, 256, 32, 32)}
# What runs beside computation: sums and gathers of parameters, and transfers that are issued early.
# The first matter most.
BESIDE: dict[str, tuple[Operation, ...]] = {
    "cpu": ("all_reduce", "exchange", "reduce_scatter", "all_gather"),
    "cuda": ("all_reduce",),
}
BESIDE_S = 0.1  # about how long an operation takes beside which a CPU's computation is measured
BRIEF_S = 0.03  # the same, where there is little time
ROUNDS, COUNTED = 5, 3  # of which those count that lost least to the host of a virtual machine
LONGEST = 20  # times its time alone: then nobody computes on beside an operation
ALONE = 0.05  # seconds of computation by itself in each round
Start = Callable[[], Handle]


def convolution(device: torch.device) -> Do:
    """Computation: a convolution and its gradients."""
    samples, channels, height, width = KERNEL[device.type]
    x = torch.ones((samples, channels, height, width), device=device, requires_grad=True)
    weight = torch.ones((channels, channels, 3, 3), device=device, requires_grad=True)

    def do() -> None:
        y = torch.conv2d(x, weight, padding=1)
        torch.autograd.grad(y, (x, weight), y.detach())

    return do


def overlap(comm: Comm, shape: RankGroups, operation: Operation, start: Start | None, rounds: int = ROUNDS) -> Overlap:
    """Speeds of an operation, and of computation, while both go on. `start` starts one; None: takes no part.

    On a CPU what each got done of the other's time, in turns with each alone, for a processor's speed moves; the mean
    rank's, for the slowest is another one each time. On a GPU, which does both by itself, see `_by_totals`.
    """
    if comm.device.type == "cuda":
        return Overlap(shape.fan, shape.load, *_by_totals(comm, start), operation)
    compute, turns = convolution(comm.device), []
    compute()
    for _ in range(rounds):
        before = stolen_s()
        comm.barrier()
        alone_s, each_s = (0.0, 0.0) if start is None else _alone(compute, start)
        comm.barrier()
        beside_s, rate = (0.0, 0.0) if start is None else _beside(compute, start, alone_s, each_s)
        everyone = comm.all_gather_object([stolen_s() - before, alone_s, beside_s, rate])
        stolen, alone, beside, rates = zip(*everyone, strict=True)
        turns.append((max(stolen), mean(rate for rate in rates if rate), max(alone) / max(beside)))
    counted = sorted(turns)[:COUNTED]
    compute_rate, own_rate = median(row[1] for row in counted), median(row[2] for row in counted)
    return Overlap(shape.fan, shape.load, _share(compute_rate), _share(own_rate), operation)


def _share(rate: float) -> float:
    return min(1.0, max(0.01, rate))


def _alone(compute: Do, start: Start) -> tuple[float, float]:
    """Seconds of an operation, and of a convolution."""
    began = time.perf_counter()
    start().wait()
    computing = time.perf_counter()
    count, now = 0, computing
    while not count or now < computing + ALONE:  # once at least, also where a busy processor left no time
        compute()
        count, now = count + 1, time.perf_counter()
    return computing - began, (now - computing) / count


def _beside(compute: Do, start: Start, alone_s: float, each_s: float) -> tuple[float, float]:
    """Seconds of an operation beside convolutions, and the speed of these, of their own: what is done afterwards is
    done at all of it.
    """
    done: list[float] = []
    count, began = 0, time.perf_counter()
    handle = start()
    handle.when_done(lambda: done.append(time.perf_counter()))
    while not done and time.perf_counter() < began + LONGEST * alone_s:
        compute()
        count += 1
    end = time.perf_counter()
    handle.wait()
    beside_s = min(done[0], end) - began
    return beside_s, _share((count * each_s - (end - began - beside_s)) / beside_s)


def _by_totals(comm: Comm, start: Start | None) -> tuple[float, float]:
    """An operation under twice as long a computation, and computation under twice as long operations.

    With u, the seconds that the first pair takes longer than its computation alone, a second of operation, and v, those
    that the second takes longer than its operations alone, a second of computation: rates a of computation and b of
    operations that go on together make u = (1 - a) / b and v = (1 - b) / a.
    """
    compute = convolution(comm.device)

    def seconds(convolutions: int, operations: int) -> float:
        def both() -> None:
            assert start is not None
            handles = [start() for _ in range(operations)]
            for _ in range(convolutions):
                compute()
            for handle in handles:
                handle.wait()

        return timed(comm, None if start is None else both, rounds=3).seconds

    two, one = seconds(0, 2), seconds(0, 1)
    equal = max(1, round(one / (seconds(8, 0) / 8)))  # convolutions that take as long as an operation
    computed = seconds(2 * equal, 0)
    u = min(1.0, max(0.0, (seconds(2 * equal, 1) - computed) / one))
    v = min(1.0, max(0.0, (seconds(equal, 2) - two) / (computed / 2)))
    return rates(u, v)


def rates(u: float, v: float) -> tuple[float, float]:
    """The share of its own speed at which computation, and at which a sum goes on while both do. From 0 to 1 each."""
    if u * v > 0.95:  # they take turns
        return 0.5, 0.5
    a, b = (1 - u) / (1 - u * v), (1 - v) / (1 - u * v)
    return _share(a), _share(b)
