"""What a framework adds to the closed forms: constants of the software that ran the published measurements.

`chainermnx.json` has each number and its source; `benchmarks.published.calibrate` derives those that it can.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from layerwise.errors import LayerwiseError
from layerwise.plan import nearest


@dataclass(frozen=True, slots=True)
class Framework:
    """Constants of one version of a framework on one machine."""

    # A ring all-reduce of gradients, with packing, unpacking and waiting: in a node, and between nodes.
    gradient_node_bytes_per_s: float
    gradient_bytes_per_s: float
    collective_node_bytes_per_s: float  # a layer's own collectives in a node
    copy_bytes_per_s: float  # concatenating, stacking and summing pieces of activations
    piece_s: float  # host time for one piece
    mpi_latency_s: float  # a message through MPI and the host
    feed_s_per_sample: float  # for a leader to load and hand out one sample of its group
    # Of a hybrid, a layer with weights and GPU. Fitted to the runs that it is compared with: no score of theirs counts.
    growth_s: float = 0.0
    # Of one device, by model, the update included.
    seconds_per_sample: Mapping[str, float] = field(default_factory=dict, hash=False)
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)  # where each number comes from
    gather_after: Mapping[str, str] = field(default_factory=dict, hash=False)  # by model, the last layer cut in space
    name: str = ""  # of what ran

    def having(self, constants: Mapping[str, float]) -> Framework:
        """The same with other values of some constants."""
        return replace(self, **constants)  # type: ignore[arg-type]

    def single_s(self, model: str) -> float:
        """Measured seconds a sample of one device. LayerwiseError where nobody published any."""
        if model not in self.seconds_per_sample:
            known = self.seconds_per_sample
            raise LayerwiseError(
                f"{self.name} has no measured time of {model!r} on one device{nearest(model, known)}; it has those of "
                f"{', '.join(known)}"
            )
        return self.seconds_per_sample[model]

    def gathers_after(self, model: str) -> str | None:
        """The last layer of a model that was cut in space, where it is not the usual one."""
        return self.gather_after.get(model.partition(":")[0])


FITTED = ("growth_s",)
CONSTANTS = tuple(f.name for f in fields(Framework) if f.type == "float" and f.name not in FITTED)


def framework(name: str, runs: str, *, fitted: bool = False) -> Framework:
    """The constants of `NAME.json` as they were when `runs` were measured (`bars` or `logs`).

    fitted: also those that check records were fitted to.
    """
    document = json.loads(Path(__file__).with_name(f"{name}.json").read_text(encoding="utf-8"))
    if runs not in document["runs"]:
        raise LayerwiseError(f"framework {name} knows no runs {runs!r}: it has {', '.join(document['runs'])}")
    constants = document["constants"] | document["runs"][runs]["constants"]
    constants |= document["fitted"].get(runs, {}) if fitted else {}
    single, gather_after = document["runs"][runs]["seconds_per_sample"], document["gather_after"]
    return Framework(
        **{key: float(constants[key]["value"]) for key in (*CONSTANTS, *FITTED) if key in constants},
        seconds_per_sample={key: value["value"] for key, value in single.items()},
        sources={key: value["source"] for key, value in (constants | single | gather_after).items()},
        gather_after={key: value["value"] for key, value in gather_after.items()},
        name=document["name"],
    )
