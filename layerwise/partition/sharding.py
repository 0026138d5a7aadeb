"""Sharding: each device's shard of a parameter whose box several devices hold, which it stores and updates.

The devices of a group that hold the same box (`groups.sharing`) cut it along one dimension, such that all shards are
those of one DTensor: every prime factor of the number of cells is an axis of its mesh, and an axis that does not cut
the parameter yet cuts this dimension. So a group's shards are in the order of its devices. A parameter without a
dimension long enough stays replicated. Also: the configurations under which the boxes of a layer's parameters are those
of DTensors at all (`why_not_held`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from layerwise.config import EVEN, Config, SearchSpace, States, distinct_cells, reduce_axis
from layerwise.errors import LayerwiseError
from layerwise.geometry import AxisMap, boundaries, chunks, prime_factors
from layerwise.geometry.arrays import Ints
from layerwise.graph.layer import Layer
from layerwise.ops.base import Role
from layerwise.ops.facts import Dim, Parameter, Space
from layerwise.partition.place import Boxes, place_in

T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True, slots=True, eq=False)
class Sharding:
    """The shards of one parameter."""

    dimension: int  # dimension along which the group cuts its box
    members: int  # in each group
    boxes: Boxes  # each of N devices' shard
    rows: Ints  # (N,) elements sent for each shard: those of the largest in the device's group

    @property
    def largest(self) -> float:
        """Elements of a full box as sent, in the largest group."""
        return float(self.rows.max() * self.members)

    @property
    def total(self) -> float:
        """Elements on all devices together."""
        return float(self.rows.sum() * self.members)

    def on(self, devices: Ints) -> Sharding:
        """The shards on these devices, in this order."""
        return Sharding(self.dimension, self.members, self.boxes.on(devices), self.rows[devices])


def may_shard(layer: Layer, config: Config, devices: int, *, unfed: bool = False) -> bool:
    """True if states other than replicated ones change anything for a layer. unfed: see `place`."""
    return may_shard_each(layer, (config,), devices, unfed=unfed)[0]


def may_shard_each(layer: Layer, configs: Sequence[Config], devices: int, *, unfed: bool = False) -> list[bool]:
    """`may_shard` for each configuration."""
    found = [shardings(layer, p, configs, devices, unfed=unfed) for _, p in layer.own_parameters()]
    return [any(of[i] is not None for of in found) for i in range(len(configs))]


def states_of(layer: Layer, config: Config) -> States:
    """The states that a layer chooses; a shared parameter is never gathered, as other layers need it too."""
    return "sharded" if config.states == "gathered" and layer.role is Role.TIED else config.states


def shardings(
    layer: Layer, p: Parameter, configs: Sequence[Config], devices: int, *, unfed: bool = False
) -> list[Sharding | None]:
    """A parameter's sharding among the devices with the same box, by configuration; None: it has none.

    Only trained parameters have one: buffers and frozen parameters have no state.
    """
    if layer.end or not p.trainable or (layer.role is Role.TIED and not layer.trains):
        return [None] * len(configs)
    known = _known(layer.space, p, devices, unfed)
    cells, which = distinct_cells(configs)
    for one in cells:
        if one not in known.of_cells:
            known.of_cells[one] = known.find(one)
    found = [known.of_cells[one] for one in cells]
    return [found[i] for i in which]


def sharded(layer: Layer, p: Parameter, config: Config, devices: int, *, unfed: bool = False) -> Sharding | None:
    """The sharding under the configuration's own choice of states."""
    return sharded_each(layer, p, (config,), devices, unfed=unfed)[0]


def sharded_each(
    layer: Layer, p: Parameter, configs: Sequence[Config], devices: int, *, unfed: bool = False
) -> list[Sharding | None]:
    """`sharded` for each configuration."""
    if all(config.states == "replicated" for config in configs):
        return [None] * len(configs)
    found = shardings(layer, p, configs, devices, unfed=unfed)
    return [None if c.states == "replicated" else of for c, of in zip(configs, found, strict=True)]


