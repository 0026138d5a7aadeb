"""Check: whether links are still as they were measured, by a handful of messages at each level."""

from __future__ import annotations

import numpy as np

from layerwise.comm.base import Comm
from layerwise.machine.curves import Links
from layerwise.measure.links import operation_time
from layerwise.measure.topology import Topology, pairs
from layerwise.quantities import units

SIZE_BYTES = 2**18  # of a message that matters in a step; its time shows the bandwidth
ROUNDS = 3
# Shares that times may differ by, where they did not vary more as they were measured: by MOST at most.
LATENCY, BANDWIDTH, MOST = 1.0, 0.35, 1.0


def changed_links(comm: Comm, links: Links, where: Topology) -> str | None:
    """Returns a sentence on the first level whose messages do not take what was measured; None where all do.

    Every rank calls it with the same links, and all get the same answer. It takes up to half a second.
    """
    varied = links.conditions.get("spread", 0.0)
    own = min(MOST, varied) if isinstance(varied, int | float) else 0.0
    for shape in pairs(where):
        curve = links.curve("exchange", shape.fan, shape.load)
        level = "between nodes" if len(shape.fan) > 1 else "in a node"
        if curve is None:
            return f"links {level} were not measured: they are measured now"
        sizes = (curve.knots[0][0], LATENCY), (float(SIZE_BYTES * shape.load), BANDWIDTH)
        for size_bytes, share in sizes:
            then_s = float(curve.seconds(np.array(size_bytes)))
            off = now_s = 0.0
            for _ in range(2):  # noise is not there twice
                now_s = operation_time(comm, "exchange", shape, size_bytes, ROUNDS).seconds
                off = max(now_s / then_s, then_s / max(now_s, 1e-12)) - 1
                if off <= max(share, own):
                    break
            else:
                date = str(links.conditions.get("date", ""))[:10] or "earlier"
                return (
                    f"links {level} are not as measured on {date}: {units(size_bytes, 'B')} take "
                    f"{units(now_s, 's')}, it was {units(then_s, 's')}; links are measured again"
                )
    return None
