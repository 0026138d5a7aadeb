"""Times of links: exchanges and collectives as the runtime issues them, as curves of few lines; these in a profile."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import inf, prod
from statistics import median

import numpy as np
import torch
from torch import Tensor

from layerwise.comm.base import Comm, Group, Handle, TrafficKind
from layerwise.errors import LayerwiseError
from layerwise.geometry.arrays import Floats
from layerwise.machine import LinkLevel, Profile
from layerwise.machine.curves import Curve, Links, Operation, Overlap
from layerwise.measure.beside import BESIDE, BESIDE_S, BRIEF_S, COUNTED, Start, overlap
from layerwise.measure.timing import ROUND_S, ROUNDS, Do, Time, timed
from layerwise.measure.topology import RankGroups, Topology, pairs, shapes
from layerwise.partition.buckets import BUCKET_BYTES

TOLERANCE = 0.05  # of the time: what a line may miss a point by
Point = tuple[float, float]  # bytes, seconds


def knots(points: Sequence[Point]) -> tuple[Point, ...]:
    """The fewest of these points that lines can be drawn through so that none is off by more than `TOLERANCE`.

    Points by size, at least two. Times that fall as sizes grow are noise: they are raised to the one before.
    """
    sizes, seconds = np.array(points).T
    seconds = np.maximum.accumulate(seconds)
    best: list[tuple[int, float, int]] = [(0, 0.0, -1)]  # lines up to a point, how far they are off, the point before
    for end in range(1, len(sizes)):
        choices = []
        for start in range(end):
            off = _off(sizes[start : end + 1], seconds[start : end + 1])
            if off <= TOLERANCE or start == end - 1:
                choices.append((best[start][0] + 1, best[start][1] + off, start))
        best.append(min(choices))
    chosen, last = [len(sizes) - 1], len(sizes) - 1
    while last > 0:
        last = best[last][2]
        chosen.insert(0, last)
    return tuple((float(sizes[i]), float(seconds[i])) for i in chosen)


def _off(sizes: Floats, seconds: Floats) -> float:
    """The largest relative distance of points from the line between the first and the last."""
    line = np.interp(sizes, sizes[[0, -1]], seconds[[0, -1]])
    return float((np.abs(line - seconds) / seconds).max())


SIZES: tuple[int, ...] = tuple(1024 * 4**i for i in range(9))  # bytes: 1 KiB to 64 MiB
COLLECTIVES: tuple[Operation, ...] = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
CURVES = 0.65  # of the time is for curves, the rest for what operations and computation cost each other
LONGEST = 0.25  # of a curve's time is what its longest operation takes at most
CHUNK = 256  # elements that lie together in what the runtime cuts out of tensors: about a row of an image's channels
Progress = Callable[[int, int], None]  # done, of


@dataclass(frozen=True, slots=True)
class Series:
    """The measurements of one curve."""

    curve: Curve
    points: tuple[Point, ...]
    spread: float  # the noisiest point's


@dataclass(frozen=True, slots=True)
class Measured:
    """All curves with their points, and what computation and all-reduces cost each other."""

    series: tuple[Series, ...]
    overlaps: tuple[Overlap, ...]

    def links(self, conditions: dict[str, object]) -> Links:
        """Returns what a profile keeps of it."""
        spread = round(median(s.spread for s in self.series), 3)
        return Links(tuple(s.curve for s in self.series), self.overlaps, {**conditions, "spread": spread})


def measure_links(comm: Comm, where: Topology, budget_s: float, progress: Progress | None = None) -> Measured:
    """Measures everything in about `budget_s`. Every rank calls this, and all get the same result.

    Sizes go up until the next one would take too long for the budget; larger ones follow the last line. With little
    time every other size is left out, and overlaps are measured of the largest groups first, until it is over.
    A step's messages are priced as going both ways at once, by `exchange`; those of a pipeline by `message`.
    """
    began = time.monotonic()
    kinds = pairs(where)
    groups = shapes(where)
    for kind in ("statistics", "sync", "gathers"):
        comm.prepare({group for shape in groups for group in shape.groups}, kind)
    plan: list[tuple[Operation, RankGroups]] = [(name, shape) for shape in kinds for name in ("message", "exchange")]
    plan += [(name, shape) for shape in groups for name in COLLECTIVES]
    curve_s = CURVES * budget_s / len(plan)
    series: list[tuple[Series, RankGroups]] = []
    for number, (operation, shape) in enumerate(plan):
        if progress:
            progress(number, len(plan))
        series.append((_curve(comm, operation, shape, curve_s), shape))
    overlaps: list[Overlap] = []
    names = BESIDE[comm.device.type]
    beside = [(s, shape) for s, shape in series if s.curve.operation in names]
    beside.sort(key=lambda row: (names.index(row[0].curve.operation), -prod(row[0].curve.fan)))
    for s, shape in beside:
        if overlaps and max(comm.all_gather_object(time.monotonic() - began)) > budget_s:
            break
        overlaps.append(measure_overlap(comm, s.curve, shape, brief=_brief(curve_s)))
    return Measured(tuple(_with_further_messages([s for s, _ in series])), tuple(overlaps))


def _brief(curve_s: float) -> bool:
    """Returns whether a curve's time is too short for all sizes, as exactly as can be."""
    return curve_s < len(SIZES) * ROUNDS * ROUND_S


