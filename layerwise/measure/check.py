"""Check: whether links are still as measured, by a few messages at each level."""

from __future__ import annotations

import numpy as np

from layerwise.comm.base import Comm
from layerwise.machine.curves import Links
from layerwise.measure.links import operation_time
from layerwise.measure.topology import Topology, pairs
from layerwise.quantities import units

SIZE_BYTES = 2**18  # of a message that matters in a step; its time shows the bandwidth
ROUNDS = 3
# Fractions that times may differ by, or their spread when measured, but at most MOST.
LATENCY, BANDWIDTH, MOST = 1.0, 0.35, 1.0


def changed_links(comm: Comm, links: Links, where: Topology) -> str | None:
    """Returns a sentence about the first level whose messages differ from the measurement; None if all agree.

    Every rank must call it with the same links, and gets the same answer. It takes up to half a second.
    """
    varied = links.conditions.get("spread", 0.0)
    own = min(MOST, varied) if isinstance(varied, int | float) else 0.0
    for shape in pairs(where):
        curve = links.curve("exchange", shape.fan, shape.load)
        level = "between nodes" if len(shape.fan) > 1 else "in a node"
        if curve is None:
            return f"links {level} were never measured"
        sizes = (curve.knots[0][0], LATENCY), (float(SIZE_BYTES * shape.load), BANDWIDTH)
        for size_bytes, share in sizes:
            then_s = float(curve.seconds(np.array(size_bytes)))
            off = now_s = 0.0
            for _ in range(2):  # noise does not occur twice
                now_s = operation_time(comm, "exchange", shape, size_bytes, ROUNDS).seconds
                off = max(now_s / then_s, then_s / max(now_s, 1e-12)) - 1
                if off <= max(share, own):
                    break
            else:
                date = str(links.conditions.get("date", ""))[:10] or "earlier"
                return (
                    f"links {level} differ from the measurement on {date}: {units(size_bytes, 'B')} take "
                    f"{units(now_s, 's')} instead of {units(then_s, 's')}"
                )
    return None
