"""Keywords of `parallelize` that tables of tests say flat."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from layerwise.api.arguments import ParallelOptions
from layerwise.comm.base import Comm

OPTIONS = {field.name for field in fields(ParallelOptions)}


def keywords(how: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """`how` and `more`, with what ParallelOptions takes as `options`; nothing is measured."""
    flat = {"measure_s": 0, **more, **how}
    options = {name: value for name, value in flat.items() if name in OPTIONS}
    return {name: value for name, value in flat.items() if name not in OPTIONS} | {
        "options": ParallelOptions(**options)
    }


def quiet(comm: Comm, **how: Any) -> dict[str, Any]:
    """Keywords of `parallelize` on a rank of a test: nothing is measured or printed."""
    return keywords(how, comm=comm, verbose=False)
