"""What the runtime takes beside kernels: for every layer, and for every step. Measured on chains of next to nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from layerwise.config import Config, layout
from layerwise.cost.fullest import fullest
from layerwise.graph.layer import GraphBuilder, LayerGraph
from layerwise.machine.layer_times import CellTime
from layerwise.measure.bench import Bench, Loss, Mode, Task, Update
from layerwise.measure.step import LossBench, UpdateBench, optimizer_of
from layerwise.measure.watch import Reading, Watch
from layerwise.ops.linear import Linear
from layerwise.ops.pointwise import Unary
from layerwise.plan import Plan
from layerwise.tensor import TensorSpec

SHORT, LONG, WIDTH = 2, 34, 8  # layers of the chains, and elements of every dimension
Load = Callable[[Plan, LayerGraph, Mode], nn.Module]  # makes the runtime's module of a plan on one device


@dataclass(frozen=True, slots=True)
class Overhead:
    """layer: of each layer; step: of each step. call_s: of an optimizer's step, however few its parameters."""

    layer: CellTime
    step: CellTime
    call_s: float


def optimizer_call_s(optimizer: str, mode: Mode) -> float:
    """Seconds of an optimizer's step over no parameters at all: of one tiny tensor twice, less of two."""
    watch = Watch(mode.device, 0.2)
    one, two = (sum(_update(optimizer, mode, (1,) * count, watch).seconds) for count in (1, 2))
    return max(0.0, 2 * one - two)


def overhead(optimizer: str, mode: Mode, load: Load) -> Overhead:
    """Steps of chains of 2 and of 34 layers, against the sum of their layers, loss and update by themselves."""
    watch = Watch(mode.device, 0.5, most=100)
    short, long = (_steps(_chain(count), optimizer, mode, load, watch) for count in (SHORT, LONG))
    chain = _chain(SHORT)
    first, link = (_alone(chain, name, mode, watch) for name in ("first", "link"))
    call_s = optimizer_call_s(optimizer, mode)
    loss = watch([(bench := LossBench(Loss(((WIDTH, WIDTH),)), mode)).forward, bench.backward])
    update = _update(optimizer, mode, (WIDTH * WIDTH, WIDTH), watch)
    layers = [(b - a) / (LONG - SHORT) for a, b in zip(short.seconds[:2], long.seconds[:2], strict=True)]
    each = [max(0.0, whole - alone) for whole, alone in zip(layers, link.seconds, strict=True)]
    rest = [
        max(0.0, short.seconds[i] - SHORT * layers[i] - first.seconds[i] - each[i] - loss.seconds[i]) for i in range(2)
    ]
    rest[1] += max(0.0, short.seconds[2] - sum(update.seconds)) + call_s
    return Overhead(
        CellTime(each[0], each[1], max(short.spread, long.spread), long.samples),
        CellTime(rest[0], rest[1], short.spread, short.samples),
        call_s,
    )


def _chain(count: int) -> LayerGraph:
    b = GraphBuilder("chain")
    x = b.input("x", TensorSpec((WIDTH, WIDTH), ("n", None)))
    x = b.add("first", Linear(WIDTH), [x], ["first.weight", "first.bias"])
    for _ in range(count):
        x = b.add("link", Unary("relu"), [x])
    return b.finish([x])


def _steps(graph: LayerGraph, optimizer: str, mode: Mode, load: Load, watch: Watch) -> Reading:
    """Forward with the loss, backward, update of the runtime's own steps."""
    strategy = {layer.name: Config() for layer in graph.inner}
    plan = Plan("chain", graph.digest, WIDTH, 1, 1, "sample", fused=False, strategy=strategy)
    module = load(plan, graph, mode)
    update = optimizer_of(optimizer, list(module.parameters()))
    x, target = mode.filled((WIDTH, WIDTH)), torch.zeros(WIDTH, dtype=torch.int64, device=mode.device)
    losses: list[torch.Tensor] = []

    def forward() -> None:
        losses.append(nn.functional.cross_entropy(module(x), target))

    def backward() -> None:
        losses.pop().backward()  # type: ignore[no-untyped-call]

    def finish() -> None:
        update.step()
        update.zero_grad()

    return watch([forward, backward, finish])


def _alone(graph: LayerGraph, name: str, mode: Mode, watch: Watch) -> Reading:
    layer = graph[name]
    cells = fullest(layer, layout((Config(),), layer.space, 1))
    wanted = tuple(graph.has_gradient[source] for source in layer.inputs)
    task = Task(layer, cells.cell(0), cells.owned(0, 2), wanted, (False,), 1)
    bench = Bench(task, mode)
    found = watch([bench.forward, bench.backward, bench.forget])
    forward, backward, forget = found.seconds
    return Reading((forward, backward + forget), found.spread, found.samples)


def _update(optimizer: str, mode: Mode, sizes: tuple[int, ...], watch: Watch) -> Reading:
    bench = UpdateBench(Update(optimizer, sizes), mode)
    return watch([bench.forward])
