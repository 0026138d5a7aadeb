"""The cpu profile, with the speed of a core and the links of the emulated cluster as they were just measured."""

from __future__ import annotations

from dataclasses import replace

from layerwise.config import Config
from layerwise.cost.model import CostModel, CostOptions
from layerwise.cost.price import price
from layerwise.graph.layer_graph import LayerGraph
from layerwise.machine import Profile, load


def calibrated(graph: LayerGraph, step_s: float, alpha_s: float, bytes_per_s: float, optimizer: str = "sgd") -> Profile:
    """step_s: of one process on the whole batch of the fused `graph`. Nodes of one process each."""
    cpu = load("cpu")
    alone = CostModel(graph, cpu.device_graph(1), CostOptions(optimizer=optimizer))
    speed = price(alone, {layer.name: Config() for layer in alone.graph.inner}).step_time_s / step_s
    processor = replace(
        cpu.processor,
        peak_flops={dtype: flops * speed for dtype, flops in cpu.processor.peak_flops.items()},
        memory_bandwidth_bytes_per_s=cpu.processor.memory_bandwidth_bytes_per_s * speed,
        kernel_floor_s=cpu.processor.kernel_floor_s / speed,
    )
    node, link = cpu.levels
    link = replace(link, latency_s=alpha_s, bandwidth_bytes_per_s=bytes_per_s)
    return replace(cpu, name="emulated", processor=processor, levels=(node, link))
