"""Facts: what the closed forms need to know of a network, read off its layer graph, and its times on one device."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import numpy as np

from layerwise.config import Config
from layerwise.cost.compute.roofline import OPTIMIZERS
from layerwise.cost.model import CostModel, CostOptions
from layerwise.errors import LayerwiseError
from layerwise.geometry import AxisMap
from layerwise.graph.layer import Layer
from layerwise.graph.layer_graph import LayerGraph
from layerwise.machine import AUTOCAST, Profile
from layerwise.machine.profile import Link
from layerwise.ops.nn.conv import Conv, ConvTranspose
from layerwise.ops.nn.linear import Linear
from layerwise.ops.nn.pool import Pool
from layerwise.oracle.strategies import SPATIAL


@dataclass(frozen=True, slots=True)
class Window:
    """A spatial dimension of a layer that slides a window."""

    label: str
    extent: int  # of the input
    out: int  # extent of the output
    kernel: int  # K of the published halo, floor(K/2) a side
    low: int  # elements that an interior cell really needs from the neighbour below
    high: int  # and from the one above


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """One layer. Items are elements a sample; times are s a sample, of one device, at the facts' batch."""

    name: str
    weighted: bool  # a convolution or a linear layer: what filter and channel parallelism split
    inputs: int  # |x|, items of all inputs
    outputs: int  # |y|
    weights: int  # |w|, trainable
    biases: int  # |bi|, trainable
    filters: int  # F: into how many parts the output channels can be cut; 0: none
    channels: int  # C: the input channels that are summed over; 0: none
    gathered: tuple[int, ...]  # items of each input that a split of the output channels needs whole of a split layer
    places: tuple[tuple[str, int], ...]  # output extents of the spatial dimensions that can be split
    windows: tuple[Window, ...]  # those of these that slide windows
    in_channels: int  # of the tensors, for halos
    out_channels: int
    fed: bool  # its input is the network's: no halo backward
    forward_s: float
    backward_s: float

    @property
    def compute_s(self) -> float:
        """FW + BW of one sample."""
        return self.forward_s + self.backward_s

    @property
    def parameters(self) -> int:
        """All trainable items."""
        return self.weights + self.biases


@dataclass(frozen=True, eq=False)
class Facts:
    """A network on one device."""

    graph: LayerGraph  # at the batch that the times were taken at
    profile: Profile
    layers: tuple[LayerFacts, ...]
    scale: float  # that the cost model's times of all layers are multiplied by, to add up to a measured time
    options: CostOptions
    _models: dict[tuple[int, int, int | None], CostModel] = field(default_factory=dict, repr=False)

    @property
    def batch(self) -> int:
        return self.graph.batch

    @property
    def item_bytes(self) -> int:
        """delta of parameters and their gradients: bytes an item."""
        return self.graph.layers[0].out.item_bytes

    @property
    def activation_bytes(self) -> int:
        """delta of activations and their gradients: in mixed precision that of 16 bits."""
        mixed = self.options.dtype in AUTOCAST and self.graph.dtype == "float32"
        return 2 if mixed else self.item_bytes

    @property
    def weights(self) -> int:
        """W = sum |w|."""
        return sum(layer.weights for layer in self.layers)

    @property
    def parameters(self) -> int:
        """Trainable items, biases included: what the runtime synchronises."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def compute_s(self) -> float:
        """FW + BW of one sample, all layers."""
        return sum(layer.compute_s for layer in self.layers)

    def weighted(self) -> tuple[LayerFacts, ...]:
        """The convolutions and linear layers, in order."""
        return tuple(layer for layer in self.layers if layer.weighted)

    def model(self, devices: int, batch: int, gpus_per_node: int | None = None) -> CostModel:
        """The cost model of so many devices that train `batch` samples a step."""
        key = (devices, batch, gpus_per_node)
        if key not in self._models:
            graph = self.graph.rebatch(batch)
            self._models[key] = CostModel(graph, self.profile.device_graph(devices, gpus_per_node), self.options)
        return self._models[key]

    @property
    def mpi_link(self) -> Link | None:
        """The profile's link of halos and spatial gathers, which go through MPI and the host; None: it has none."""
        return next((link for link in self.profile.other_links if link.name == "pcie"), None)

    def update_s(self, items: float) -> float:
        """Seconds to update `items` parameters: the optimizer reads parameter, gradient, state; writes all but one."""
        moved = items * self.item_bytes * (3 + 2 * OPTIMIZERS[self.options.optimizer])
        return moved / self.profile.processor.memory_bandwidth_bytes_per_s


