"""The paper's strategies as ordinary strategies: a configuration for every layer, which search prices and `run` runs.

Placement is the paper's: data parallelism across nodes, the other dimension inside. Cells are laid out with samples
outermost, so p1 groups of p2 devices are p1 runs of neighbours. Where the paper computes redundantly on every device
of a group (all that follows a spatial strategy's gather, channel's first layer), ours computes on the group's first
device: the same time, and a gradient that nobody has to exchange.
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
CUT = {"filter": "c", "channel": "k", "df": "c"}  # the dimension of weights that a strategy's groups cut
HYBRID = ("df", "ds")


@dataclass(frozen=True, slots=True)
class Shape:
    """The way in which a strategy uses its devices."""

    groups: int  # data-parallel ones
    inside: int  # devices of each
    grid: tuple[tuple[str, int], ...] = ()  # the degrees of a spatial cut inside a group
    gather_after: str | None = None  # the last layer that is cut so

    @property
    def devices(self) -> int:
        return self.groups * self.inside


@dataclass(frozen=True, slots=True)
class Wishes:
    """The choices that the user fixes."""

    inside: int | None = None  # devices a group of a hybrid
    gather_after: str | None = None  # the last layer that a spatial strategy cuts
    dims: tuple[str, ...] = SPATIAL  # that it may cut


@dataclass(frozen=True, slots=True)
class Limit:
    """The largest number of devices that a strategy can use, and what limits it (a layer, or the batch)."""

    devices: int
    by: str


class UnreachableError(LayerwiseError):
    """A strategy cannot use so many devices; the message says the limit and what sets it."""


def weighted(graph: LayerGraph, label: str = "c") -> list[Layer]:
    """Convolutions, linear layers and what else multiplies by a matrix of weights that is cut along `label`.

    Along k, the input channels, the first layer is not cut, as in the paper.
    """
    mains = ((layer, layer.stages[0].space.parameters) for layer in graph.inner)
    heavy = [layer for layer, parameters in mains if any(len(p.shape) > 1 and p.trainable for p in parameters)]
    return heavy[1:] if label == "k" else heavy


def positions(layer: Layer, dims: Sequence[str] = SPATIAL) -> int:
    """W·H·D: into how many devices' shares a layer's output can be cut in space."""
    return prod(layer.space.max_degree(label) for label in dims)


def gather_layer(graph: LayerGraph, node: int, wanted: str | None = None) -> str | None:
    """The last layer that a spatial strategy cuts; None: there is none.

    By default the last one before the positions fall below the devices of a node (in ResNet and VGG the end of the
    convolutions, as in the paper).
    """
    names = [layer.name for layer in graph.inner]
    if wanted is not None and wanted not in names:
        raise LayerwiseError(f"--gather-after {wanted!r}: the model has no such layer{nearest(wanted, names)}")
    before = takewhile(lambda layer: not 1 < positions(layer) < node, graph.inner)
    wide = [layer.name for layer in before if positions(layer) >= max(node, 2)]
    return wanted or (wide[-1] if wide else None)


def spatial_layers(graph: LayerGraph, last: str | None) -> list[Layer]:
    """The layers with positions, up to `last`; none without it."""
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
    """The most devices inside a group: the layer that can be cut into the fewest parts sets it."""
    dims, parts = wishes.dims, "positions"
    if name in CUT:
        layers, dims = weighted(graph, CUT[name]), (CUT[name],)
        parts = "input channels" if CUT[name] == "k" else "output channels"
    else:
        layers = spatial_layers(graph, gather_layer(graph, node, wishes.gather_after))
    if not layers:
        return Limit(1, f"no layer has {'weights' if name in CUT else 'positions'} to cut")
    least = min(layers, key=lambda layer: positions(layer, dims))
    sizes = " × ".join(str(most) for d in dims if (most := least.space.max_degree(d)) > 1) or "1"
    return Limit(positions(least, dims), f"layer {least.name!r} with {sizes} {parts}")


def applicable(graph: LayerGraph, node: int) -> tuple[str, ...]:
    """The strategies that mean anything for a model: no spatial ones for one without positions."""
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

    Raises UnreachableError, with the limit and what sets it.
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
    """Devices a group: as many as a node has, or the next smaller number that goes."""
    most = _inside_limit(graph, name, node, wishes)
    if wishes.inside is None:
        sizes = [g for g in range(2, min(node, most.devices, devices // 2) + 1) if devices % g == 0]
    elif devices % wishes.inside:
        raise UnreachableError(f"{name}: {devices} devices are no whole number of groups of {wishes.inside}")
    elif wishes.inside > most.devices:
        raise UnreachableError(
            f"{name} cannot have groups of {wishes.inside} devices: at most {most.devices}, by {most.by}"
        )
    else:
        sizes = [wishes.inside]
    sizes = [g for g in sizes if devices // g <= graph.batch]
    if not sizes:
        raise UnreachableError(
            f"{name} needs groups inside a node, at least two groups of two devices each and a sample for each group: "
            f"{devices} device{'s' * (devices > 1)} in nodes of {node} with {graph.batch} samples have no such "
            "division (--group-size sets another)"
        )
    return sizes[-1]


def _spatial_shapes(graph: LayerGraph, name: str, shape: Shape, node: int, wishes: Wishes) -> list[Shape]:
    """The shape with every grid that cuts space into as many cells as a group has devices."""
    last = gather_layer(graph, node, wishes.gather_after)
    layers, inside = spatial_layers(graph, last), shape.inside
    least = {label: min((layer.space.max_degree(label) for layer in layers), default=1) for label in wishes.dims}
    degrees = {label: [d for d in range(1, most + 1) if inside % d == 0] for label, most in least.items() if most > 1}
    cuts = [zip(degrees, cut, strict=True) for cut in product(*degrees.values()) if prod(cut) == inside]
    if not cuts:
        tightest = min(layers, key=lambda layer: positions(layer, wishes.dims))
        sizes = " × ".join(f"{d}={least[d]}" for d in degrees) or "no dimension"
        raise UnreachableError(
            f"{name} cannot cut space into {inside}: layer {tightest.name!r} leaves {sizes} to cut (gather earlier "
            "with --gather-after, or take another number of devices)"
        )
    return [Shape(shape.groups, inside, tuple((d, degree) for d, degree in cut if degree > 1), last) for cut in cuts]


def strategy(graph: LayerGraph, name: str, shape: Shape) -> dict[str, Config]:
    """A configuration for every layer but inputs and sink. Not for `pipeline` and `layerwise`.

    Raises UnreachableError where a layer cannot be cut so after all.
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
    """Cuts inside a group: of weights along `label`, and of what has no weights along the channels that it reads.

    A cut along k leaves channels scattered, as a cut along c does.
    """
    heavy = {layer.name for layer in weighted(graph, label)}
    result: dict[str, tuple[tuple[str, int], ...]] = {}
    for layer in graph.inner:
        if layer.name in heavy:
            result[layer.name] = ((label, inside),)
        elif any(source in result for source in layer.inputs) and layer.space.max_degree("c") >= inside:
            result[layer.name] = (("c", inside),)
    return result
