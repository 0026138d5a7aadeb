"""Setting: what is priced: a network on a machine under options."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from layerwise.arguments import checked
from layerwise.config import Config
from layerwise.cost.collectives import SyncMethod
from layerwise.cost.compute.measured import Measurements, gradient_uses, latest
from layerwise.cost.compute.roofline import OPTIMIZERS
from layerwise.errors import LayerwiseError
from layerwise.graph.layer import Layer
from layerwise.graph.layer_graph import LayerGraph
from layerwise.graph.mixed import mixed
from layerwise.graph.types import autocast_within
from layerwise.machine import AUTOCAST, DeviceGraph, precision
from layerwise.ops.base import Role
from layerwise.partition.edge import Edge
from layerwise.partition.layout import Layout, layout
from layerwise.partition.place import data_parallel, input_maps
from layerwise.program import StepKind
from layerwise.quantities import samples

T = TypeVar("T")
EdgeName = tuple[str, str, int]  # an edge of the graph: producer, consumer, input slot
Strategy = Mapping[str, Config]
Configs = Mapping[str, tuple[Config, ...]]
Progress = Callable[[int, int], None]  # done, of
NO_LATENCY_S = 1e-12  # a message's latency; not 0, as formulas divide by it
MANY = 16  # configurations in tuples longer than this are looked up by id, as hashing is slow


@checked
@dataclass(frozen=True, slots=True)
class CostOptions:
    """The assumptions of the cost model.

    Attributes:
        link_model: The busiest port, with latencies ("port"). Two readings of Jia et al., without latencies: all bytes
            over the bandwidth ("sum"), or a connection of each device's own at each level, all of which work at their
            own bandwidth at the same time ("connection").
        sync: How gradients are summed: "all-reduce", or Jia's "parameter-server", whose port is serial unless links
            are connections.
        io: What a device is fed and returns: its own samples, the whole batch ("free"), or its boxes. Only
            transfers to and from samples are counted. "auto": samples where there is one for each device, else boxes
            where the network allows it, else "free" (`Setting.feeding` says why).
        optimizer: "sgd", "momentum" or "adam": its update's time and its state's memory.
        dtype: What a step computes in: one of `machine.DTYPES`, also in other spellings.
        local_batch_norm: Whether batch norm uses each device's own samples, as with DistributedDataParallel.
        kind: "training", or "inference": the forward pass alone, with running statistics, in which nothing is saved.

    Examples:
        >>> CostOptions(dtype="bfloat16", optimizer="adam").dtype
        'bf16'
    """

    link_model: Literal["port", "sum", "connection"] = "port"
    sync: Literal["all-reduce", "parameter-server"] = "all-reduce"
    io: Literal["auto", "sample", "free", "boxes"] = "auto"
    optimizer: str = "sgd"
    dtype: str = "float32"
    local_batch_norm: bool = False
    kind: StepKind = "training"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", precision(self.dtype))
        if self.optimizer not in OPTIMIZERS:
            raise LayerwiseError(f"unknown optimizer {self.optimizer!r}: choose {', '.join(OPTIMIZERS)}")

    @property
    def sync_method(self) -> SyncMethod:
        """How gradients are summed, over which links; see `cost.collectives.bucket_s`."""
        if self.sync == "parameter-server" and self.link_model == "connection":
            return "connections to a parameter server"
        return self.sync


@dataclass(frozen=True, slots=True)
class Feeding:
    """The io of a step, and a sentence that explains it if there are fewer samples than devices."""

    io: Literal["sample", "free", "boxes"]
    why: str = ""


def feeding(graph: LayerGraph, devices: int, options: CostOptions) -> Feeding:
    """How devices are fed: as `options` say, or, if they leave it open, by the batch and the network's outputs."""
    if options.io != "auto":
        return Feeding(options.io)
    if graph.batch >= devices:
        return Feeding("sample")
    few = f"since {samples(graph.batch)} {'is' if graph.batch == 1 else 'are'} fewer than {devices} devices"
    outputs = [graph[name] for name in graph.layers[-1].inputs]
    rows = [layer for layer in outputs if layer.name not in graph.losses and layer.out.index("n") is not None]
    # A training step computes its loss from the boxes of one output; with several, or rows per sample, it needs all.
    if options.kind == "training" and (len(rows) > 1 or any(layer.out.shape[0] != graph.batch for layer in rows)):
        several = f"{len(rows)} outputs" if len(rows) > 1 else "an output of several rows a sample"
        why = f"Each device is given the whole batch (io free), {few}, and the loss of {several} is not in the model."
        return Feeding("free", why)
    why = f"Each device is given only the boxes of the inputs that its layers need (io boxes), {few}"
    return Feeding("boxes", f"{why}; --io free gives each the whole batch.")


def connected(devices: DeviceGraph) -> DeviceGraph:
    """The devices, each with its own port at every level; messages have no latency."""
    levels = tuple(replace(level, alpha_s=NO_LATENCY_S, devices_per_port=1) for level in devices.levels)
    return replace(devices, levels=levels, links=None, collectives=False)


