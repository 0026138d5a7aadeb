"""layerwise search --capacity: how many devices a model needs, and how large a cube the devices hold."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from layerwise.cli import present
from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel, CostOptions
from layerwise.errors import LayerwiseError
from layerwise.graph.layer import LayerGraph
from layerwise.machine import load
from layerwise.quantities import units
from layerwise.report.content import Lines, Report
from layerwise.search.capacity import Limits, Tried, largest_side, least_devices
from layerwise.search.remedies import least_bytes

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
