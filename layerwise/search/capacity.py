"""Capacity, --capacity: the fewest devices that hold a model, and the largest cube that so many of them hold."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from layerwise.cli import present
from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel, CostOptions
from layerwise.errors import LayerwiseError
from layerwise.graph.layer import LayerGraph
from layerwise.machine import load
from layerwise.quantities import units
from layerwise.report.content import Lines, Report
from layerwise.search.remedies import least_bytes

TRIED = 32  # numbers of devices between two powers of two
STEP = 8  # between sides of cubes: what three poolings by two take
Need = Callable[[int], float]  # least bytes of a device, found for so many devices, or for a cube of this side


@dataclass(frozen=True, slots=True)
class Tried:
    """A number (of devices, or a cube's side) that fits, or does not.

    Attributes:
        number: The one.
        bytes: The least memory of a device that was found with it.
    """

    number: int
    bytes: float


@dataclass(frozen=True, slots=True)
class Limits:
    """The last number that fits and the first that does not, next to each other. None: there is none in the range."""

    fits: Tried | None
    beyond: Tried | None


def least_devices(need: Need, limit_bytes: float, most: int) -> Limits:
    """The least number of devices, up to `most`, on each of which a plan needs at most `limit_bytes`.

    A plan takes a number of devices that divides what there is, so more may need more: of those below the first power
    of two that fits, all are tried (of many, 32). `beyond` is the last one before it that does not.
    """
    few, many = 0, 1
    tried = dict[int, Tried]()

    def fits(number: int) -> bool:
        tried[number] = Tried(number, need(number))
        return tried[number].bytes <= limit_bytes

    while not fits(many) and many < most:
        few, many = many, min(2 * many, most)
    for number in range(few + 1, many, max(1, (many - few) // TRIED)):
        if fits(number):
            return Limits(tried[number], tried[few])
        few = number
    fit = tried[many].bytes <= limit_bytes
    return Limits(tried[many], tried.get(few)) if fit else Limits(None, tried[most])


def largest_side(need: Need, limit_bytes: float, start: int, least: int, most: int) -> Limits:
    """The largest side of a cube, in steps of 8, from `least` to `most`, that fits. Larger ones need more.

    start: a side that needs about as much as there is, or any.
    """
    tried = dict[int, Tried]()

    def fits(side: int) -> bool:
        tried[side] = Tried(side, need(side))
        return tried[side].bytes <= limit_bytes

    least, most = -(-least // STEP) * STEP, most // STEP * STEP
    low = high = max(least, min(start // STEP * STEP, most))
    stride = STEP
    if fits(low):
        while high < most and fits(high := min(high + stride, most)):
            low, stride = high, 2 * stride
        if tried[high].bytes <= limit_bytes:
            return Limits(tried[high], None)
    else:
        while low > least and not fits(low := max(low - stride, least)):
            high, stride = low, 2 * stride
        if tried[low].bytes > limit_bytes:
            return Limits(None, tried[low])
    while high - low > STEP:
        middle = (low + high) // 2 // STEP * STEP
        low, high = (middle, high) if fits(middle) else (low, middle)
    return Limits(tried[low], tried[high])


OTHERS = ("memory_curve", "price", "out", "export_costs", "timeline", "layers", "memory", "plot")
CUBES = ("cosmoflow", "unet3d")
SMALLEST, LARGEST = (8, 64), 4096  # sides of built-in networks: the first that a network takes is its smallest


def show_capacity(
    graph_of: Callable[[str], LayerGraph],
    options: CostOptions,
    space: SearchSpace,
    limit_bytes: float,
    offer: Sequence[str],
    args: argparse.Namespace,
) -> int:
    """The least number of devices for the model; of a network of cubes, the largest one for all devices."""
    wrong = [f"--{name.replace('_', '-')}" for name in OTHERS if getattr(args, name)]
    wrong += ["--replicas"] * (args.replicas > 1)
    if wrong:
        raise LayerwiseError(f"--capacity is about many plans: leave out {' and '.join(wrong)}")
    profile = load(args.profile)

    def need(name: str, gpus: int) -> float:
        try:
            machine = profile.device_graph(gpus, args.gpus_per_node)
        except LayerwiseError:  # they fill no nodes, of which memory does not depend
            machine = profile.device_graph(gpus, 1)
        model = CostModel(graph_of(name), machine, options)
        return least_bytes(model, replace(space, devices=gpus), tuple(offer))

    devices = least_devices(lambda gpus: need(args.model, gpus), limit_bytes, args.gpus)
    values: dict[str, object] = {"model": args.model, "limit_bytes": limit_bytes, "devices": devices}
    lines = [_devices(devices, args, limit_bytes)]
    cube = _cube(args.model, graph_of)
    if cube is not None:
        sided, side, least = cube
        start = int(side * (limit_bytes / need(args.model, args.gpus)) ** (1 / 3))
        sides = largest_side(lambda n: need(sided(n), args.gpus), limit_bytes, start, least, LARGEST)
        values["side"] = sides
        lines.append(_side(sides, sided, args))
    lines.append("by the least memory that was found of a plan, beside what libraries take")
    kind = ", inference" if options.kind == "inference" else ""
    present(Report(args.model, f" on {args.profile}{kind}", [Lines(lines)], lambda: values), args, {})
    return 0


def _cube(name: str, graph_of: Callable[[str], LayerGraph]) -> tuple[Callable[[int], str], int, int] | None:
    """Of a built-in network of cubes its name with another side, its side, and its smallest; None of others."""
    network, plus, loss = name.partition("+")
    family, colon, side = network.partition(":")
    if family not in CUBES or (colon and not side.isdigit()):  # any other name with a colon is code to import
        return None

    def sided(n: int) -> str:
        return f"{family}:{n}{plus}{loss}"

    for least in SMALLEST:
        with suppress(LayerwiseError):
            graph_of(sided(least))
            return sided, graph_of(name).layers[0].out.shape[-1], least
    return None


def _devices(limits: Limits, args: argparse.Namespace, limit_bytes: float) -> str:
    have = f"a device has {units(limit_bytes, 'B')}"
    if limits.fits is None:
        return f"{args.gpus} devices do not hold {args.model}: {_need(limits.beyond)}, and {have}"
    count = limits.fits.number
    less = "" if limits.beyond is None else f"; on {limits.beyond.number} {_need(limits.beyond)}"
    return f"{count} device{'s hold' if count > 1 else ' holds'} {args.model}: {_need(limits.fits)}, and {have}{less}"


def _side(limits: Limits, sided: Callable[[int], str], args: argparse.Namespace) -> str:
    if limits.fits is None:
        return f"{args.gpus} devices hold no cube of it: of its smallest {_need(limits.beyond)}"
    side = limits.fits.number
    beyond = "" if limits.beyond is None else f"; {sided(limits.beyond.number)} takes {units(limits.beyond.bytes, 'B')}"
    voxels = f"{side:,}³ = {side**3:,} voxels"
    return f"{args.gpus} devices hold {sided(side)} at most, {voxels}: {_need(limits.fits)}{beyond}"


def _need(fit: Tried | None) -> str:
    return "" if fit is None else f"a plan takes {units(fit.bytes, 'B')}"
