"""Measures links: exchanges and collectives as the runtime issues them, by size and shape, and beside computation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from layerwise.comm.base import Comm, Group
from layerwise.machine.curves import Curve, Links, Operation, Overlap
from layerwise.measure.links.fit import Point, knots
from layerwise.measure.links.shapes import Shape, Topology, pairs, shapes
from layerwise.measure.links.timing import ROUNDS, Time, timed
from layerwise.partition.buckets import BUCKET_BYTES

SIZES: tuple[int, ...] = tuple(1024 * 4**i for i in range(9))  # bytes: 1 KiB to 64 MiB
COLLECTIVES: tuple[Operation, ...] = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
CURVE_ROUNDS = 10  # about how many of its longest operations a curve takes the time of
# Samples, channels, height and width of the convolution whose gradients are computed beside an all-reduce.
KERNEL = {"cpu": (8, 64, 16, 16), "cuda": (64, 256, 32, 32)}
CHUNK = 256  # elements that lie together in what the runtime cuts out of tensors: about a row of an image's channels
Progress = Callable[[int, int], None]  # done, of
Do = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Series:
    """What was measured of one curve."""

    curve: Curve
    points: tuple[Point, ...]
    spread: float  # the noisiest point's


@dataclass(frozen=True, slots=True)
class Measured:
    """All curves with their points, and what computation and all-reduces cost each other."""

    series: tuple[Series, ...]
    overlaps: tuple[Overlap, ...]

    def links(self, conditions: dict[str, object]) -> Links:
        """For the profile."""
        return Links(tuple(s.curve for s in self.series), self.overlaps, conditions)


def measure_links(comm: Comm, where: Topology, budget_s: float, progress: Progress | None = None) -> Measured:
    """Measures everything; takes about `budget_s`, up to thrice as long where the host of a virtual machine takes CPU
    time from it. Every rank calls this, and all get the same result.

    Sizes go up until one takes as long as the budget gives a curve; larger ones follow the last line. A step's messages
    are priced as going both ways at once, by `exchange`; those of a pipeline by `message`.
    """
    kinds = pairs(where)
    groups = shapes(where)
    comm.prepare({group for shape in groups for group in shape.groups}, "statistics")
    comm.prepare({group for shape in groups for group in shape.groups}, "sync")
    plan: list[tuple[Operation, Shape]] = [(name, shape) for shape in kinds for name in ("message", "exchange")]
    plan += [(name, shape) for shape in groups for name in COLLECTIVES]
    longest_s = budget_s / (len(plan) + 2 * len(groups)) / CURVE_ROUNDS
    series, overlaps = [], []
    for number, (operation, shape) in enumerate(plan):
        if progress:
            progress(number, len(plan) + len(groups))
        series.append(_curve(comm, operation, shape, longest_s))
    for number, shape in enumerate(groups):
        if progress:
            progress(len(plan) + number, len(plan) + len(groups))
        alone = next(s for s in series if _of(s.curve, "all_reduce", shape))
        overlaps.append(overlap(comm, shape, bucket_bytes(alone.curve)))
    return Measured(tuple(_with_further_messages(series)), tuple(overlaps))


def _of(curve: Curve, operation: Operation, shape: Shape) -> bool:
    return (curve.operation, curve.fan, curve.load) == (operation, shape.fan, shape.load)


def _curve(comm: Comm, operation: Operation, shape: Shape, longest_s: float) -> Series:
    points: list[Point] = []
    spread = 0.0
    for size in SIZES:
        carried = float(size * carried_by(operation, shape))
        time = operation_time(comm, operation, shape, carried)
        points.append((carried, time.seconds))
        spread = max(spread, time.spread)
        if time.seconds > longest_s and len(points) > 2:
            break
    return Series(Curve(operation, shape.fan, shape.load, knots(points)), tuple(points), spread)


def carried_by(operation: Operation, shape: Shape) -> int:
    """Buffers whose bytes count: of messages all that share a port."""
    return shape.load if operation in ("message", "exchange") else 1


def operation_time(comm: Comm, operation: Operation, shape: Shape, size: float, rounds: int = ROUNDS) -> Time:
    """Of the slowest rank; `size` as in `Curve`. Every rank calls this."""
    group, each = shape.of(comm.rank), round(size / carried_by(operation, shape))
    time = timed(comm, None if group is None else prepared(comm, operation, group, each), rounds)
    return replace(time, seconds=time.seconds / 2) if operation == "message" else time  # there and back


def prepared(comm: Comm, operation: Operation, group: Group, size: int) -> Do:
    """The operation on buffers of `size` bytes, to be called as often as one likes. `message`: there and back.

    What the runtime copies around its messages is part of it: pieces cut out of a tensor, and put into another.
    """
    count, parts = size // 4, len(group)
    whole = torch.ones(count, device=comm.device)
    mine = group.index(comm.rank)
    what = f"measuring {operation}"
    if operation in ("message", "exchange"):
        return _messages(comm, group[1 - mine], mine, count, both=operation == "exchange")
    rows = torch.ones((parts, count // parts or 1), device=comm.device)
    into = torch.empty_like(rows)

    def do() -> None:
        if operation == "all_reduce":
            comm.all_reduce(whole, group, "statistics", what).wait()
        elif operation == "reduce_scatter":
            comm.reduce_scatter(torch.empty_like(rows[0]), rows, group, "statistics", what).wait()
        elif operation == "all_gather":
            comm.all_gather(into, rows[0], group, "statistics", what).wait()
        else:
            comm.all_to_all(into, rows, group, "statistics", what).wait()

    return do


def _messages(comm: Comm, peer: int, mine: int, count: int, *, both: bool) -> Do:
    rows = (count // CHUNK, 2, CHUNK)
    source, target = torch.ones(rows, device=comm.device), torch.empty(rows, device=comm.device)
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
            landing = [] if mine == sender else receive()
            comm.exchange(send() if mine == sender else [], landing, "transfers", what).wait()
            keep(landing)

    return exchange if both else there_and_back


def _with_further_messages(series: list[Series]) -> Iterator[Series]:
    """Adds to the curves of messages what each further one costs: small exchanges of one with all, against a pair's."""
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
                inner = prod(many.curve.fan[:-1])
                further = (prod(many.curve.fan) - inner) * inner * many.curve.load - curve.load
                extra = max(0.0, many.points[0][1] - s.points[0][1]) / max(further, 1)
            else:
                extra = s.points[0][1] / 2
            s = replace(s, curve=replace(curve, message_s=extra))
        yield s