def measure_overlap(comm: Comm, curve: Curve, shape: RankGroups, rounds: int = ROUNDS, brief: bool = False) -> Overlap:
    """The overlap of the operation that a curve is of. Every rank calls this. brief: of a smaller one, less often."""
    group = shape.of(comm.rank)
    size = beside_bytes(comm, curve, BRIEF_S if brief else BESIDE_S)
    start = group and begun(comm, curve.operation, group, size)
    return overlap(comm, shape, curve.operation, start or None, min(rounds, COUNTED) if brief else rounds)


def _curve(comm: Comm, operation: Operation, shape: RankGroups, curve_s: float) -> Series:
    points: list[Point] = []
    spread = seconds = 0.0
    sizes = SIZES[::2] if _brief(curve_s) else SIZES
    for size in sizes:
        carried = float(size * carried_by(operation, shape))
        if len(points) > 2 and seconds * carried / points[-1][0] > LONGEST * curve_s:
            break
        taken = operation_time(comm, operation, shape, carried, budget_s=curve_s / len(sizes))
        seconds = taken.seconds
        points.append((carried, seconds))
        spread = max(spread, taken.spread)
    return Series(Curve(operation, shape.fan, shape.load, knots(points)), tuple(points), spread)


def carried_by(operation: Operation, shape: RankGroups) -> int:
    """Buffers whose bytes count: of messages all that share a port."""
    return shape.load if operation in ("message", "exchange") else 1


def operation_time(
    comm: Comm, operation: Operation, shape: RankGroups, size: float, rounds: int = ROUNDS, budget_s: float = inf
) -> Time:
    """The slowest rank's time of an operation; `size` as in `Curve`. Every rank calls this."""
    group, each = shape.of(comm.rank), round(size / carried_by(operation, shape))
    taken = timed(comm, None if group is None else prepared(comm, operation, group, each), rounds, budget_s)
    return replace(taken, seconds=taken.seconds / 2) if operation == "message" else taken  # there and back