@dataclass
class Setting:
    """A network on a device graph, and everything that a term of the cost model may depend on."""

    graph: LayerGraph
    devices: DeviceGraph
    options: CostOptions = field(default_factory=CostOptions)
    # Of unequal devices, the weights by which each feeds its part of a batch's samples. None: as fast as they compute.
    shares: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        # Before what follows changes them: another model of the network is made from these.
        self.original, self.asked = self.graph, self.options
        if self.options.link_model == "connection":
            self.devices = connected(self.devices)
        self.feeding = feeding(self.graph, self.devices.count, self.options)
        self.options = replace(self.options, io=self.feeding.io)
        self.digest = self.graph.digest  # which plans have
        if (types := self.mixed_precision) is not None:
            self.graph = mixed(self.graph, types["autocast"], str(types["device"]))
        self.trained = self.graph  # of which layers were measured
        if self.options.kind == "inference":
            self.graph = self.graph.untrained()
        self.has_gradient = self.graph.has_gradient
        self.uses = gradient_uses(self.trained)
        self._made: dict[object, Any] = {}
        self._layouts: dict[tuple[str, int], tuple[Sequence[Config], Layout]] = {}
        self._kinds: dict[object, int] = {}
        self._kind_of: dict[str, int] = {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """The result of `make`, cached under `key`, which must determine it."""
        if key not in self._made:
            self._made[key] = make()
        found: T = self._made[key]
        return found

    @property
    def measurements(self) -> Measurements | None:
        """The measurements for the step's element type; None if the profile has none."""
        return self.measurements_in(self.options.dtype)

    def measurements_in(self, dtype: str, kind: int = 0) -> Measurements | None:
        """The measurements for layers that compute in one of machine.DTYPES, on devices of a kind."""

        def found() -> Measurements | None:
            device, options = self.devices.each_kind[kind], self.options
            times = latest(device.layers, dtype)
            if times is None:
                return None
            of_step = options.optimizer, options.local_batch_norm, options.kind
            return Measurements(times, device.processor, dtype, *of_step)

        return self.once(("measurements", dtype, kind), found)

    def dtype(self, layer: Layer) -> str:
        """The type that a layer computes in, of machine.DTYPES: the step's, or that of the model's own autocast.

        It is the step's, too, if the profile has no rate for the other.
        """
        wanted, around = self.options.dtype, AUTOCAST.get(self.options.dtype)
        if not layer.autocast or self.graph.dtype != "float32" or wanted == "float64":
            return wanted
        here = autocast_within(layer.autocast, self.devices.device_type, around)
        if here == around:
            return wanted
        name = "float32" if here is None else precision(here)
        return name if all(name in kind.processor.peak_flops for kind in self.devices.each_kind) else wanted

    @property
    def mixed_precision(self) -> dict[str, str | None] | None:
        """The types for `graph.mixed`; None where all is of the model's own type."""
        around = AUTOCAST.get(self.options.dtype) if self.graph.dtype == "float32" else None
        if around is None and not any(layer.autocast for layer in self.graph.layers):
            return None
        return {"autocast": around, "device": self.devices.device_type}

    def kind(self, layer: Layer) -> int:
        """A number for a layer of the graph, equal for layers of equal cost and memory: repeated blocks."""
        found = self._kind_of.get(layer.name)
        if found is None:
            name, graph = layer.name, self.graph
            gradients = self.has_gradient[name], graph.flows_back(layer), layer.trains, self.uses[name]
            key = layer.space, layer.types, gradients, layer.tied, layer.role, self.dtype(layer), name in graph.unfed
            found = self._kind_of[name] = self._kinds.setdefault(key, len(self._kinds))
        return found

    def end_config(self, layer: Layer) -> Config:
        """The only configuration of an input or the sink: samples over all devices that can have one."""
        return data_parallel(layer, self.devices.count, self.shares or ())

    def layout(self, layer: Layer, configs: Sequence[Config]) -> Layout:
        """Cells of the layer's configurations on these devices."""
        if len(configs) <= MANY:
            return self.once(("layout", self.kind(layer), tuple(configs)), lambda: self._layout(layer, configs))
        key = layer.name, id(configs)
        if key not in self._layouts:
            self._layouts[key] = configs, self._layout(layer, configs)  # kept, so that its id stays its own
        return self._layouts[key][1]

    def _layout(self, layer: Layer, configs: Sequence[Config]) -> Layout:
        made = layout(configs, layer.space, self.devices.count)
        return made.everywhere() if layer.name in self.graph.unfed else made

    def directions(self, name: EdgeName) -> int:
        """How often an edge's tensor is transferred: 0 if it is not counted, 1 without a gradient, else 2.

        What every device computes is not transferred either (see `CostModel.edge_costs`).
        """
        source, target = self.graph[name[0]], self.graph[name[1]]
        if source.role is Role.CONSTANT or (self.options.io != "sample" and (source.end or target.end)):
            return 0
        return 2 if self.has_gradient[source.name] and self.has_gradient[target.name] else 1

    def edge(self, name: EdgeName, sources: tuple[Config, ...], targets: tuple[Config, ...]) -> Edge:
        """What a transfer depends on."""
        source, target = self.graph[name[0]], self.graph[name[1]]
        maps, epilogue = input_maps(target, name[2])
        owners, needers = self.layout(source, sources).owned, self.layout(target, targets).at(epilogue)
        return Edge.of(source.out, owners, maps, target.space.dims, needers)
