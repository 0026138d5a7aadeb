"""Pipeline parallelism (GPipe): contiguous stages balanced by the cost tables, and the cost of an iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod

import numpy as np

from layerwise.config import Config
from layerwise.cost.compute.roofline import ComputeTime
from layerwise.cost.model import CostModel
from layerwise.cost.price import held_bytes
from layerwise.graph.layer_graph import LayerGraph
from layerwise.machine import DeviceGraph
from layerwise.oracle.phases import Phases


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """Neighbouring layers on one device; seconds and bytes are one segment's, unless noted."""

    layers: tuple[str, ...]
    forward_s: float
    backward_s: float
    update_s: float  # of the full batch, once
    memory_bytes: float  # of the full batch, whose segments it holds
    passed_bytes: float  # what later stages need of this one and of earlier ones
    accumulate_s: float = 0.0  # for every segment but the first: adding its gradients to the sum so far


def pipeline_stages(
    model: CostModel, count: int, segments: int, cuts: Sequence[int] | None = None
) -> tuple[PipelineStage, ...]:
    """The layers as `count` contiguous stages such that the slowest is as fast as possible; or the stages of `cuts`.

    model: for the full batch; a segment has one part in `segments` of its samples, rounded up. Adding up the gradients
    of several segments costs a step of plain SGD; dividing by the number of segments, two thirds of one.
    """
    graph = model.graph
    level = replace(model.devices.levels[0], devices=1, devices_per_port=1)
    whole = CostModel(model.original, replace(model.devices, count=1, levels=(level,)), model.options)
    part = CostModel(model.original.rebatch(-(-graph.batch // segments)), whole.devices, model.options)
    plain = CostModel(part.original, part.devices, replace(model.options, optimizer="sgd"))
    memory, times, adding_s = dict[str, float](), dict[str, ComputeTime](), dict[str, float]()
    for layer, segment in zip(graph.layers, part.graph.layers, strict=True):
        alone = whole.end_config(layer) if layer.end else Config()
        memory[layer.name] = held_bytes(whole, layer, whole.layout(layer, (alone,)))
        times[layer.name] = part.node_cost(segment, (Config(),)).compute
        adding_s[layer.name] = float(plain.node_cost(segment, (Config(),)).compute.update[0]) if segments > 1 else 0.0
    names = [layer.name for layer in graph.inner]
    ends = [layer.name for layer in graph.layers if layer.end and layer.inputs]  # the loss, on the last stage
    fed = [layer.name for layer in graph.layers if layer.end and not layer.inputs]  # the batch, on the first stage
    if cuts is None:
        more = (segments - 1) / segments
        rows = ((times[name], adding_s[name]) for name in names)
        cuts = balanced([float(t.forward[0] + t.backward[0]) + more * added for t, added in rows], count)
    passed = crossing_bytes(part.graph)
    result = []
    for first, end in pairwise(cuts):
        last, inside = end == len(names), names[first:end]
        held = [*([] if first else fed), *inside, *(ends if last else [])]
        here = [times[name] for name in [*inside, *([*fed, *ends] if last else [])]]
        added = sum(adding_s[name] for name in inside)
        second = _largest_gradient_bytes(graph, inside) if segments > 1 else 0.0  # while it is added, there are two
        result.append(
            PipelineStage(
                tuple(inside),
                forward_s=sum(float(t.forward[0]) for t in here),
                backward_s=sum(float(t.backward[0]) for t in here),
                update_s=sum(float(t.update[0]) for t in here) + added * 2 / 3,
                memory_bytes=sum(memory[name] for name in held) + second,
                passed_bytes=0.0 if last else passed[inside[-1]],
                accumulate_s=added,
            )
        )
    return tuple(result)


def _largest_gradient_bytes(graph: LayerGraph, names: Sequence[str]) -> float:
    rows = [row for name in names for row in graph[name].held()]
    return max((float(prod(p.shape) * item_bytes) for _, p, item_bytes in rows if p.trainable), default=0.0)


def cuts_of(staged: Sequence[PipelineStage]) -> list[int]:
    """The layers at which these stages begin, and where the last one ends."""
    return [0, *accumulate(len(stage.layers) for stage in staged)]


def balanced(costs: Sequence[float], parts: int) -> list[int]:
    """The cuts of a row into `parts` non-empty runs whose most expensive one is as cheap as possible: 0, ...,
    len(costs).

    Dynamic programming over (runs, end): exact.
    """
    assert 1 <= parts <= len(costs)
    total = [0.0, *accumulate(costs)]
    best, starts = total, [[0] * len(total)]  # one run: from the beginning
    for part in range(2, parts + 1):
        row, start = [float("inf")] * len(total), [0] * len(total)
        for end in range(part, len(total)):
            for first in range(end - 1, part - 2, -1):
                dearest = max(best[first], total[end] - total[first])
                if dearest < row[end]:
                    row[end], start[end] = dearest, first
                if total[end] - total[first] > row[end]:
                    break  # longer last runs cost even more
        best = row
        starts.append(start)
    cuts = [len(costs)]
    for start in reversed(starts):
        cuts.append(start[cuts[-1]])
    return cuts[::-1]


def crossing_bytes(graph: LayerGraph) -> dict[str, float]:
    """For each layer, bytes of all tensors computed up to it and used after it: what a cut behind it passes on."""
    order = {layer.name: i for i, layer in enumerate(graph.layers)}
    last = {name: max((order[user] for user in users), default=-1) for name, users in graph.consumers().items()}
    fed = {layer.name for layer in graph.layers if layer.end}
    result = {}
    for layer in graph.inner:
        here = order[layer.name]
        alive = (y for y in graph.layers[: here + 1] if y.name not in fed and last[y.name] > here)
        result[layer.name] = float(sum(y.out.volume * y.out.item_bytes for y in alive))
    return result


def pipeline_phases(staged: Sequence[PipelineStage], segments: int, devices: DeviceGraph) -> Phases:
    """GPipe: S segments through p stages take p + S - 1 turns of the slowest stage, and p + S - 2 passings each way.

    On the longest path through stages and segments, every backward turn but the first may add to gradients.
    """
    turns = len(staged) + segments - 1
    passing_s = max(_passing_s(staged, devices), default=0.0)
    additions = turns - 1 if segments > 1 else 0
    return Phases(
        compute_s=turns * (max(s.forward_s for s in staged) + max(s.backward_s for s in staged)),
        update_s=max(s.update_s for s in staged) + additions * max(s.accumulate_s for s in staged),
        passing_s=2 * (turns - 1) * passing_s,
        memory_bytes=max(s.memory_bytes for s in staged),
    )


def pipelined_s(staged: Sequence[PipelineStage], segments: int, devices: DeviceGraph) -> float:
    """The seconds of a simulated GPipe iteration, at most the sum of the phases.

    Every stage processes its segments one after the other, forward and then backward, each as soon as its input is
    ready; its output is sent beside its next segments, one message after the other.
    """
    passing_s = [0.0, *_passing_s(staged, devices), 0.0]  # before and behind every stage
    ready, forward_s, end_s = [0.0] * segments, [], 0.0
    for number, stage in enumerate(staged):
        clock, ready = _through(0.0, stage.forward_s, 0.0, ready, passing_s[number + 1])
        forward_s.append(clock)
    ready = [0.0] * segments
    for number, stage in reversed(list(enumerate(staged))):
        start_s = forward_s[number]
        clock, ready = _through(start_s, stage.backward_s, stage.accumulate_s, ready, passing_s[number])
        end_s = max(end_s, clock + stage.update_s)
    return end_s


def _through(
    clock: float, each_s: float, further_s: float, arrivals: Sequence[float], passing_s: float
) -> tuple[float, list[float]]:
    """When a stage has finished all segments, and when the next one has their outputs.

    further_s: additional time of every segment but the first.
    """
    port, passed = 0.0, []
    for number, ready in enumerate(arrivals):
        clock = max(clock, ready) + each_s + (further_s if number else 0.0)
        port = max(port, clock) + passing_s
        passed.append(port)
    return clock, passed


def _passing_s(staged: Sequence[PipelineStage], devices: DeviceGraph) -> list[float]:
    """Seconds of a segment's message from each stage to the next, as measured if it was."""
    result = []
    for device, stage in enumerate(staged[:-1]):
        level = devices.level_between(device, device + 1)
        curve = devices.links.curve("message", (1,) * level + (2,), 1) if devices.links else None
        if curve is not None:
            result.append(float(curve.seconds(np.array(stage.passed_bytes))))
        else:
            link = devices.levels[level]
            result.append(link.alpha_s + stage.passed_bytes * link.beta_s_per_byte)
    return result


def imbalance(staged: Sequence[PipelineStage]) -> float:
    """How much longer the slowest stage takes than the mean: 0 is perfect."""
    times = [s.forward_s + s.backward_s for s in staged]
    return max(times) / (sum(times) / len(times)) - 1
