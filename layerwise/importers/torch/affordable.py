"""What proving an import may take: its time is bounded by that of tracing, its memory by the host's."""

from __future__ import annotations

import os
from math import prod

import numpy as np

from layerwise.graph.layer import LayerGraph
from layerwise.importers.torch.drawn import UnprovenError
from layerwise.ops.opaque import TorchOp

MOST_BYTES = 1 << 32  # of what the layers make, and of gradients
MOST_DRAWN = 1 << 30  # where the module has no values of its own: other ranks of the host do the same
FLOPS_A_LAYER = 5e7  # forward, on a CPU: with the rest some milliseconds, which a layer takes to be traced, too
ACCELERATED = 100  # times that, elsewhere


def check_affordable(graph: LayerGraph, device: str, *, drawn: bool) -> None:
    """UnprovenError where the layers take more time or memory than importing may. drawn: values are, on this host."""
    most_bytes = MOST_DRAWN if drawn else MOST_BYTES
    if device == "cpu":
        most_bytes = min(most_bytes, _host_bytes())
    made = sum(prod(layer.out.shape) * layer.out.item_bytes for layer in graph.layers)
    stored = {
        name: count for layer in graph.layers for name, p, size in layer.held() if (count := prod(p.shape) * size)
    }
    if 3 * made + 2 * sum(stored.values()) > most_bytes:
        raise UnprovenError(f"it would take more than {most_bytes / 2**30:.1f} GiB")
    flops = 0.0
    for layer in graph.inner:
        if not isinstance(layer.op, TorchOp):
            extents = np.array([dim.extent for dim in layer.space.dims], np.int64)
            flops += float(layer.op.flops(layer.specs, extents))
    if flops > FLOPS_A_LAYER * len(graph.layers) * (1 if device == "cpu" else ACCELERATED):
        raise UnprovenError(
            f"{graph.batch} samples of it are {flops:.1e} operations, which take longer than to trace it"
        )


def _host_bytes() -> int:
    """A rank's part of a quarter of this host's memory: all of its ranks prove at the same time.

    Of what is there, not of what is free, so that ranks on equal hosts come to the same.
    """
    ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE", "")
    quarter = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    return quarter // max(1, int(ranks) if ranks.isdecimal() else 1)
