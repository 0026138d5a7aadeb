"""The names of strategies in flags, files and reports; and how reports count GPUs."""

from __future__ import annotations

from collections.abc import Mapping

from layerwise.errors import LayerwiseError, nearest

STRATEGIES = ("serial", "data", "spatial", "filter", "channel", "pipeline", "df", "ds")  # the paper's
NAMES = (*STRATEGIES, "grid", "layerwise")
TITLES: Mapping[str, str] = {"df": "data+filter", "ds": "data+spatial"}  # longer names in text


def title(name: str) -> str:
    """`data+filter` for `df`."""
    return TITLES.get(name, name)


def known(text: str) -> str:
    """A strategy's short name: `df` also for `data+filter`. Raises LayerwiseError if there is no such strategy."""
    name = next((short for short, long in TITLES.items() if long == text), text)
    if name not in NAMES:
        raise LayerwiseError(f"unknown strategy {name!r}{nearest(name, NAMES)}: choose from {', '.join(NAMES)}")
    return name


def counted(gpus: int) -> str:
    """`1 GPU`, `4 GPUs`."""
    return f"{gpus} GPU" + "s" * (gpus > 1)
