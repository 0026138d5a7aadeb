"""Measures the runtime's overhead beside kernels, for every layer and every step, on chains of short layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from layerwise.config import Config
from layerwise.graph.builder import GraphBuilder
from layerwise.graph.layer_graph import LayerGraph
from layerwise.machine.layer_times import CellTime
from layerwise.measure.bench import (
    Bench,
    CellSpec,
    LossBench,
    LossSpec,
    Mode,
    UpdateBench,
    UpdateSpec,
    cold,
    leave_only,
    optimizer_of,
    own_cache_bytes,
)
from layerwise.measure.timing import Reading, Stopwatch
from layerwise.ops.nn.linear import Linear
from layerwise.ops.tensor.pointwise import Unary
from layerwise.partition.largest import largest_cell
from layerwise.partition.layout import layout
from layerwise.plan import Plan
from layerwise.tensor import TensorSpec

SHORT, LONG = 2, 34  # lengths of the chains
BATCH, WIDTH = 8, 8  # sizes of their tensors
COPIED = 2**23  # bytes of a tensor that is copied with its halo: more than a core's own cache
MakeModule = Callable[[Plan, LayerGraph, Mode], nn.Module]  # creates the runtime's module for a plan on one device


@dataclass(frozen=True, slots=True)
class Overhead:
    """The runtime's overhead beside kernels."""

    layer: CellTime  # for each layer
    step: CellTime  # for each step
    call_s: float  # of an optimizer's step, however few its parameters


def optimizer_call_s(optimizer: str, mode: Mode) -> float:
    """Seconds of an optimizer's step over no parameters: twice a step of one tiny tensor, minus one of two."""
    stopwatch = Stopwatch(mode.device, 0.2, ahead=True)
    one, two = (sum(_update(optimizer, mode, (1,) * count, stopwatch).seconds) for count in (1, 2))
    return max(0.0, 2 * one - two)


def overhead(optimizer: str, mode: Mode, make_module: MakeModule) -> Overhead:
    """Compares steps of chains of 2 and of 34 layers with the sum of their layers, loss and update alone.

    It measures a layer's overhead with tensors that fill a core's own cache, as in networks: the runtime's code and
    objects have left it when the next layer comes.
    """
    stopwatch = Stopwatch(mode.device, 0.1, most=100)
    runtime = _Runtime(optimizer, mode, make_module, stopwatch)
    steps, layer_s, tiny = runtime.chains(WIDTH)
    wide = own_cache_bytes() // (4 * BATCH) if mode.device.type == "cpu" else WIDTH
    layer = runtime.chains(wide)[2] if wide > WIDTH else tiny
    first = runtime.alone(_chain(SHORT, WIDTH), "first")
    call_s = optimizer_call_s(optimizer, mode)
    loss = stopwatch([(bench := LossBench(LossSpec(((BATCH, WIDTH),)), mode)).forward, bench.backward])
    update = _update(optimizer, mode, (WIDTH * WIDTH, WIDTH), stopwatch)
    inside = tiny.forward_s, tiny.backward_s
    rest = [
        max(0.0, steps.seconds[i] - SHORT * layer_s[i] - first.seconds[i] - inside[i] - loss.seconds[i])
        for i in range(2)
    ]
    rest[1] += max(0.0, steps.seconds[2] - sum(update.seconds)) + call_s
    return Overhead(layer, CellTime(rest[0], rest[1], steps.spread, steps.samples), call_s)


def copied(mode: Mode, stopwatch: Stopwatch) -> CellTime:
    """Times copying a rank's `COPIED` bytes of a tensor into one with room for a halo, and back.

    `run.schedule.redistribute` does the same.
    """
    local = mode.filled((16, 32, COPIED // mode.dtype.itemsize // 512))
    room = local.new_empty((16, 34, local.shape[2]))

    def put() -> None:
        local.new_empty(room.shape)[:, 1:-1] = local

    def cut() -> None:
        room[:, 1:-1].clone()

    reading = stopwatch([put, cut], [partial(leave_only, (tensor,), mode.device) for tensor in (local, room)])
    forward, backward = reading.seconds
    return CellTime(forward, backward, reading.spread, reading.samples)


@dataclass(frozen=True, slots=True)
class _Runtime:
    """The runtime on this device, timed."""

    optimizer: str
    mode: Mode
    make_module: MakeModule
    stopwatch: Stopwatch

    def chains(self, width: int) -> tuple[Reading, tuple[float, float], CellTime]:
        """Steps of a short chain; compared with a long one, the seconds and the overhead of a layer."""
        short, long = (self.steps(_chain(count, width)) for count in (SHORT, LONG))
        forward, backward = ((b - a) / (LONG - SHORT) for a, b in zip(short.seconds[:2], long.seconds[:2], strict=True))
        alone = self.alone(_chain(SHORT, width), "link").seconds
        spread = max(short.spread, long.spread)
        each = CellTime(max(0.0, forward - alone[0]), max(0.0, backward - alone[1]), spread, long.samples)
        return short, (forward, backward), each

    def steps(self, graph: LayerGraph) -> Reading:
        """Forward with the loss, backward and update of the runtime's own steps."""
        strategy = {layer.name: Config() for layer in graph.inner}
        plan = Plan("chain", graph.digest, BATCH, 1, 1, "sample", fused=False, strategy=strategy)
        module = self.make_module(plan, graph, self.mode)
        update = optimizer_of(self.optimizer, list(module.parameters()))
        x, target = self.mode.filled((BATCH, WIDTH)), torch.zeros(BATCH, dtype=torch.int64, device=self.mode.device)
        losses: list[torch.Tensor] = []

        def forward() -> None:
            losses.append(nn.functional.cross_entropy(module(x), target))

        def backward() -> None:
            losses.pop().backward()  # type: ignore[no-untyped-call]

        def finish() -> None:
            update.step()
            update.zero_grad()

        return self.stopwatch([forward, backward, finish])

    def alone(self, graph: LayerGraph, name: str) -> Reading:
        """The seconds of a single layer's forward and backward pass."""
        layer = graph[name]
        cell = largest_cell(layer, layout((Config(),), layer.space, 1))
        needs_grad = graph.flows_back(layer)
        bench = Bench(CellSpec(layer, cell.cell(0), cell.owned(0, 2), needs_grad, (False,), 1), self.mode)
        return cold(bench, self.stopwatch, wanted=graph.layers[-1].specs[0].volume > BATCH * WIDTH)


def _chain(count: int, width: int) -> LayerGraph:
    b = GraphBuilder("chain")
    x = b.input("x", TensorSpec((BATCH, WIDTH), ("n", None)))
    x = b.add("first", Linear(width), [x], ["first.weight", "first.bias"])
    for _ in range(count):
        x = b.add("link", Unary("relu"), [x])
    return b.finish([x])


def _update(optimizer: str, mode: Mode, sizes: tuple[int, ...], stopwatch: Stopwatch) -> Reading:
    bench = UpdateBench(UpdateSpec(optimizer, sizes), mode)
    return stopwatch([bench.forward])