def facts_of(
    graph: LayerGraph,
    profile: Profile,
    *,
    seconds_per_sample: float | None = None,
    options: CostOptions | None = None,
) -> Facts:
    """The facts of a graph at its own batch; fused, but where a framework is modelled that fuses nothing.

    Times are the cost model's, spread so that they add up to `seconds_per_sample` (a whole network's measured forward
    and backward) where given. Raises LayerwiseError where that is not above 0.
    """
    if seconds_per_sample is not None and not seconds_per_sample > 0:
        raise LayerwiseError(f"the time of one sample must be above 0 s, not {seconds_per_sample}")
    options = options or CostOptions(io="free")
    bare = Facts(graph, profile, (), 1.0, options)
    model, batch = bare.model(1, graph.batch), graph.batch
    graph = model.graph
    computed = {layer.name: model.node_cost(layer, (Config(),)).compute for layer in graph.inner}
    times = {name: (float(t.forward[0]) / batch, float(t.backward[0]) / batch) for name, t in computed.items()}
    total, scale = sum(forward + backward for forward, backward in times.values()), 1.0
    if seconds_per_sample is not None:
        scale = seconds_per_sample / total
        times = {name: (scale * forward, scale * backward) for name, (forward, backward) in times.items()}
    layers = tuple(_layer(graph, layer, *times[layer.name]) for layer in graph.inner)
    return Facts(graph, profile, layers, scale, options, bare._models)


def _layer(graph: LayerGraph, layer: Layer, forward_s: float, backward_s: float) -> LayerFacts:
    batch = graph.batch
    main, specs = layer.main, layer.stages[0].specs
    trainable = [(p.name, prod(p.shape)) for _, p in layer.own_parameters() if p.trainable]
    biases = sum(size for name, size in trainable if name.rpartition(".")[2] == "bias")
    weighted = isinstance(main, Conv | ConvTranspose | Linear)
    degrees = {d.label: d.max_degree for d in layer.space.dims if d.label}
    x, out = specs[0] if specs else None, layer.out
    channel = (None if x is None else x.index("c"), out.index("c"))
    return LayerFacts(
        name=layer.name,
        weighted=weighted,
        inputs=sum(spec.volume for spec in layer.specs) // batch,
        outputs=out.volume // batch,
        weights=sum(size for _, size in trainable) - biases,
        biases=biases,
        filters=degrees.get("c", 0) if weighted else 0,
        channels=degrees.get("k", 0) if weighted else 0,
        gathered=tuple(_gathered(graph, layer)),
        places=tuple((label, degrees[label]) for label in SPATIAL if label in degrees),
        windows=_windows(layer) if isinstance(main, Conv | ConvTranspose | Pool) else (),
        in_channels=1 if x is None or channel[0] is None else x.shape[channel[0]],
        out_channels=1 if channel[1] is None else out.shape[channel[1]],
        fed=bool(layer.inputs) and graph[layer.inputs[0]].end,
        forward_s=forward_s,
        backward_s=backward_s,
    )


def _gathered(graph: LayerGraph, layer: Layer) -> list[int]:
    """Items a sample of the inputs of which a cell of output channels needs all channels (tied parameters aside)."""
    own, items = layer.space.index("c"), []
    for source, spec, maps in zip(layer.inputs, layer.specs, layer.space.needs, strict=False):
        channel = graph[source].space.index("c")
        if not graph[source].end and channel is not None and (own is None or maps[channel].source != own):
            items.append(spec.volume // graph.batch)
    return items


def _windows(layer: Layer) -> tuple[Window, ...]:
    """The spatial dimensions in which an interior cell needs more of its input than lies under it."""
    main = layer.main
    assert isinstance(main, Conv | ConvTranspose | Pool)
    x, space, windows = layer.specs[0], layer.space, []
    for i, kernel in enumerate(main.kernel, start=len(x.shape) - len(main.kernel)):
        label, axis = space.dims[i].label, space.needs[0][i]
        if label in SPATIAL and axis.source == i:
            low, high = _reach(axis, space.dims[i].extent, x.shape[i])
            windows.append(Window(str(label), x.shape[i], space.dims[i].extent, kernel, low, high))
    return tuple(windows)


def _reach(axis: AxisMap, out: int, extent: int) -> tuple[int, int]:
    """How far past the cut in its middle the two halves of a dimension reach: upper half below it, lower half above."""
    cut = out // 2
    if cut == 0:
        return 0, 0
    above, own = np.array([cut]), cut * extent // out
    start, stop = axis(above, above + 1)[0], axis(above - 1, above)[1]
    return max(0, own - int(start[0])), max(0, int(stop[0]) - own)