@dataclass(frozen=True, slots=True)
class _Known:
    """A cache of one parameter's shardings, looked up once for many, as comparing spaces is slow."""

    space: Space
    p: Parameter
    devices: int
    unfed: bool
    of_cells: dict[Config, Sharding | None] = field(default_factory=dict)
    alike: dict[object, Sharding | None] = field(default_factory=dict)  # for cells that cut the parameter alike

    def find(self, config: Config) -> Sharding | None:
        """Returns the sharding, built once for all cells with the same axes: thousands of cells have tens."""
        dims = self.space.dims
        everywhere = self.unfed and config.total == 1
        axes = tuple(_axes(dims, self.p, config))
        if everywhere:
            axes = tuple((factor, None) for factor in prime_factors(self.devices))
        if all(cut is not None for _, cut in axes):
            return None
        labels = {dims[m.source].label for m in self.p.maps if m.source is not None}
        if self.p.epilogue:
            labels.add("k")
        key = axes, config.placement, config.weights, tuple(one for one in config.degrees if one[0] in labels)
        if key not in self.alike:
            place = place_in(self.space, config, self.devices, everywhere=everywhere)
            self.alike[key] = _sharding(place.holds(self.p), self.p, axes)
        return self.alike[key]


_known = lru_cache(maxsize=1024)(_Known)


def _sharding(computed: Boxes, p: Parameter, axes: tuple[tuple[int, int | None], ...]) -> Sharding | None:
    """The sharding of the boxes that devices compute with."""
    devices, holders = len(computed.active), np.flatnonzero(computed.active)  # in the order of the cells
    computed = computed.on(holders)
    members = int(np.prod([size for size, cut in axes if cut is None], dtype=np.int64))
    found = list[tuple[float, int, Sharding]]()
    for dimension in range(len(p.shape)):
        boxes = _cut(p.shape, [(size, dimension if cut is None else cut) for size, cut in axes])
        inside = (boxes.lo >= computed.lo).all() and (boxes.hi <= computed.hi).all()
        if inside and (boxes.hi > boxes.lo).all():
            # Shards are disjoint and fill the parameter, so a group's shards fill its box.
            volume = boxes.volume.astype(np.int64).reshape([size for size, _ in axes])
            together = tuple(i for i, (_, cut) in enumerate(axes) if cut is None)
            largest = np.broadcast_to(volume.max(together, keepdims=True), volume.shape).reshape(-1)
            made = Sharding(
                dimension, members, _spread(boxes, holders, devices), _of_devices(largest, holders, devices)
            )
            found.append((made.total, dimension, made))
    return min(found, key=lambda one: one[:2])[2] if found else None  # the least padding, then the outermost dimension


def _spread(boxes: Boxes, holders: Ints, devices: int) -> Boxes:
    """The boxes of these devices among all; the others have none."""
    lo, hi = (_of_devices(side, holders, devices) for side in (boxes.lo, boxes.hi))
    return Boxes(lo, hi, _of_devices(boxes.active, holders, devices))


def _of_devices(values: NDArray[T], holders: Ints, devices: int) -> NDArray[T]:
    """(N, ...) with the values of these devices, zeros elsewhere."""
    made = np.zeros((devices, *values.shape[1:]), values.dtype)
    made[holders] = values
    return made


def _axes(dims: tuple[Dim, ...], p: Parameter, config: Config) -> Iterator[tuple[int, int | None]]:
    """The mesh axes of the cells, in the order of `layout`: size, and the parameter's dimension."""
    of = {m.source: j for j, m in enumerate(p.maps) if m.source is not None}
    order = sorted((i for i in range(len(dims)) if dims[i].label), key=lambda i: dims[i].label != "n")
    for i in order:
        driven = of.get(i)
        if dims[i].label == "k" and p.epilogue and config["k"] > 1:  # it cuts the output further
            axis = reduce_axis(config, dims)
            assert axis is not None
            driven = of.get(axis)
        yield from ((factor, driven) for factor in prime_factors(config[dims[i].label or ""]))


