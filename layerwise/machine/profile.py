"""A profile: the devices and links of a machine, and the device graph for a number of GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from layerwise.errors import LayerwiseError
from layerwise.machine.curves import Links
from layerwise.machine.devices import DeviceGraph, Kind, Level, Processor, device_type, reserved_bytes
from layerwise.machine.layer_times import LayerTimes

MAX_GPUS = 65_536
BACKENDS = ("nccl", "gloo")


@dataclass(frozen=True, slots=True)
class LinkLevel:
    """A level of the link hierarchy as in the file."""

    name: str
    devices: int | None  # in a group; None for the outermost of several levels, whose group is everything
    latency_s: float
    bandwidth_bytes_per_s: float  # of one port, each way
    devices_per_port: int | str  # or the name of an inner level whose whole group shares one port


@dataclass(frozen=True, slots=True)
class Link:
    """A link that no level uses, such as PCIe beside NVLink. Latency in s, bandwidth in bytes/s each way."""

    name: str
    latency_s: float
    bandwidth_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Profile:
    """A machine: its devices and its links."""

    name: str
    description: str
    processor: Processor
    levels: tuple[LinkLevel, ...]  # from the inside out
    # The source of each number, by its path in the file (`levels[1].latency_s`); a dict has no hash.
    sources: Mapping[str, str] = field(hash=False)
    other_links: tuple[Link, ...] = ()  # for closed forms
    layers: tuple[LayerTimes, ...] = ()  # measured, a set for each set of conditions; the latest last
    links: Links | None = field(default=None, hash=False)  # measured
    backend: str = BACKENDS[0]  # of torch.distributed
    kinds: tuple[Processor, ...] = ()  # of unequal devices: the first is `processor`
    kind_of: tuple[int, ...] = ()  # and which of these each device is, in the order of ranks

    @property
    def collectives(self) -> bool:
        """True if regular transfers run as collectives: on NCCL, by the links' measurement if there is one.

        gloo uses messages: see layerwise.run.schedule.redistribute.
        """
        backend = self.backend if self.links is None else self.links.conditions.get("backend", self.backend)
        return backend == "nccl"

    @property
    def gpus_per_node(self) -> int:
        """The default number of devices in a node."""
        devices = self.levels[0].devices
        assert devices is not None
        return devices

    def device_graph(self, gpus: int, gpus_per_node: int | None = None) -> DeviceGraph:
        """The graph of `gpus` devices in nodes of `gpus_per_node` (default: the profile's).

        A single node has the innermost level only; a level exists only if there are several groups inside it. With
        nodes of another size a rack keeps its number of nodes, and a port that serves a level's whole group still does.
        A port that serves a fixed number of devices serves the next larger divisor of a group if that number does not
        divide it, so that no port spans two nodes. Raises LayerwiseError if `gpus` is out of range or does not fill
        whole nodes.
        """
        node = self.gpus_per_node if gpus_per_node is None else gpus_per_node
        self._check(gpus, node)
        levels: list[Level] = []
        sizes: dict[str, int] = {}
        for stated in self.levels:
            size = gpus if stated.devices is None else min(gpus, stated.devices // self.gpus_per_node * node)
            sizes[stated.name] = size
            owner = levels[-1].devices if levels else size  # a port belongs to a full group of the level inside
            shared = stated.devices_per_port
            sharing = sizes[shared] if isinstance(shared, str) else _divisor_from(shared, owner)
            levels.append(Level(stated.name, size, stated.latency_s, 1 / stated.bandwidth_bytes_per_s, sharing))
            if size == gpus:
                break
        kinds, kind_of = self._kinds(gpus)
        layers = kinds[0].layers if kinds else self.layers
        of = self.name, gpus, self.processor, tuple(levels), self.links, layers, self.collectives
        return DeviceGraph(*of, kinds if len(kinds) > 1 else (), kind_of if len(kinds) > 1 else ())

    def check_equal(self, what: str) -> None:
        """Raises LayerwiseError if the devices are of several kinds."""
        if self.kinds:
            raise LayerwiseError(f"{what} takes equal devices, but profile {self.name} has several kinds: name one")

    def _kinds(self, gpus: int) -> tuple[tuple[Kind, ...], tuple[int, ...]]:
        """The kinds of the first devices, and the kind of each; LayerwiseError where there are not so many."""
        if self.kinds and gpus > len(self.kind_of):
            said = ", ".join(f"{self.kind_of.count(i)} × {kind.name}" for i, kind in enumerate(self.kinds))
            raise LayerwiseError(
                f"profile {self.name} has {len(self.kind_of)} devices ({said}), and {gpus} are asked for"
            )
        found = tuple(
            Kind(
                processor,
                tuple(times for times in self.layers if times.conditions.device == processor.name),
                processor.memory_bytes - reserved_bytes(processor.memory_bytes, device_type(processor, self.layers)),
            )
            for processor in self.kinds[: max(self.kind_of[:gpus], default=-1) + 1]
        )
        return found, self.kind_of[:gpus]

    def _check(self, gpus: int, node: int) -> None:
        if not 1 <= gpus <= MAX_GPUS:
            raise LayerwiseError(f"the number of GPUs is {gpus:,}, but must be 1 to {MAX_GPUS:,}")
        if node < 1:
            raise LayerwiseError(f"the number of GPUs per node is {node}, but must be at least 1")
        if gpus > node and gpus % node:
            below = gpus - gpus % node
            raise LayerwiseError(
                f"{gpus} GPUs do not fill nodes of {node}: use {below} or {below + node} GPUs, or a number of GPUs per "
                f"node that divides {gpus}"
            )
        if gpus > node and len(self.levels) == 1:
            raise LayerwiseError(
                f"profile {self.name} describes a single node of {node} GPUs, fewer than {gpus}: use fewer GPUs, or "
                "describe the links between nodes, for example --link 200Gb/s"
            )


def _divisor_from(least: int, number: int) -> int:
    """Returns the smallest divisor of `number` that is at least `least`, or `number` itself."""
    return next((d for d in range(least, number) if number % d == 0), number)