def bucket_bytes(curve: Curve) -> int:
    """Bytes of the largest all-reduce that was measured, of those that the runtime issues."""
    most = min(float(BUCKET_BYTES), curve.knots[-1][0])
    return max(size for size in SIZES if size <= most)


def overlap(comm: Comm, shape: Shape, size: int, rounds: int = 3) -> Overlap:
    """An all-reduce of `size` bytes under twice as long a computation, and computation under twice as long a sum.

    With u, the seconds that the first pair takes longer than its computation alone, a second of sum, and v, those that
    the second takes longer than its sums alone, a second of computation: rates a of computation and b of sums that go
    on together make u = (1 - a) / b and v = (1 - b) / a.
    """
    group = shape.of(comm.rank)
    samples, channels, height, width = KERNEL[comm.device.type]
    x = torch.ones((samples, channels, height, width), device=comm.device, requires_grad=True)
    weight = torch.ones((channels, channels, 3, 3), device=comm.device, requires_grad=True)
    buffers = [torch.ones(size // 4, device=comm.device) for _ in range(2)]

    def both(convolutions: int, sums: int) -> Do:
        def do() -> None:
            assert group is not None
            handles = [comm.all_reduce(b, group, "sync", "measuring overlap") for b in buffers[:sums]]
            for _ in range(convolutions):
                y = torch.conv2d(x, weight, padding=1)
                torch.autograd.grad(y, (x, weight), y.detach())
            for handle in handles:
                handle.wait()

        return do

    def seconds(convolutions: int, sums: int) -> float:
        time: Time = timed(comm, None if group is None else both(convolutions, sums), rounds)
        return time.seconds

    sums, sum_s = seconds(0, 2), seconds(0, 1)
    equal = max(1, round(sum_s / (seconds(8, 0) / 8)))  # convolutions that take as long as a sum
    compute = seconds(2 * equal, 0)
    u = min(1.0, max(0.0, (seconds(2 * equal, 1) - compute) / sum_s))
    v = min(1.0, max(0.0, (seconds(equal, 2) - sums) / (compute / 2)))
    return Overlap(shape.fan, shape.load, *rates(u, v))


def rates(u: float, v: float) -> tuple[float, float]:
    """The share of its own speed at which computation, and at which a sum goes on while both do. From 0 to 1 each."""
    if u * v > 0.95:  # they take turns
        return 0.5, 0.5
    a, b = (1 - u) / (1 - u * v), (1 - v) / (1 - u * v)
    return min(1.0, max(0.01, a)), min(1.0, max(0.01, b))
