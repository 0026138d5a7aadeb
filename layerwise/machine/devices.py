"""The device graph: equal devices, and links between them in nested groups (node, rack, cluster)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import overload

import numpy as np

from layerwise.arguments import Count, checked
from layerwise.errors import LayerwiseError
from layerwise.geometry.arrays import Floats, Ints
from layerwise.machine.curves import Links
from layerwise.machine.layer_times import LayerTimes, precision

RESERVED_BYTES, RESERVED_SHARE = 1.5e9, 0.1  # see `reserved_bytes`


def reserved_bytes(memory_bytes: float, device_type: str) -> float:
    """Bytes of a device's memory that plans leave to libraries.

    On GPUs this is for the contexts of CUDA, NCCL and cuDNN, workspaces and the allocator's fragmentation: 1.5 GB, but
    at most a tenth of the memory, which was enough in 24 runs on an H200 (`python -m benchmarks.gpu`, stage memory). On
    CPUs 0.
    """
    return 0.0 if device_type == "cpu" else min(RESERVED_BYTES, RESERVED_SHARE * memory_bytes)


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the link hierarchy.

    A message between two devices belongs to the innermost level that contains both (`DeviceGraph.level_between`). Its
    bytes pass the sender's and the receiver's port of that level, which are full duplex; `DeviceGraph.ports_passed`
    lists the other ports that a message between racks passes.
    """

    name: str
    devices: int  # consecutive devices in a group of this level; of the outermost level, all of them
    alpha_s: float  # of a message
    beta_s_per_byte: float  # of a port
    devices_per_port: int  # 1: each GPU has its own NVLink port or NIC; 4: the four GPUs of a node share one NIC


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile of a matrix product that a kernel library offers."""

    rows: int
    columns: int
    efficiency: float  # fraction of the peak FLOP/s of a device full of such tiles


@dataclass(frozen=True, slots=True)
class Processor:
    """One device as the analytic roofline sees it."""

    name: str
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    # FLOP/s by dtype; a multiply-add counts as two. A dict has no hash; the other fields tell devices apart.
    peak_flops: Mapping[str, float] = field(hash=False)
    processors: int  # SMs or cores, over which tiles are spread in waves
    tiles: tuple[Tile, ...]
    kernel_floor_s: float  # the shortest time of any kernel

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s for `dtype`. Raises LayerwiseError if the profile has none (a P100 has no bf16)."""
        dtype = precision(dtype)
        if dtype not in self.peak_flops:
            known = ", ".join(self.peak_flops)
            raise LayerwiseError(f"device {self.name}: its profile has no peak for dtype {dtype!r}; it has {known}")
        return self.peak_flops[dtype]


def device_type(processor: Processor, layers: Sequence[LayerTimes]) -> str:
    """`cpu` or `cuda`, as PyTorch calls them."""
    by_threads = any(times.conditions.threads for times in layers)  # measured on a CPU
    return "cpu" if by_threads or "cpu" in processor.name.lower() else "cuda"


@dataclass(frozen=True, slots=True)
class Kind:
    """Devices of one kind, where there are several."""

    processor: Processor
    layers: tuple[LayerTimes, ...] = field(default=(), hash=False)  # measured
    usable_bytes: float = 0.0  # that a plan may take of its memory


