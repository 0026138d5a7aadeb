"""What holds a strategy back: the limits and bottlenecks of ParaDL's table 6 that apply, each with its number.

The paper's memory stalling is its framework's allocator and no matter of a strategy: it is not here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from layerwise.machine import DeviceGraph
from layerwise.oracle.formulas.collectives import flows_per_port
from layerwise.oracle.formulas.facts import Facts
from layerwise.oracle.formulas.phases import Projection
from layerwise.oracle.formulas.pipeline import PipelineStage, balanced, imbalance

GRADIENTS = ("data", "spatial", "df", "ds")
LAYERWISE = ("filter", "channel", "df")


@dataclass(frozen=True, slots=True)
class Finding:
    """A limit (of the strategy itself) or a bottleneck (of framework or machine)."""

    kind: Literal["limit", "bottleneck"]
    name: str
    value: float  # a share of 1, or a number of times, as `text` says it
    lost_s: float  # of an iteration; 0 where it costs no time
    text: str


def findings(
    projection: Projection,
    facts: Facts,
    devices: DeviceGraph,
    staged: Sequence[PipelineStage] = (),
    exposed_s: float | None = None,
) -> list[Finding]:
    """Those that apply to a projection on `devices`, the costliest first; none on one device.

    staged: a pipeline's stages, where the cost tables made them; else those that the published form balances.
    exposed_s: of the gradient exchange, what is not hidden beside the backward pass; None where nobody simulated it.
    """
    if projection.devices == 1:
        return []
    result = [
        *_communication(projection, devices, exposed_s),
        *_computation(projection, facts, staged),
        *_memory(projection, facts),
    ]
    used = projection.phases.memory_bytes / devices.usable_bytes
    if used > 1:
        text = f"needs {used:.2f}× what a plan may take of a device's memory"
        result.append(Finding("limit", "memory capacity", used, 0.0, text))
    most = projection.limit
    share = projection.devices / most.devices
    text = f"{projection.devices} of at most {most.devices:,} devices, by {most.by}"
    result.append(Finding("limit", "number of PEs", share, 0.0, text))
    return sorted(result, key=lambda f: -f.lost_s)


def _communication(projection: Projection, devices: DeviceGraph, exposed_s: float | None) -> list[Finding]:
    name, phases = projection.strategy, projection.phases
    result: list[Finding] = []
    lost_s = phases.gradient_s if exposed_s is None else exposed_s
    if name in GRADIENTS and phases.gradient_s:
        share = phases.gradient_s / phases.total_s
        text = f"gradient exchange is {share:.1%} of an iteration, phase after phase"
        if exposed_s is not None:
            share = exposed_s / (phases.total_s - phases.gradient_s + exposed_s)
            text += f"; beside the backward pass, what is left of it is {share:.1%}"
        result.append(Finding("limit", "gradient exchange", share, lost_s, text))
    layerwise_s = phases.gather_s + phases.reduce_s
    if name in LAYERWISE and layerwise_s:
        share = layerwise_s / phases.total_s
        text = f"collectives of single layers are {share:.1%} of an iteration"
        result.append(Finding("limit", "layer-wise communication", share, layerwise_s, text))
    if phases.halo_s:
        share = phases.halo_s / phases.total_s
        text = f"halo exchange is {share:.1%} of an iteration"
        result.append(Finding("bottleneck", "point-to-point communication", share, phases.halo_s, text))
    if phases.passing_s:
        share = phases.passing_s / phases.total_s
        text = f"passing activations between stages is {share:.1%} of an iteration"
        result.append(Finding("bottleneck", "point-to-point communication", share, phases.passing_s, text))
    p1, p2 = projection.groups
    flows = flows_per_port(devices, p2) if name == "df" and p1 > 1 else 1.0
    if flows > 1:
        text = f"{p2} gradient exchanges at once: {flows:g} share each network port of a node"
        saved_s = min(lost_s, phases.gradient_s * (1 - 1 / flows))  # what is hidden costs nothing
        result.append(Finding("bottleneck", "network congestion", flows, saved_s, text))
    return result


def _computation(projection: Projection, facts: Facts, staged: Sequence[PipelineStage]) -> list[Finding]:
    name, phases, p = projection.strategy, projection.phases, projection.devices
    result: list[Finding] = []
    if phases.update_s:
        share = phases.update_s / phases.computation_s
        added = ", with the gradients of segments added up," if staged and projection.segments > 1 else ""
        text = f"the weight update{added} is {share:.1%} of the computation"
        result.append(Finding("limit", "weight update", share, phases.update_s, text))
    ideal_s = projection.batch / p * facts.compute_s
    if name == "pipeline":
        over = imbalance(staged) if staged else _published_imbalance(facts, p)
        idle = (p - 1) / (p + projection.segments - 1)
        text = (
            f"the slowest stage takes {over:.1%} longer than the mean; {idle:.1%} of all turns are filling and draining"
        )
        result.append(Finding("limit", "workload balancing", over, phases.compute_s - ideal_s, text))
    else:
        over = phases.compute_s / ideal_s - 1
        if over > 1e-9:
            text = f"computation takes {1 + over:.2f}× its ideal share: repeated work, and small local shapes"
            result.append(Finding("bottleneck", "computation redundancy", over, phases.compute_s - ideal_s, text))
    return result


def _published_imbalance(facts: Facts, stages: int) -> float:
    """How much longer than the mean the slowest of the published form's stages takes."""
    cuts = balanced([layer.compute_s for layer in facts.layers], stages)
    times = [sum(layer.compute_s for layer in facts.layers[a:b]) for a, b in pairwise(cuts)]
    return max(times) * stages / sum(times) - 1


def _memory(projection: Projection, facts: Facts) -> list[Finding]:
    """The share of a device's memory that other devices of its group, or of all, hold as well."""
    name, (p1, p2) = projection.strategy, projection.groups
    weights = 2 * facts.weights + sum(layer.biases for layer in facts.layers)
    activations = 2 * projection.batch / p1 * sum(layer.inputs + layer.outputs for layer in facts.layers)
    if name in GRADIENTS and name != "df":
        spread = activations / (p2 if name in ("spatial", "ds") else 1)
        share = weights / (weights + spread)
        text = f"every device holds all weights and their gradients: {share:.1%} of its memory"
    elif name in LAYERWISE:
        share = activations * (1 - 1 / p2) / (activations + weights / p2)
        text = f"every device of a group holds whole activations: {share:.1%} of its memory is another's too"
    else:
        return []
    return [Finding("bottleneck", "memory redundancy", share, 0.0, text)] if share > 0 else []
