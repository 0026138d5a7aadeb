"""Limits of a proof by running: some ten seconds or the time of tracing, and a part of the host's memory."""

from __future__ import annotations

import os
from math import prod

import numpy as np

from layerwise.graph.layer import Layer
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.torch.unfused import UnprovenError
from layerwise.ops.opaque import TorchOp

MOST_BYTES = 1 << 32  # of the layers' outputs and gradients
MOST_DRAWN = 1 << 30  # if the module has no values and they are drawn: other ranks of the host draw them too
FLOPS = 1.6e11  # forward, on a CPU, for any number of threads, as ranks must decide alike: some ten seconds on one
FLOPS_A_LAYER = 2e8  # the same for networks of many layers: some ten milliseconds a layer, about the time to trace it
ACCELERATED = 100  # factor on an accelerator


def check_affordable(graph: LayerGraph, device: str, *, drawn: bool) -> None:
    """Raises UnprovenError if running the layers takes too much time or memory. drawn: this host draws their values."""
    most_bytes = MOST_DRAWN if drawn else MOST_BYTES
    if device == "cpu":
        most_bytes = min(most_bytes, _host_bytes())
    made = sum(prod(layer.out.shape) * layer.out.item_bytes for layer in graph.layers)
    stored = {
        name: count for layer in graph.layers for name, p, size in layer.held() if (count := prod(p.shape) * size)
    }
    if 3 * made + 2 * sum(stored.values()) > most_bytes:
        raise UnprovenError(f"running it would take more than {most_bytes / 2**30:.1f} GiB")
    flops, faster = sum(map(_flops, graph.inner)), 1 if device == "cpu" else ACCELERATED
    if flops > max(FLOPS, FLOPS_A_LAYER * len(graph.layers)) * faster:
        raise UnprovenError(f"running {graph.batch} samples would take too long ({flops:.1e} operations)")


def _flops(layer: Layer) -> float:
    """Returns a layer's forward operations; 0 if only running it would tell."""
    if isinstance(layer.op, TorchOp):
        return 0.0
    extents = np.array([dim.extent for dim in layer.space.dims], np.int64)
    products = layer.op.gemms(layer.specs, extents)
    return float(sum(gemm.flops for gemm in products) if products else layer.op.flops(layer.specs, extents))


def _host_bytes() -> int:
    """A rank's share of a quarter of this host's memory, as all its ranks prove at the same time.

    It counts total memory, not free memory, so that ranks on equal hosts decide alike.
    """
    ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE", "")
    quarter = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    return quarter // max(1, int(ranks) if ranks.isdecimal() else 1)