def prepared(comm: Comm, operation: Operation, group: Group, size: int) -> Do:
    """The operation on buffers of `size` bytes, to be called as often as one likes. `message`: there and back.

    What the runtime copies around its messages is part of it: pieces cut out of a tensor, and put into another.
    """
    if operation in ("message", "exchange"):
        index = group.index(comm.rank)
        return _messages(comm, group[1 - index], index, size // 4, both=operation == "exchange")
    start = begun(comm, operation, group, size, "statistics")
    return lambda: start().wait()


# The streams that operations have beside computation.
STREAMS: dict[Operation, TrafficKind] = {"all_reduce": "sync", "reduce_scatter": "sync", "all_gather": "gathers"}


def begun(comm: Comm, operation: Operation, group: Group, size: int, kind: TrafficKind | None = None) -> Start:
    """A function that starts an operation on buffers of `size` bytes, in the stream of a kind."""
    kind = kind or STREAMS.get(operation, "transfers")
    count, members, what = size // 4, len(group), f"measuring {operation}"
    full = torch.ones(count, device=comm.device)
    shards = torch.ones((members, count // members or 1), device=comm.device)
    into = torch.empty_like(shards)

    def start() -> Handle:
        if operation == "exchange":
            peer = group[1 - group.index(comm.rank)]
            return comm.exchange([(peer, full)], [(peer, into.view(-1))], kind, what)
        if operation == "all_reduce":
            return comm.all_reduce(full, group, kind, what)
        if operation == "reduce_scatter":
            return comm.reduce_scatter(torch.empty_like(shards[0]), shards, group, kind, what)
        gather = comm.all_gather if operation == "all_gather" else comm.all_to_all
        return gather(into, shards[0] if operation == "all_gather" else shards, group, kind, what)

    return start


def _messages(comm: Comm, peer: int, index: int, count: int, *, both: bool) -> Do:
    shape = (count // CHUNK, 2, CHUNK)
    source, target = torch.ones(shape, device=comm.device), torch.empty(shape, device=comm.device)
    what = "measuring messages"

    def send() -> list[tuple[int, Tensor]]:
        return [(peer, source[:, 0].contiguous())]

    def receive() -> list[tuple[int, Tensor]]:
        return [(peer, source.new_empty((count // CHUNK, CHUNK)))]

    def keep(received: list[tuple[int, Tensor]]) -> None:
        for _, part in received:
            target[:, 0] = part

    def exchange() -> None:
        landing = receive()
        comm.exchange(send(), landing, "transfers", what).wait()
        keep(landing)

    def there_and_back() -> None:
        for sender in (0, 1):
            landing = [] if index == sender else receive()
            comm.exchange(send() if index == sender else [], landing, "transfers", what).wait()
            keep(landing)

    return exchange if both else there_and_back


def _with_further_messages(series: list[Series]) -> Iterator[Series]:
    """Adds to the curves of messages what each further one costs: exchanges of one with all, against a pair's with as
    many bytes. Where there is no more than a pair, half of the smallest one's time.
    """
    for s in series:
        curve = s.curve
        if curve.operation in ("message", "exchange"):
            level = len(curve.fan)
            wide = [
                w
                for w in series
                if w.curve.operation == "all_to_all" and len(w.curve.fan) == level and prod(w.curve.fan) > 2
            ]
            if wide:
                many = max(wide, key=lambda w: (prod(w.curve.fan), w.curve.load))
                members, inner = prod(many.curve.fan), prod(many.curve.fan[:-1])
                messages = (members - inner) * inner * many.curve.load
                sizes = np.array([size / members * messages for size, _ in many.points])  # through the port
                more = np.array([seconds for _, seconds in many.points]) - curve.seconds(sizes)
                each = np.maximum.accumulate(np.maximum(more, 0.0)) / max(messages - curve.load, 1)
                further = tuple(zip(sizes.tolist(), each.tolist(), strict=True))
            else:
                further = ((s.points[0][0], s.points[0][1] / 2),)
            s = replace(s, curve=replace(curve, further=further))
        yield s


def beside_bytes(comm: Comm, curve: Curve, most_s: float = BESIDE_S) -> int:
    """Bytes of what is measured beside computation: of each of its groups, of those that the runtime issues."""
    sizes = [size for size in SIZES if size <= min(BUCKET_BYTES, curve.knots[-1][0])]
    seconds = {size: float(curve.seconds(np.array(size))) for size in sizes}
    within = [size for size, each_s in seconds.items() if each_s <= most_s or comm.device.type == "cuda"]
    return max(within, default=sizes[0]) // (curve.load if curve.operation == "exchange" else 1)


SHARED = 1.5  # times as long as one pair: then the pairs of a node share its port


def conditions(comm: Comm, where: Topology) -> dict[str, object]:
    """The conditions that the numbers hold for."""
    cuda = comm.device.type == "cuda"
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "host": platform.node(),
        "device": torch.cuda.get_device_name(comm.device) if cuda else "cpu",
        "threads": torch.get_num_threads(),
        "backend": "nccl" if comm.collectives else "gloo",
        "torch": torch.__version__,
        "nodes": where.nodes,
        "ranks_per_node": where.local,
    }


def check_nodes(profile: Profile, where: Topology) -> None:
    """Raises LayerwiseError if the profile has no level for links between nodes, and there are some."""
    if where.nodes > 1 and len(profile.levels) == 1:
        raise LayerwiseError(
            f"profile {profile.name} describes a single node, and these are {where.nodes}: give another with --profile"
        )


def with_links(profile: Profile, measured: Measured, where: Topology, facts: dict[str, object]) -> Profile:
    """The profile with its levels' latency and bandwidth as measured, and all curves. Levels beyond the second go."""
    source = (
        f"measured by layerwise on {facts['date']}: {facts['backend']} of torch {facts['torch']}, "
        f"{where.nodes} nodes of {where.local} ranks"
    )
    inner, *outer = profile.levels[:2]
    levels = [replace(inner, devices=where.local, devices_per_port=1)]
    levels += [replace(level, devices=None) for level in outer]  # beyond the nodes it is everything
    sources = {
        **profile.sources,
        "levels[0].devices": f"{source}: ranks of a node",
        "levels[0].devices_per_port": "assumption: ranks of a node have no port to share",
    }
    for number, level in enumerate(levels):
        if series := port_series(measured, number):
            levels[number] = _measured_level(level, number, series, where, source, sources)
    gone = (*(f"levels[{number}]." for number in range(2, len(profile.levels))), "levels[1].devices ")
    remaining = {path: text for path, text in sources.items() if not f"{path} ".startswith(gone)}
    return replace(profile, levels=tuple(levels), links=measured.links(facts), sources=remaining)


def port_series(measured: Measured, level: int) -> list[Series]:
    """Exchanges of pairs at a level, the largest load first."""
    fan = (*(1,) * level, 2)
    series = [s for s in measured.series if s.curve.operation == "exchange" and s.curve.fan == fan]
    return sorted(series, key=lambda s: -s.curve.load)


def _measured_level(
    level: LinkLevel, number: int, series: list[Series], where: Topology, source: str, sources: dict[str, str]
) -> LinkLevel:
    loaded, single, path = series[0], series[-1], f"levels[{number}]"
    (smallest, latency), *_ = single.points
    (x0, y0), (x1, y1) = loaded.curve.knots[-2:]
    bytes_per_s = (x1 - x0) / (y1 - y0) if y1 > y0 else x1 / y1  # noise can make the last line flat
    port: int | str = level.devices_per_port
    if number > 0:
        ratio, seen = contention(loaded, single), "one rank a node"
        if where.local > 1:
            seen = f"{where.local} pairs at once took {ratio:.2f} times as long as one"
        port = "node" if ratio > SHARED or where.local == 1 else 1
        bytes_per_s /= 1 if port == "node" else where.local  # curves count what a node's ranks carry together
        sources[f"{path}.devices_per_port"] = f"{source}: {seen}"
    sources[f"{path}.latency_s"] = f"{source}: an exchange of {smallest:,.0f} bytes"
    sources[f"{path}.bandwidth_bytes_per_s"] = f"{source}: exchanges of {x0:,.0f} to {x1:,.0f} bytes"
    return replace(level, latency_s=latency, bandwidth_bytes_per_s=bytes_per_s, devices_per_port=port)


def contention(loaded: Series, single: Series) -> float:
    """The ratio of the time of all pairs of a node at once to that of one, at the largest size of both."""
    load = loaded.curve.load
    alone = dict(single.points)
    sizes = [size for size, _ in loaded.points if size / load in alone]
    if not sizes:
        return 1.0
    return dict(loaded.points)[sizes[-1]] / alone[sizes[-1] / load]
