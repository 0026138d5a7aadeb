"""What a plan predicts to be sent, at the element types of a run.

A plan counts the bytes of a step by the types that the network's tensors have. A run may compute in others (`--dtype`),
and may compute layers twice that the plan computes once (activation checkpointing). What that changes follows from the
schedule: the elements of every message, and its two item sizes. The plan's own number is kept, what may be wrong
in it as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod

import torch

from layerwise.comm.base import TrafficKind, all_reduce_bytes
from layerwise.config import Config
from layerwise.graph.layer import Layer
from layerwise.graph.layer_graph import LayerGraph
from layerwise.ops.base import Role
from layerwise.run.execute.reducer import GradientReducer
from layerwise.run.local_tensor import local_tensor
from layerwise.run.schedule.schedule import Schedule, ScheduledLayer
from layerwise.run.schedule.work import LayerWork

PREDICTED: Mapping[TrafficKind, str] = {
    "transfers": "transfer_bytes",
    "sync": "sync_bytes",
    "gathers": "gather_bytes",
    "statistics": "statistics_bytes",
}

Message = tuple[TrafficKind, int, int]  # bytes that this rank sends: by the plan's types, and really


def predicted_bytes(
    planned: Mapping[str, float],
    strategy: Mapping[str, Config],
    graph: LayerGraph,
    schedule: Schedule,
    reducer: GradientReducer,
    batches: int,
) -> dict[TrafficKind, float | None]:
    """Returns bytes a step of all ranks, by kind; None where the plan predicts nothing. Every rank calls this.

    planned: the plan's predictions, of its strategy; graph: the network with the element types that these are of.
    batches: of a step, all but the last within no_sync.
    """
    more: Counter[TrafficKind] = Counter()
    for scheduled in schedule.layers:
        planned_twice = scheduled.layer.name in strategy and strategy[scheduled.layer.name].recompute
        for kind, by_plan, real in _messages(scheduled, graph, schedule, planned_twice):
            more[kind] += batches * real - by_plan
    for (kind, by_plan, real), shared_out in _of_parameters(graph, strategy, schedule, reducer):
        more[kind] += (batches if shared_out else 1) * real - by_plan
    ranks = schedule.comm.all_gather_object(more)
    return {
        kind: planned[name] + sum(difference.get(kind, 0) for difference in ranks) if name in planned else None
        for kind, name in PREDICTED.items()
    }


def _messages(scheduled: ScheduledLayer, planned: LayerGraph, schedule: Schedule, recompute: bool) -> Iterator[Message]:
    """Yields one layer's messages, forward and back. recompute: whether the plan has it twice forward."""
    times = 1 + recompute, 1 + scheduled.recompute  # how often forward, by the plan and really
    graph, layer, work = schedule.graph, scheduled.layer, scheduled.work
    if not (layer.role is Role.SINK and schedule.free):  # which the plan does not predict
        for edge in scheduled.edges:
            forward = sum(box.volume for _, box in edge.redistribution.transfer.sends)
            back = sum(box.volume for _, box in edge.redistribution.transfer.receives) if edge.backward else 0
            by_plan, real = planned[edge.source].out.item_bytes, _sent(schedule, graph[edge.source])
            yield "transfers", (forward * times[0] + back) * by_plan, (forward * times[1] + back) * real
    if work is None:
        return
    if work.reduction is not None:
        owned, rank = dict(work.reduction.owned), schedule.comm.rank
        forward = sum(box.volume for r, box in owned.items() if r != rank)
        back = owned[rank].volume * (len(owned) - 1) * graph.gradients(layer)[0].result
        by_plan = planned[layer.name].stages[0].space.out.item_bytes
        real = schedule.options.element_type(layer.stages[0].space.out.dtype, graph).itemsize
        yield "transfers", (forward * times[0] + back) * by_plan, (forward * times[1] + back) * real
    yield from _statistics(work, layer, planned[layer.name], schedule, times)


def _statistics(
    work: LayerWork, layer: Layer, planned: Layer, schedule: Schedule, times: tuple[int, int]
) -> Iterator[Message]:
    rows = zip(layer.stages, planned.stages, work.stages, work.statistics, schedule.graph.gradients(layer), strict=True)
    for stage, same, cell, group, (back, _) in rows:
        out, box = stage.space.out, cell.training.out
        statistics = stage.statistics()
        if statistics is not None and group:
            elements = statistics.per_key * prod(box.shape[key] for key in statistics.keys) // statistics.block
            member = len(group), group.index(schedule.comm.rank)
            real_bytes = schedule.options.element_type(out.dtype, schedule.graph).itemsize
            by_plan, real = (
                [all_reduce_bytes(elements * item_bytes, *member) for item_bytes in statistics.item_bytes(of_output)]
                for of_output in (same.space.out.item_bytes, real_bytes)
            )
            sent = [ways[0] * n + ways[1] * back for ways, n in zip((by_plan, real), times, strict=True)]
            yield "statistics", sent[0], sent[1]


def _of_parameters(
    graph: LayerGraph, strategy: Mapping[str, Config], schedule: Schedule, reducer: GradientReducer
) -> Iterator[tuple[Message, bool]]:
    """Yields sums of gradients, and gathers of parameters; with whether they travel with every batch (shared out)."""
    planned: dict[str, int] = {}
    regathered = dict[str, tuple[int, int]]()  # whether a layer gathers it once more, by the plan and really
    for scheduled in schedule.layers:
        parameters, config = graph[scheduled.layer.name].held(), strategy.get(scheduled.layer.name, Config())
        planned |= {name: item_bytes for name, _, item_bytes in parameters}
        regathered |= {name: (config.recompute, scheduled.recompute) for name, *_ in parameters}
    rank = schedule.comm.rank
    for name, bucket in reducer.of.items():
        p, member = local_tensor(reducer.parameters[name]), (len(bucket.group), bucket.group.index(rank))
        if bucket.slots is not None:
            elements = bucket.slots.layouts[name].row * (len(bucket.group) - 1)
            by_plan, real = elements * planned[name], elements * p.element_size()
            yield ("sync", by_plan, real), True
            times = [1 + bucket.gathered + (bucket.gathered and once_more) for once_more in regathered[name]]
            yield ("gathers", by_plan * times[0], real * times[1]), True
            continue
        real = all_reduce_bytes(p.nbytes, *member)
        yield ("sync", all_reduce_bytes(p.numel() * planned[name], *member), real), False


def _sent(schedule: Schedule, layer: Layer) -> int:
    """Returns bytes an element of what a layer makes."""
    dtype: torch.dtype | None = schedule.type_of(layer)
    return layer.out.item_bytes if dtype is None else dtype.itemsize
