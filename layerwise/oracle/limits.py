"""The limits and bottlenecks of ParaDL's table 6 that apply to a strategy, each with its number.

The paper's memory stalling is caused by its framework's allocator, not by a strategy, and is not here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from layerwise.graph.layer_graph import LayerGraph
from layerwise.machine import DeviceGraph
from layerwise.oracle.phases import Projection
from layerwise.oracle.pipeline import PipelineStage, imbalance

FindingKind = Literal["limit", "bottleneck"]
GRADIENTS = ("data", "spatial", "df", "ds", "grid")
LAYERWISE = ("filter", "channel", "df", "grid")


@dataclass(frozen=True, slots=True)
class Finding:
    """A limit (of the strategy itself) or a bottleneck (of framework or machine)."""

    kind: FindingKind
    name: str
    value: float  # a fraction of 1, or a factor, as `text` says
    lost_s: float  # of an iteration; 0 if it costs no time
    text: str


@dataclass(frozen=True, slots=True)
class Sizes:
    """A network without any parallelism: sizes, and seconds a sample."""

    weights: int  # trainable, without biases
    biases: int
    activations: int  # of a sample: inputs and outputs of all layers
    compute_s: float  # of a sample on one device, forward and backward


def sizes_of(graph: LayerGraph, step_s: float) -> Sizes:
    """The sizes of a network that one device computes in `step_s`, at the graph's batch."""
    trainable = [(p.name, prod(p.shape)) for layer in graph.inner for _, p in layer.own_parameters() if p.trainable]
    biases = sum(size for name, size in trainable if name.rpartition(".")[2] == "bias")
    items = (sum(spec.volume for spec in layer.specs) + layer.out.volume for layer in graph.inner)
    return Sizes(sum(size for _, size in trainable) - biases, biases, sum(items) // graph.batch, step_s / graph.batch)


def flows_per_port(devices: DeviceGraph, rings: int) -> float:
    """phi: how many of `rings` rings that leave every node share one of its NICs (4 rings, 2 NICs: 2)."""
    if devices.nodes == 1:
        return 1.0
    nics = max(1, devices.devices_per_node // devices.levels[1].devices_per_port)
    return max(1.0, rings / nics)


def findings(
    projection: Projection,
    sizes: Sizes,
    devices: DeviceGraph,
    staged: Sequence[PipelineStage] = (),
    exposed_s: float | None = None,
) -> list[Finding]:
    """The findings that apply to a projection on `devices`, most costly first; none on one device.

    staged: a pipeline's stages. exposed_s: the part of the gradient exchange that the backward pass does not hide; None
    if it was not simulated.
    """
    if projection.devices == 1:
        return []
    every = [
        *_communication(projection, devices, exposed_s),
        *_computation(projection, sizes, staged),
        *_memory(projection, sizes, devices),
    ]
    most = projection.limit
    text = f"{projection.devices} of at most {most.devices:,} devices, by {most.by}"
    every.append(Finding("limit", "number of PEs", projection.devices / most.devices, 0.0, text))
    return sorted(every, key=lambda f: -f.lost_s)


def _communication(projection: Projection, devices: DeviceGraph, exposed_s: float | None) -> Iterator[Finding]:
    name, phases = projection.strategy, projection.phases
    lost_s = phases.gradient_s if exposed_s is None else exposed_s
    if name in GRADIENTS and phases.gradient_s:
        share = phases.gradient_s / phases.total_s
        text = f"gradient exchange is {share:.1%} of an iteration without overlap"
        if exposed_s is not None:
            share = exposed_s / (phases.total_s - phases.gradient_s + exposed_s)
            text += f"; with overlap, the exposed part is {share:.1%}"
        yield Finding("limit", "gradient exchange", share, lost_s, text)
    layerwise_s = phases.gather_s + phases.reduce_s if name in LAYERWISE else 0.0
    shares: tuple[tuple[FindingKind, str, float, str], ...] = (
        ("limit", "layer-wise communication", layerwise_s, "collectives of single layers are"),
        ("bottleneck", "point-to-point communication", phases.halo_s, "halo exchange is"),
        ("bottleneck", "point-to-point communication", phases.passing_s, "passing activations between stages is"),
    )
    for kind, what, seconds, text in shares:
        if seconds:
            share = seconds / phases.total_s
            yield Finding(kind, what, share, seconds, f"{text} {share:.1%} of an iteration")
    p1, p2 = projection.groups
    flows = flows_per_port(devices, p2) if name in ("df", "grid") and p1 > 1 else 1.0
    if flows > 1:
        text = f"{p2} gradient exchanges at once: {flows:g} share each network port of a node"
        saved_s = min(lost_s, phases.gradient_s * (1 - 1 / flows))  # hidden time costs nothing
        yield Finding("bottleneck", "network congestion", flows, saved_s, text)


def _computation(projection: Projection, sizes: Sizes, staged: Sequence[PipelineStage]) -> Iterator[Finding]:
    phases, p = projection.phases, projection.devices
    if phases.update_s:
        share = phases.update_s / phases.computation_s
        added = ", with the gradients of segments added up," if projection.segments > 1 else ""
        text = f"the weight update{added} is {share:.1%} of the computation"
        yield Finding("limit", "weight update", share, phases.update_s, text)
    ideal_s = projection.batch / p * sizes.compute_s
    if projection.strategy == "pipeline":
        over, idle = imbalance(staged), (p - 1) / (p + projection.segments - 1)
        text = (
            f"the slowest stage takes {over:.1%} longer than the mean; {idle:.1%} of all turns are filling and draining"
        )
        yield Finding("limit", "workload balancing", over, phases.compute_s - ideal_s, text)
    elif (over := phases.compute_s / ideal_s - 1) > 1e-9:
        text = f"computation takes {1 + over:.2f}× its ideal share: repeated work, and small local shapes"
        yield Finding("bottleneck", "computation redundancy", over, phases.compute_s - ideal_s, text)


def _memory(projection: Projection, sizes: Sizes, devices: DeviceGraph) -> Iterator[Finding]:
    """The fraction of a device's memory that other devices of its group, or all, hold as well; and too much of it."""
    name, (p1, p2) = projection.strategy, projection.groups
    weights = 2 * sizes.weights + sizes.biases
    activations = 2 * projection.batch / p1 * sizes.activations
    share, text = 0.0, ""
    if name in LAYERWISE:
        share = activations * (1 - 1 / p2) / (activations + weights / p2)
        text = f"every device of a group holds full activations: {share:.1%} of its memory duplicates another's"
    elif name in GRADIENTS:
        spread = activations / (p2 if name in ("spatial", "ds") else 1)
        share = weights / (weights + spread)
        text = f"every device holds all weights and their gradients: {share:.1%} of its memory"
    if share > 0:
        yield Finding("bottleneck", "memory redundancy", share, 0.0, text)
    used = projection.phases.memory_bytes / devices.usable_bytes
    if used > 1:
        text = f"needs {used:.2f}× the memory that a plan may use on a device"
        yield Finding("limit", "memory capacity", used, 0.0, text)