def _cut(shape: tuple[int, ...], axes: list[tuple[int, int]]) -> Boxes:
    """The boxes of a DTensor on a mesh of these axes, each of which cuts a dimension like torch.chunk."""
    where = np.indices([size for size, _ in axes]).reshape(len(axes), -1)
    hi = np.tile(np.array(shape, np.int64), (where.shape[1], 1))
    lo = np.zeros_like(hi)
    for (size, k), part in zip(axes, where, strict=True):
        chunk = -(-(hi[:, k] - lo[:, k]) // size)
        first = lo[:, k] + part * chunk
        lo[:, k], hi[:, k] = np.minimum(first, hi[:, k]), np.minimum(first + chunk, hi[:, k])
    return Boxes(lo, hi, np.ones(len(lo), np.bool_))


def why_not_held(layer: Layer, config: Config) -> str | None:
    """Why devices cannot hold a layer's parameters as DTensors under a configuration, or None.

    Each prime factor of the number of cells is an axis of their mesh, which cuts a dimension like torch.chunk, or none.
    So the configuration's cuts of parameters must be torch.chunk's.
    """
    return _reason(layer, layer.own_parameters(), config)


def _reason(layer: Layer, held: Sequence[tuple[str, Parameter]], config: Config) -> str | None:
    if not config.degrees or not held:
        return None
    of_cells, of_results = (_degrees(layer, config, epilogue) for epilogue in (False, True))
    dims = layer.space.dims
    for name, p in held:
        degrees = of_results if p.epilogue else of_cells
        cut = [(j, m) for j, m in enumerate(p.maps) if m.source is not None and degrees[m.source] > 1]
        for j, m in cut:
            assert m.source is not None
            unequal = config.uneven and dims[m.source].label not in EVEN
            if unequal or not _chunks(m, dims[m.source], degrees[m.source], p.shape[j]):
                return (
                    f"{config} cuts dimension {j} of parameter {name!r}, of size {p.shape[j]}, differently from "
                    "torch.chunk, which DTensors need: choose a number of parts that divides it"
                )
    return None


def _degrees(layer: Layer, config: Config, epilogue: bool) -> list[int]:
    """The number of cells along each dimension of the space in which the layer's parameters are used."""
    dims, by_label = layer.space.dims, dict(config.degrees)
    degrees = [by_label.get(d.label or "", 1) for d in dims]
    if epilogue and "k" in by_label:
        axis = reduce_axis(config, dims)
        assert axis is not None
        degrees[axis] *= by_label["k"]
    return degrees


def held_configurations(layer: Layer, space: SearchSpace) -> tuple[Config, ...]:
    """The configurations of a search space that a layer can have."""
    configs, held = space.configurations(layer.space.dims), layer.own_parameters()
    cutting = {layer.space.dims[m.source].label for _, p in held for m in p.maps if m.source is not None}
    known: dict[object, bool] = {}

    def is_held(config: Config) -> bool:
        """True for a configuration; computed once for all that cut the parameters alike, unless they scatter
        differently.
        """
        degrees = config.degrees
        if not any(label == "k" for label, _ in degrees):
            degrees = tuple(one for one in degrees if one[0] in cutting)
        key = degrees, config.uneven
        if key not in known:
            known[key] = _reason(layer, held, config) is None
        return known[key]

    return tuple(filter(is_held, configs))


def check_held(layer: Layer, config: Config) -> None:
    """Raises LayerwiseError if devices cannot hold a layer's parameters that way."""
    if reason := why_not_held(layer, config):
        raise LayerwiseError(f"layer {layer.name!r}: {reason}")


@lru_cache(maxsize=65536)
def _chunks(axis: AxisMap, dim: Dim, degree: int, extent: int) -> bool:
    """True if cells of `dim` need parts of a parameter's dimension of `extent` as torch.chunk cuts them."""
    cuts = boundaries(dim.extent, degree, dim.unit)
    lo, hi = axis(cuts[:-1], cuts[1:])
    ends = chunks(extent, degree)
    return bool(np.array_equal(lo, ends[:-1]) and np.array_equal(hi, ends[1:]) and (hi > lo).all())
