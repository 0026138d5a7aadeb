"""The paper's strategies as ordinary strategies: a configuration for every layer, which search prices and `run` runs.

Placement is the paper's: data parallelism across nodes, the other dimension inside. Cells are laid out with samples
outermost, so p1 groups of p2 devices are p1 runs of neighbours. Where the paper computes redundantly on every device
of a group (all that follows a spatial strategy's gather, channel's first layer), ours computes on the group's first
device: the same time, and a gradient that nobody has to exchange.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from layerwise.config import Config, why_illegal
from layerwise.errors import LayerwiseError, nearest
from layerwise.graph.layer import Layer
from layerwise.graph.layer_graph import LayerGraph
from layerwise.search.baselines import ProcessGrid, grid_configs, grids, mlp_layers

SPATIAL = ("d", "h", "w", "l")
CUT = {"filter": "c", "channel": "k", "df": "c"}  # the dimension that a strategy's groups cut
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


def weighted(graph: LayerGraph) -> list[Layer]:
    """Convolutions, linear layers and what else multiplies by a matrix of weights."""
    mains = ((layer, layer.stages[0].space.parameters) for layer in graph.inner)
    return [layer for layer, parameters in mains if any(len(p.shape) > 1 and p.trainable for p in parameters)]


def is_mlp(graph: LayerGraph) -> bool:
    """True if process grids mean anything for a network."""
    try:
        return bool(mlp_layers(graph))
    except LayerwiseError:
        return False


def positions(layer: Layer, dims: Sequence[str] = SPATIAL) -> int:
    """W·H·D: into how many devices' shares a layer's output can be cut in space."""
    return prod(layer.space.max_degree(label) for label in dims)


def gather_layer(graph: LayerGraph, node: int, wanted: str | None = None) -> str | None:
    """The last layer that a spatial strategy cuts; None: there is none.

    By default the last one before the positions fall below the devices of a node (in ResNet and VGG the end of the
    convolutions, as in the paper).
    """
    inner = graph.inner
    if wanted is not None:
        if wanted not in {layer.name for layer in inner}:
            raise LayerwiseError(
                f"--gather-after {wanted!r}: the model has no such layer{nearest(wanted, [y.name for y in inner])}"
            )
        return wanted
    last = None
    for layer in inner:
        if 1 < positions(layer) < node:
            break
        if positions(layer) >= max(node, 2):
            last = layer.name
    return last


def spatial_layers(graph: LayerGraph, last: str) -> list[Layer]:
    """The layers with positions, up to `last`."""
    layers = []
    for layer in graph.inner:
        if positions(layer) > 1:
            layers.append(layer)
        if layer.name == last:
            break
    return layers


def limit(graph: LayerGraph, name: str, node: int, wishes: Wishes | None = None) -> Limit:
    """The largest p of table 3, and what limits it."""
    wishes = wishes or Wishes()
    batch = Limit(graph.batch, f"the batch of {graph.batch:,} samples")
    if name == "serial":
        return Limit(1, "definition")
    if name == "pipeline":
        count = len(graph.inner)
        return Limit(count, f"the model's {count} layers")
    if name in ("data", "layerwise"):
        return batch if name == "data" else Limit(2**16, "nothing but the machine")
    if name == "grid":
        widest = max(layer.out.shape[-1] for layer in mlp_layers(graph))
        return Limit(graph.batch * widest, f"{batch.by}, times {widest:,} outputs of the widest layer")
    inside = _inside_limit(graph, name, node, wishes)
    if name in HYBRID:
        return Limit(graph.batch * inside.devices, f"{batch.by}, times {inside.devices} of {inside.by}")
    return inside


def _inside_limit(graph: LayerGraph, name: str, node: int, wishes: Wishes) -> Limit:
    if name in ("spatial", "ds"):
        last = gather_layer(graph, node, wishes.gather_after)
        layers = spatial_layers(graph, last) if last else []
        if not layers:
            return Limit(1, "no layer has positions to cut")
        least = min(layers, key=lambda layer: positions(layer, wishes.dims))
        degrees = [least.space.max_degree(d) for d in wishes.dims]
        sizes = " × ".join(str(most) for most in degrees if most > 1) or "1"
        return Limit(positions(least, wishes.dims), f"layer {least.name!r} with {sizes} positions")
    label = CUT[name]
    layers = weighted(graph)[1:] if label == "k" else weighted(graph)
    if not layers:
        return Limit(1, "no layer has weights to cut")
    least = min(layers, key=lambda layer: layer.space.max_degree(label))
    most, kind = least.space.max_degree(label), "input channels" if label == "k" else "output channels"
    return Limit(most, f"layer {least.name!r} with {most} {kind}")


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
    inside = devices
    if name in HYBRID:
        inside = _group_size(graph, name, devices, node, wishes)
    if name in ("spatial", "ds"):
        return _spatial_shapes(graph, name, devices, inside, node, wishes)
    return [Shape(devices // inside, inside)]


def _group_size(graph: LayerGraph, name: str, devices: int, node: int, wishes: Wishes) -> int:
    """Devices a group: as many as a node has, or the next smaller number that goes."""
    most = _inside_limit(graph, name, node, wishes)
    if wishes.inside is not None:
        if devices % wishes.inside:
            raise UnreachableError(f"{name}: {devices} devices are no whole number of groups of {wishes.inside}")
        if wishes.inside > most.devices:
            raise UnreachableError(
                f"{name} cannot have groups of {wishes.inside} devices: at most {most.devices}, by {most.by}"
            )
        sizes = [wishes.inside]
    else:
        sizes = [g for g in range(2, min(node, most.devices, devices // 2) + 1) if devices % g == 0]
    sizes = [g for g in sizes if devices // g <= graph.batch]
    if not sizes:
        raise UnreachableError(
            f"{name} needs groups inside a node, at least two groups of two devices each and a sample for each group: "
            f"{devices} device{'s' * (devices > 1)} in nodes of {node} with {graph.batch} samples have no such "
            "division (--group-size sets another)"
        )
    return sizes[-1]


def _spatial_shapes(graph: LayerGraph, name: str, devices: int, inside: int, node: int, wishes: Wishes) -> list[Shape]:
    last = gather_layer(graph, node, wishes.gather_after)
    if inside == 1:
        return [Shape(devices, 1, (), last)]
    assert last is not None  # else the limit is 1
    layers = spatial_layers(graph, last)
    degrees = {label: min(layer.space.max_degree(label) for layer in layers) for label in wishes.dims}
    degrees = {label: most for label, most in degrees.items() if most > 1}
    grids = [grid for grid in _grids(inside, list(degrees)) if all(degree <= degrees[d] for d, degree in grid)]
    if not grids:
        least = min(layers, key=lambda layer: positions(layer, wishes.dims))
        sizes = " × ".join(f"{d}={most}" for d, most in degrees.items()) or "no dimension"
        raise UnreachableError(
            f"{name} cannot cut space into {inside}: layer {least.name!r} leaves {sizes} to cut (gather earlier with "
            "--gather-after, or take another number of devices)"
        )
    return [Shape(devices // inside, inside, grid, last) for grid in grids]


def _grids(total: int, labels: list[str]) -> Iterator[tuple[tuple[str, int], ...]]:
    """All ways to write `total` as a product of degrees of these dimensions."""
    if not labels:
        if total == 1:
            yield ()
        return
    for degree in range(1, total + 1):
        if total % degree == 0:
            for rest in _grids(total // degree, labels[1:]):
                yield ((labels[0], degree), *rest) if degree > 1 else rest


def strategy(graph: LayerGraph, name: str, shape: Shape) -> dict[str, Config]:
    """A configuration for every layer but inputs and sink. Not for `pipeline` and `layerwise`.

    Raises UnreachableError where a layer cannot be cut so after all.
    """
    if name == "grid":
        return grid_configs(graph, ProcessGrid(shape.groups, shape.inside))
    spatial: set[str] = set()
    if shape.gather_after is not None and shape.grid:
        spatial = {layer.name for layer in spatial_layers(graph, shape.gather_after)}
    cut = _cuts(graph, CUT[name], shape.inside) if name in CUT and shape.inside > 1 else {}
    result: dict[str, Config] = {}
    for layer in graph.inner:
        inside = shape.grid if layer.name in spatial else cut.get(layer.name, ())
        degrees = dict(inside) | ({"n": shape.groups} if layer.space.max_degree("n") > 1 else {})
        config = Config.of(degrees)
        if reason := why_illegal(config, layer.space.dims):
            raise UnreachableError(f"{name} cannot use {shape.devices} devices: layer {layer.name!r} {reason}")
        if 1 < config.total < shape.devices:  # the first device of each group
            config = Config(config.degrees, "strided")
        result[layer.name] = config
    return result


def _cuts(graph: LayerGraph, label: str, inside: int) -> dict[str, tuple[tuple[str, int], ...]]:
    """Cuts inside a group: of weights along `label`, and of what has no weights along the channels that it reads.

    A cut along k leaves channels scattered, as a cut along c does. The channel strategy starts at the second layer.
    """
    heavy = [layer.name for layer in weighted(graph)]
    heavy = heavy[1:] if label == "k" else heavy
    result: dict[str, tuple[tuple[str, int], ...]] = {}
    for layer in graph.inner:
        if layer.name in heavy:
            result[layer.name] = ((label, inside),)
        elif any(source in result for source in layer.inputs) and layer.space.max_degree("c") >= inside:
            result[layer.name] = (("c", inside),)
    return result
