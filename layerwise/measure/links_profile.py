"""Measured links into a profile: its levels, its curves, and where the numbers came from."""

from __future__ import annotations

import platform
from dataclasses import replace
from datetime import UTC, datetime

import torch

from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from layerwise.machine import LinkLevel, Profile
from layerwise.measure.link_times import Measured, Series
from layerwise.measure.topology import Topology

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
    """LayerwiseError where the profile has no level for links between nodes, and there are some."""
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
    sources = dict(profile.sources)
    levels = list(profile.levels[:2])
    for number, level in enumerate(levels):
        series = port_series(measured, number)
        if number == 0:
            level = replace(level, devices=where.local)
            sources["levels[0].devices"] = f"{source}: ranks of a node"
            level = replace(level, devices_per_port=1)
            sources["levels[0].devices_per_port"] = "assumption: ranks of a node have no port to share"
        if series:
            level = _measured_level(level, number, series, where, source, sources)
        levels[number] = level if number == 0 else replace(level, devices=None)  # beyond the nodes it is everything
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
    loaded, single = series[0], series[-1]
    latency = single.points[0][1]
    (x0, y0), (x1, y1) = loaded.curve.knots[-2:]
    bytes_per_s = (x1 - x0) / (y1 - y0) if y1 > y0 else x1 / y1  # noise can make the last line flat
    shared = number > 0 and where.local > 1 and contention(loaded, single) > SHARED
    port: int | str = level.devices_per_port
    if number > 0:
        port = "node" if shared or where.local == 1 else 1
        pairs_text = f"{where.local} pairs at once took {contention(loaded, single):.2f} times as long as one"
        sources[f"levels[{number}].devices_per_port"] = f"{source}: " + (
            pairs_text if where.local > 1 else "one rank a node"
        )
    carried = 1.0 if port == "node" or number == 0 else where.local  # curves count what a node's ranks carry together
    sources[f"levels[{number}].latency_s"] = f"{source}: an exchange of {series[-1].points[0][0]:,.0f} bytes"
    sources[f"levels[{number}].bandwidth_bytes_per_s"] = f"{source}: exchanges of {x0:,.0f} to {x1:,.0f} bytes"
    return replace(level, latency_s=latency, bandwidth_bytes_per_s=bytes_per_s / carried, devices_per_port=port)


def contention(loaded: Series, single: Series) -> float:
    """The ratio of the time of all pairs of a node at once to that of one, at the largest size of both."""
    load = loaded.curve.load
    alone = dict(single.points)
    sizes = [size for size, _ in loaded.points if size / load in alone]
    if not sizes:
        return 1.0
    return dict(loaded.points)[sizes[-1]] / alone[sizes[-1] / load]
