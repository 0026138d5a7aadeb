"""The paper's strategies as ordinary ones: a configuration of every layer, which search prices and `run` executes.

Placement is the paper's: data parallelism across nodes, the other dimension inside. Cells are laid out with samples
outermost, so p1 groups of p2 devices are p1 runs of neighbours. Where the paper computes redundantly on every device of
a group (everything after a spatial strategy's gather, channel's first layer), this computes on the group's first
device: in the same time, with a gradient that need not be exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product, takewhile
from math import prod

from layerwise.config import Config, why_illegal
from layerwise.errors import LayerwiseError, nearest
from layerwise.graph.layer import Layer
from layerwise.graph.layer_graph import LayerGraph
from layerwise.oracle.names import NAMES
from layerwise.search.baselines import ProcessGrid, grid_configs, grids, mlp_layers

SPATIAL = ("d", "h", "w", "l")
CUT = {"filter": "c", "channel": "k", "df": "c"}  # the weights' dimension that a strategy's groups split
HYBRID = ("df", "ds")


@dataclass(frozen=True, slots=True)
class Shape:
    """How a strategy uses its devices."""

    groups: int  # data-parallel groups
    inside: int  # devices in each
    grid: tuple[tuple[str, int], ...] = ()  # the degrees of a spatial split inside a group
    gather_after: str | None = None  # the last layer with this split

    @property
    def devices(self) -> int:
        return self.groups * self.inside


@dataclass(frozen=True, slots=True)
class Wishes:
    """The choices that the user fixes."""

    inside: int | None = None  # devices in a group of a hybrid
    gather_after: str | None = None  # the last layer that a spatial strategy splits
    dims: tuple[str, ...] = SPATIAL  # dimensions that it may split


@dataclass(frozen=True, slots=True)
class Limit:
    """The largest number of devices that a strategy can use, and what limits it (a layer, or the batch)."""

    devices: int
    by: str


class UnreachableError(LayerwiseError):
    """A strategy cannot use this many devices; the message gives the limit and its cause."""


def weighted(graph: LayerGraph, label: str = "c") -> list[Layer]:
    """Convolutions, linear layers and others that multiply by a weight matrix that can be split along `label`.

    Along k, the input channels, the first layer is not split, as in the paper.
    """
    mains = ((layer, layer.stages[0].space.parameters) for layer in graph.inner)
    heavy = [layer for layer, parameters in mains if any(len(p.shape) > 1 and p.trainable for p in parameters)]
    return heavy[1:] if label == "k" else heavy


def positions(layer: Layer, dims: Sequence[str] = SPATIAL) -> int:
    """W·H·D: the number of parts into which a layer's output can be split in space."""
    return prod(layer.space.max_degree(label) for label in dims)


def gather_layer(graph: LayerGraph, node: int, wanted: str | None = None) -> str | None:
    """The last layer that a spatial strategy splits, or None.

    By default the last one before the positions fall below the devices of a node (in ResNet and VGG the end of the
    convolutions, as in the paper).
    """
    names = [layer.name for layer in graph.inner]
    if wanted is not None and wanted not in names:
        raise LayerwiseError(f"--gather-after {wanted!r}: the model has no layer of this name{nearest(wanted, names)}")
    before = takewhile(lambda layer: not 1 < positions(layer) < node, graph.inner)
    wide = [layer.name for layer in before if positions(layer) >= max(node, 2)]
    return wanted or (wide[-1] if wide else None)


def spatial_layers(graph: LayerGraph, last: str | None) -> list[Layer]:
    """The layers with positions, up to `last`; () without it."""
    names = [layer.name for layer in graph.inner]
    until = 0 if last is None else names.index(last) + 1
    return [layer for layer in graph.inner[:until] if positions(layer) > 1]


def limit(graph: LayerGraph, name: str, node: int, wishes: Wishes | None = None) -> Limit:
    """The largest p of table 3, and what limits it."""
    batch = f"the batch of {graph.batch:,} samples"
    if name == "serial":
        return Limit(1, "definition")
    if name == "data":
        return Limit(graph.batch, batch)
    if name == "pipeline":
        return Limit(len(graph.inner), f"the model's {len(graph.inner)} layers")
    if name == "layerwise":
        return Limit(2**16, "nothing but the machine")
    if name == "grid":
        widest = max(layer.out.shape[-1] for layer in mlp_layers(graph))
        return Limit(graph.batch * widest, f"{batch}, times {widest:,} outputs of the widest layer")
    inside = _inside_limit(graph, name, node, wishes or Wishes())
    if name in HYBRID:
        return Limit(graph.batch * inside.devices, f"{batch}, times {inside.devices} of {inside.by}")
    return inside


def _inside_limit(graph: LayerGraph, name: str, node: int, wishes: Wishes) -> Limit:
    """The most devices inside a group: the layer with the fewest possible parts decides."""
    dims, parts = wishes.dims, "positions"
    if name in CUT:
        layers, dims = weighted(graph, CUT[name]), (CUT[name],)
        parts = "input channels" if CUT[name] == "k" else "output channels"
    else:
        layers = spatial_layers(graph, gather_layer(graph, node, wishes.gather_after))
    if not layers:
        return Limit(1, f"no layer has {'weights' if name in CUT else 'positions'} to split")
    least = min(layers, key=lambda layer: positions(layer, dims))
    sizes = " × ".join(str(most) for d in dims if (most := least.space.max_degree(d)) > 1) or "1"
    return Limit(positions(least, dims), f"layer {least.name!r} with {sizes} {parts}")


