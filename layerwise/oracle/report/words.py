"""Words of the oracle's reports: names of strategies and phases, times as people say them."""

from __future__ import annotations

from layerwise.oracle.formulas.phases import TITLES
from layerwise.quantities import units

PHASES = {
    "compute_s": "compute",
    "update_s": "update",
    "gather_s": "gather",
    "reduce_s": "reduce",  # batch norm's all-reduces included
    "halo_s": "halo",
    "passing_s": "passing",
    "gradient_s": "gradients",
}

_OURS = (
    "Times and memory are of layerwise.run on this machine, {}. Other software takes other times: ParaDL's published"
)
_OURS += " V100 runs are of ChainerMNX (--formulas chainermnx)."
TIMES_OF = {  # by what priced, whose times these are
    "tables": _OURS.format("by the cost tables"),
    "as-run": _OURS.format("by closed forms and, memory, by the cost tables"),
    "published": "Times are ParaDL's closed forms, of no software in particular; memory is layerwise.run's.",
    "chainermnx": (
        "Times are of ChainerMNX on V100, not of layerwise.run, whose the memory is. Its rates of copies and of a "
        "layer's collectives inside a node rest on one run of ResNet-50: on other networks they do not hold."
    ),
}


def title(name: str) -> str:
    """`data+filter` for `df`."""
    return TITLES.get(name, name)


def duration(seconds: float) -> str:
    """`3.21 h`, `41.0 min`, `12.3 s`, `850 ms`."""
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return units(seconds, "s")
