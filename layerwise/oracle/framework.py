"""What a framework adds to the closed forms: constants of the software that ran the published measurements.

The file `frameworks/*.json` states each number with where it came from; `calibrate` derives those that it can.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import resources

from layerwise.errors import LayerwiseError

FORMAT = "layerwise-framework"


@dataclass(frozen=True, slots=True)
class Framework:
    """Constants of one version of a framework on one machine.

    gradient_*: bytes/s of a ring all-reduce of gradients, with packing, unpacking and waiting, in a node and between
    nodes. collective_node_bytes_per_s: of a layer's own collectives in a node. copy_bytes_per_s: of concatenating,
    stacking and summing pieces of activations. piece_s: host time for one piece. mpi_latency_s: a message through MPI
    and the host. feed_s_per_sample: for a leader to load and hand out one sample of its group.
    """

    gradient_node_bytes_per_s: float
    gradient_bytes_per_s: float
    collective_node_bytes_per_s: float
    copy_bytes_per_s: float
    piece_s: float
    mpi_latency_s: float
    feed_s_per_sample: float
    seconds_per_sample: Mapping[str, float] = field(default_factory=dict, hash=False)
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    def having(self, constants: Mapping[str, float]) -> Framework:
        """The same with other values of some constants."""
        values = {name: constants.get(name, getattr(self, name)) for name in CONSTANTS}
        return Framework(**values, seconds_per_sample=self.seconds_per_sample, sources=self.sources)


CONSTANTS = tuple(f.name for f in fields(Framework) if f.name not in ("seconds_per_sample", "sources"))


def framework(name: str, runs: str) -> Framework:
    """The constants of `frameworks/NAME.json` as they were when `runs` were measured (`bars` or `logs`)."""
    text = (resources.files("layerwise.oracle") / "frameworks" / f"{name}.json").read_text(encoding="utf-8")
    document = json.loads(text)
    assert (document["format"], document["version"]) == (FORMAT, 1), f"{name}.json is of another format"
    if runs not in document["runs"]:
        raise LayerwiseError(f"framework {name} knows no runs {runs!r}: it has {', '.join(document['runs'])}")
    constants = document["constants"] | document["runs"][runs]["constants"]
    single = document["runs"][runs]["seconds_per_sample"]
    sources = {key: value["source"] for key, value in (constants | single).items()}
    values = {key: float(constants[key]["value"]) for key in CONSTANTS}
    return Framework(**values, seconds_per_sample={m: s["value"] for m, s in single.items()}, sources=sources)
