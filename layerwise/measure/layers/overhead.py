"""What the runtime takes beside kernels: for every layer, and for every step. Measured on chains of short layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from layerwise.config import Config, layout
from layerwise.cost.compute.fullest import fullest
from layerwise.graph.layer import GraphBuilder, LayerGraph
from layerwise.machine.layer_times import CellTime
from layerwise.measure.bench import Bench, CellSpec, LossSpec, Mode, UpdateSpec
from layerwise.measure.layers.cold import leave_only, own_cache_bytes
from layerwise.measure.layers.step import LossBench, UpdateBench, optimizer_of
from layerwise.measure.stopwatch import Reading, Stopwatch
from layerwise.ops.linear import Linear
from layerwise.ops.pointwise import Unary
from layerwise.plan import Plan
from layerwise.tensor import TensorSpec

SHORT, LONG = 2, 34  # layers of the chains
BATCH, WIDTH = 8, 8  # and their tensors
MakeModule = Callable[[Plan, LayerGraph, Mode], nn.Module]  # makes the runtime's module of a plan on one device


@dataclass(frozen=True, slots=True)
class Overhead:
    """layer: of each layer; step: of each step. call_s: of an optimizer's step, however few its parameters."""

    layer: CellTime
    step: CellTime
    call_s: float


def optimizer_call_s(optimizer: str, mode: Mode) -> float:
    """Seconds of an optimizer's step over no parameters at all: of one tiny tensor twice, less of two."""
    stopwatch = Stopwatch(mode.device, 0.2)
    one, two = (sum(_update(optimizer, mode, (1,) * count, stopwatch).seconds) for count in (1, 2))
    return max(0.0, 2 * one - two)


def overhead(optimizer: str, mode: Mode, make_module: MakeModule) -> Overhead:
    """Steps of chains of 2 and of 34 layers, against the sum of their layers, loss and update by themselves.

    What a layer takes is measured where its tensors fill a core's own cache, as they do in networks: the runtime's
    code and objects have left it when the next layer comes.
    """
    stopwatch = Stopwatch(mode.device, 0.5, most=100)
    tiny = _layer(WIDTH, optimizer, mode, make_module, stopwatch)
    wide = own_cache_bytes() // (4 * BATCH) if mode.device.type == "cpu" else WIDTH
    layer = _layer(wide, optimizer, mode, make_module, stopwatch).each if wide > WIDTH else tiny.each
    first = _alone(_chain(SHORT, WIDTH), "first", mode, stopwatch)
    call_s = optimizer_call_s(optimizer, mode)
    loss = stopwatch([(bench := LossBench(LossSpec(((BATCH, WIDTH),)), mode)).forward, bench.backward])
    update = _update(optimizer, mode, (WIDTH * WIDTH, WIDTH), stopwatch)
    steps, inside = tiny.steps, (tiny.each.forward_s, tiny.each.backward_s)
    rest = [
        max(0.0, steps.seconds[i] - SHORT * tiny.whole[i] - first.seconds[i] - inside[i] - loss.seconds[i])
        for i in range(2)
    ]
    rest[1] += max(0.0, steps.seconds[2] - sum(update.seconds)) + call_s
    return Overhead(layer, CellTime(rest[0], rest[1], steps.spread, steps.samples), call_s)


@dataclass(frozen=True, slots=True)
class _Chains:
    """steps: of the short chain. whole: seconds of a layer, forward and backward; each: beside its kernels."""

    steps: Reading
    whole: tuple[float, float]
    each: CellTime


def _layer(width: int, optimizer: str, mode: Mode, make_module: MakeModule, stopwatch: Stopwatch) -> _Chains:
    short, long = (_steps(_chain(count, width), optimizer, mode, make_module, stopwatch) for count in (SHORT, LONG))
    forward, backward = ((b - a) / (LONG - SHORT) for a, b in zip(short.seconds[:2], long.seconds[:2], strict=True))
    alone = _alone(_chain(SHORT, width), "link", mode, stopwatch).seconds
    spread = max(short.spread, long.spread)
    each = CellTime(max(0.0, forward - alone[0]), max(0.0, backward - alone[1]), spread, long.samples)
    return _Chains(short, (forward, backward), each)


def _chain(count: int, width: int) -> LayerGraph:
    b = GraphBuilder("chain")
    x = b.input("x", TensorSpec((BATCH, WIDTH), ("n", None)))
    x = b.add("first", Linear(width), [x], ["first.weight", "first.bias"])
    for _ in range(count):
        x = b.add("link", Unary("relu"), [x])
    return b.finish([x])


def _steps(graph: LayerGraph, optimizer: str, mode: Mode, make_module: MakeModule, stopwatch: Stopwatch) -> Reading:
    """Forward with the loss, backward, update of the runtime's own steps."""
    strategy = {layer.name: Config() for layer in graph.inner}
    plan = Plan("chain", graph.digest, BATCH, 1, 1, "sample", fused=False, strategy=strategy)
    module = make_module(plan, graph, mode)
    update = optimizer_of(optimizer, list(module.parameters()))
    x, target = mode.filled((BATCH, WIDTH)), torch.zeros(BATCH, dtype=torch.int64, device=mode.device)
    losses: list[torch.Tensor] = []

    def forward() -> None:
        losses.append(nn.functional.cross_entropy(module(x), target))

    def backward() -> None:
        losses.pop().backward()  # type: ignore[no-untyped-call]

    def finish() -> None:
        update.step()
        update.zero_grad()

    return stopwatch([forward, backward, finish])


def _alone(graph: LayerGraph, name: str, mode: Mode, stopwatch: Stopwatch) -> Reading:
    layer = graph[name]
    cells = fullest(layer, layout((Config(),), layer.space, 1))
    wanted = graph.flows_back(layer)
    spec = CellSpec(layer, cells.cell(0), cells.owned(0, 2), wanted, (False,), 1)
    bench = Bench(spec, mode)
    recent = (*bench.recent, None) if graph.layers[-1].specs[0].volume > BATCH * WIDTH else (None,) * 3
    before = [partial(leave_only, tensors, mode.device) for tensors in recent]
    reading = stopwatch([bench.forward, bench.backward, bench.forget], before)
    forward, backward, forget = reading.seconds
    return Reading((forward, backward + forget), reading.spread, reading.samples)


def _update(optimizer: str, mode: Mode, sizes: tuple[int, ...], stopwatch: Stopwatch) -> Reading:
    bench = UpdateBench(UpdateSpec(optimizer, sizes), mode)
    return stopwatch([bench.forward])