@checked
@dataclass(frozen=True, slots=True)
class DeviceGraph:
    """Devices, numbered so that every group of every level is a run of consecutive numbers.

    Each level's size is a multiple of the one inside it, but the last group may be smaller: 256 GPUs in racks of 136
    are a rack of 136 and one of 120. Nothing here is N×N: the graph of 65,536 devices is as small as that of two.

    Attributes:
        name: The machine's name.
        count: The number of devices.
        processor: One device as the analytic roofline sees it.
        levels: The levels of links, from the inside out: first the node, last the level with all devices.
        links: Measured times of messages and collectives.
        layers: Measured times of layers.
        collectives: Whether regular transfers run as collectives (NCCL) or as messages (gloo).
        kinds: The kinds of unequal devices; `processor` and `layers` are the first kind's. (): all devices are equal.
        kind_of: Each device's index in `kinds`.

    Examples:
        >>> import layerwise
        >>> layerwise.load_profile("p100").device_graph(16, gpus_per_node=4).devices_per_node
        4
    """

    name: str
    count: Count
    processor: Processor
    levels: tuple[Level, ...]  # from the inside out: first the node, last the level with all devices
    links: Links | None = field(default=None, hash=False)  # measured; slow to hash
    layers: tuple[LayerTimes, ...] = field(default=(), hash=False)  # measured
    collectives: bool = False  # regular transfers run as collectives (NCCL), else as messages (gloo)
    kinds: tuple[Kind, ...] = ()
    kind_of: tuple[int, ...] = ()

    def __hash__(self) -> int:
        return hash((self.name, self.count))  # fast, as it is called often

    def __post_init__(self) -> None:
        sizes = [level.devices for level in self.levels]
        assert sizes[-1] == self.count, f"the outermost of {sizes} must hold all {self.count} devices"
        assert all(outer % inner == 0 for inner, outer in pairwise(sizes[:-1])), f"{sizes} do not nest"
        assert self.count % sizes[0] == 0, f"{self.count} devices do not fill nodes of {sizes[0]}"
        assert not self.kinds or len(self.kind_of) == self.count, "each device is of a kind"

    @property
    def each_kind(self) -> tuple[Kind, ...]:
        """The kinds; of equal devices, the only one."""
        return self.kinds or (Kind(self.processor, self.layers),)

    @property
    def device_type(self) -> str:
        """`cpu` or `cuda`, as PyTorch calls them."""
        return device_type(self.processor, self.layers)

    @property
    def usable_bytes(self) -> float:
        """Default bytes of a device's memory that a plan may use."""
        return self.processor.memory_bytes - reserved_bytes(self.processor.memory_bytes, self.device_type)

    @property
    def names(self) -> str:
        """`8 × Tesla P100`; of unequal devices each kind."""
        counts = [self.kind_of.count(i) for i in range(len(self.kinds))] or [self.count]
        kinds = zip(counts, self.each_kind, strict=True)
        return " and ".join(f"{count} × {kind.processor.name}" for count, kind in kinds)

    @property
    def memory_scale(self) -> Floats | float:
        """(N,) by which bytes of each device count as many of the first one's; 1 of equal devices."""
        if not self.kinds:
            return 1.0
        usable = np.array([kind.usable_bytes for kind in self.kinds])
        scale: Floats = (usable[0] / usable)[list(self.kind_of)]
        return scale

    @property
    def devices_per_node(self) -> int:
        """Devices in one group of the innermost level."""
        return self.levels[0].devices

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.count // self.devices_per_node

    def group(self, level: int) -> Ints:
        """(count,) group index of each device at `levels[level]`."""
        return np.arange(self.count, dtype=np.int64) // self.levels[level].devices

    def port(self, level: int) -> Ints:
        """(count,) index of the port through which each device reaches `levels[level]`."""
        return np.arange(self.count, dtype=np.int64) // self.levels[level].devices_per_port

    @overload
    def level_between(self, p: int, q: int) -> int: ...
    @overload
    def level_between(self, p: Ints, q: Ints) -> Ints: ...
    def level_between(self, p: int | Ints, q: int | Ints) -> int | Ints:
        """The index of the innermost level that contains devices p and q; arrays broadcast. 0 for p
        = q (no message).
        """
        # Groups nest, so the levels that separate p from q are the innermost ones, and their number is the next level.
        separating = [p // level.devices != q // level.devices for level in self.levels[:-1]]
        if isinstance(p, np.ndarray) or isinstance(q, np.ndarray):
            shape = np.broadcast_shapes(np.shape(p), np.shape(q))
            return np.asarray(sum(separating, start=np.zeros(shape, dtype=np.int64)))
        return int(sum(separating))

    def ports_passed(self, level: int) -> range:
        """Levels whose ports a message of `levels[level]` passes at either end, from the inside out.

        Inside a node that is the node's port. Otherwise a message leaves through its NIC (level 1) and every uplink
        between that and its own level (the rack's at level 2), but not through the node's inner links. With one or two
        levels this is just `level`.
        """
        return range(min(level, 1), level + 1)

    def device_name(self, device: int) -> str:
        """`node3/gpu1` for device 13 with 4 devices a node."""
        assert 0 <= device < self.count, (device, self.count)
        return f"node{device // self.devices_per_node}/gpu{device % self.devices_per_node}"
