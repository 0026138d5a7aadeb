"""The limits of a proof by running: some ten seconds or the time of tracing, and a part of the host's memory."""

from __future__ import annotations

import os
from math import prod

import numpy as np

from layerwise.graph.layer import Layer
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.torch.unfused import UnprovenError
from layerwise.ops.opaque import TorchOp

MOST_BYTES = 1 << 32  # of what the layers make, and of gradients
MOST_DRAWN = 1 << 30  # where the module has no values of its own: other ranks of the host do the same
FLOPS = 1.6e11  # forward, on a CPU, of however many threads, as ranks must come to the same: on one, some ten seconds
FLOPS_A_LAYER = 2e8  # likewise, of networks of many layers: some ten milliseconds, which one takes to be traced, too
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
    flops, faster = sum(map(_flops, graph.inner)), 1 if device == "cpu" else ACCELERATED
    if flops > max(FLOPS, FLOPS_A_LAYER * len(graph.layers)) * faster:
        raise UnprovenError(f"{graph.batch} samples of it are {flops:.1e} operations, which take too long")


def _flops(layer: Layer) -> float:
    """Returns a layer's operations forward; 0 where only running it would tell."""
    if isinstance(layer.op, TorchOp):
        return 0.0
    extents = np.array([dim.extent for dim in layer.space.dims], np.int64)
    products = layer.op.gemms(layer.specs, extents)
    return float(sum(gemm.flops for gemm in products) if products else layer.op.flops(layer.specs, extents))


def _host_bytes() -> int:
    """A rank's part of a quarter of this host's memory: all of its ranks prove at the same time.

    Of what is there, not of what is free, so that ranks on equal hosts come to the same.
    """
    ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE", "")
    quarter = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    return quarter // max(1, int(ranks) if ranks.isdecimal() else 1)