def applicable(graph: LayerGraph, node: int) -> tuple[str, ...]:
    """The strategies that make sense for a model: no spatial ones without positions."""
    without = set[str]()
    try:
        mlp_layers(graph)
    except LayerwiseError:
        without.add("grid")
    if limit(graph, "spatial", node).devices == 1:
        without |= {"spatial", "ds"}
    if len(weighted(graph)) < 2:
        without |= {"filter", "channel", "df"}
    return tuple(name for name in NAMES if name not in without)


def shapes(graph: LayerGraph, name: str, devices: int, node: int, wishes: Wishes | None = None) -> list[Shape]:
    """The ways to use `devices` devices in nodes of `node`: one shape, or one for each spatial or process grid.

    Raises UnreachableError, with the limit and its cause.
    """
    wishes = wishes or Wishes()
    most = limit(graph, name, node, wishes)
    if devices > most.devices:
        what = " (every device needs one)" if name == "data" else ""
        raise UnreachableError(f"{name} cannot use {devices} devices: at most {most.devices:,}, by {most.by}{what}")
    if name in ("serial", "data"):
        return [Shape(devices, 1)]
    if name == "grid":
        found = [Shape(grid.batch_groups, grid.model_parts) for grid in grids(devices, graph)]
        if not found:
            raise UnreachableError(f"grid cannot use {devices} devices: no division of them fits {most.by}")
        return found
    inside = _group_size(graph, name, devices, node, wishes) if name in HYBRID else devices
    if name in ("spatial", "ds"):
        return _spatial_shapes(graph, name, Shape(devices // inside, inside), node, wishes)
    return [Shape(devices // inside, inside)]


def _group_size(graph: LayerGraph, name: str, devices: int, node: int, wishes: Wishes) -> int:
    """Devices in a group: as many as a node has, or the next smaller possible number."""
    most = _inside_limit(graph, name, node, wishes)
    if wishes.inside is None:
        sizes = [g for g in range(2, min(node, most.devices, devices // 2) + 1) if devices % g == 0]
    elif devices % wishes.inside:
        raise UnreachableError(f"{name}: {devices} devices cannot be divided into groups of {wishes.inside}")
    elif wishes.inside > most.devices:
        raise UnreachableError(
            f"{name} cannot have groups of {wishes.inside} devices: at most {most.devices}, by {most.by}"
        )
    else:
        sizes = [wishes.inside]
    sizes = [g for g in sizes if devices // g <= graph.batch]
    if not sizes:
        raise UnreachableError(
            f"{name} needs groups inside a node, at least two groups of two devices each, and a sample for each group, "
            f"which {devices} device{'s' * (devices > 1)} in nodes of {node} with {graph.batch} samples do not allow "
            "(--group-size sets another size)"
        )
    return sizes[-1]


def _spatial_shapes(graph: LayerGraph, name: str, shape: Shape, node: int, wishes: Wishes) -> list[Shape]:
    """The shape with every grid that splits space into as many cells as a group has devices."""
    last = gather_layer(graph, node, wishes.gather_after)
    layers, inside = spatial_layers(graph, last), shape.inside
    least = {label: min((layer.space.max_degree(label) for layer in layers), default=1) for label in wishes.dims}
    degrees = {label: [d for d in range(1, most + 1) if inside % d == 0] for label, most in least.items() if most > 1}
    cuts = [zip(degrees, cut, strict=True) for cut in product(*degrees.values()) if prod(cut) == inside]
    if not cuts:
        tightest = min(layers, key=lambda layer: positions(layer, wishes.dims))
        sizes = " × ".join(f"{d}={least[d]}" for d in degrees) or "no dimension"
        raise UnreachableError(
            f"{name} cannot split space into {inside}: layer {tightest.name!r} can only be split {sizes} (gather "
            "earlier with --gather-after, or use another number of devices)"
        )
    return [Shape(shape.groups, inside, tuple((d, degree) for d, degree in cut if degree > 1), last) for cut in cuts]


def strategy(graph: LayerGraph, name: str, shape: Shape) -> dict[str, Config]:
    """A configuration of every layer except inputs and sink. Not for `pipeline` and `layerwise`.

    Raises UnreachableError if a layer cannot be split that way.
    """
    if name == "grid":
        return grid_configs(graph, ProcessGrid(shape.groups, shape.inside))
    if name in CUT:
        cuts = _weight_cuts(graph, CUT[name], shape.inside)
    else:
        cuts = {layer.name: shape.grid for layer in spatial_layers(graph, shape.gather_after)}
    result: dict[str, Config] = {}
    for layer in graph.inner:
        samples = {"n": shape.groups} if layer.space.max_degree("n") > 1 else {}
        config = Config.of(samples | dict(cuts.get(layer.name, ())))
        if reason := why_illegal(config, layer.space.dims):
            raise UnreachableError(f"{name} cannot use {shape.devices} devices: layer {layer.name!r} {reason}")
        if 1 < config.total < shape.devices:  # the first device of each group
            config = Config(config.degrees, "strided")
        result[layer.name] = config
    return result


def _weight_cuts(graph: LayerGraph, label: str, inside: int) -> dict[str, tuple[tuple[str, int], ...]]:
    """Splits inside a group: weights along `label`, and layers without weights along the channels that they read.

    A split along k leaves channels scattered, like a split along c.
    """
    heavy = {layer.name for layer in weighted(graph, label)}
    result: dict[str, tuple[tuple[str, int], ...]] = {}
    for layer in graph.inner:
        if layer.name in heavy:
            result[layer.name] = ((label, inside),)
        elif any(source in result for source in layer.inputs) and layer.space.max_degree("c") >= inside:
            result[layer.name] = (("c", inside),)
    return result
