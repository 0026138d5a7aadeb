"""Holding: whether the boxes of a layer's parameters are those of DTensors of the devices that compute it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from layerwise.config import Config, SearchSpace, reduce_axis
from layerwise.errors import LayerwiseError
from layerwise.geometry import AxisMap, boundaries, chunks
from layerwise.graph.layer import Layer
from layerwise.ops.facts import Dim, Parameter


def why_not_held(layer: Layer, config: Config) -> str | None:
    """The reason that devices cannot hold a layer's parameters as DTensors under a configuration, or None.

    Each prime factor of the number of cells is an axis of their mesh, which cuts a dimension as torch.chunk does, or
    none. So its cuts of parameters must be torch.chunk's.
    """
    return _reason(layer, layer.own_parameters(), config)


def _reason(layer: Layer, held: Sequence[tuple[str, Parameter]], config: Config) -> str | None:
    if not config.degrees or not held:
        return None
    of_cells, of_results = (_degrees(layer, config, epilogue) for epilogue in (False, True))
    for name, p in held:
        degrees = of_results if p.epilogue else of_cells
        cut = [(j, m) for j, m in enumerate(p.maps) if m.source is not None and degrees[m.source] > 1]
        for j, m in cut:
            assert m.source is not None
            if not _chunks(m, layer.space.dims[m.source], degrees[m.source], p.shape[j]):
                return (
                    f"{config} cuts dimension {j} of parameter {name!r}, of {p.shape[j]}, unlike torch.chunk, by which "
                    "DTensors are cut: choose a number of parts that divides it"
                )
    return None


def _degrees(layer: Layer, config: Config, epilogue: bool) -> list[int]:
    """How often each dimension of the layer's space is cut for its parameters."""
    dims, by_label = layer.space.dims, dict(config.degrees)
    degrees = [by_label.get(d.label or "", 1) for d in dims]
    if epilogue and "k" in by_label:
        axis = reduce_axis(config, dims)
        assert axis is not None
        degrees[axis] *= by_label["k"]
    return degrees


def held_configurations(layer: Layer, space: SearchSpace) -> tuple[Config, ...]:
    """Those of a search space that a layer can have."""
    configs, held = space.configurations(layer.space.dims), layer.own_parameters()
    cutting = {layer.space.dims[m.source].label for _, p in held for m in p.maps if m.source is not None}
    known: dict[object, bool] = {}

    def is_held(config: Config) -> bool:
        """Looked at once for all that cut the parameters alike: unless a reduction scatters over other dimensions."""
        degrees = config.degrees
        if not any(label == "k" for label, _ in degrees):
            degrees = tuple(one for one in degrees if one[0] in cutting)
        if degrees not in known:
            known[degrees] = _reason(layer, held, config) is None
        return known[degrees]

    return tuple(filter(is_held, configs))


def check(layer: Layer, config: Config) -> None:
    """LayerwiseError with that reason."""
    if reason := why_not_held(layer, config):
        raise LayerwiseError(f"layer {layer.name!r}: {reason}")


@lru_cache(maxsize=65536)
def _chunks(axis: AxisMap, dim: Dim, degree: int, extent: int) -> bool:
    """Whether cells of `dim` need parts of a parameter's dimension of `extent` as torch.chunk makes them."""
    cuts = boundaries(dim.extent, degree, dim.unit)
    lo, hi = axis(cuts[:-1], cuts[1:])
    ends = chunks(extent, degree)
    return bool(np.array_equal(lo, ends[:-1]) and np.array_equal(hi, ends[1:]) and (hi > lo).all())
