"""World: the ranks that this process trains with, the nodes that they are on, and what they compute with."""

from __future__ import annotations

import atexit
import os
import socket
import sys
from collections import Counter
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh

from layerwise.comm.base import Comm, Group, Members
from layerwise.comm.base import ranks as ranks_text
from layerwise.comm.solo import SoloComm
from layerwise.comm.start import join_default_group, start
from layerwise.errors import LayerwiseError
from layerwise.measure.topology import Topology, topology_of

THERE = "call parallelize on the ranks of the mesh alone, each with a mesh that it is in"


@dataclass(frozen=True, slots=True)
class World:
    """The ranks that a model is split over: all of the job, or a group of them."""

    comm: Comm  # how they talk
    nodes: int  # how many machines
    gpus_per_node: int  # ranks on each of them
    device_order: tuple[int, ...]  # the rank that is each device of a plan: ranks of a node are neighbours
    device: str  # what a rank computes with: "NVIDIA H100 80GB HBM3", "cpu"; the first device, where they differ
    memory_bytes: int  # that the poorest rank has of it
    replicas: int = 1  # groups of devices, one after another, each of which has samples of its own
    group: str = ""  # `the group of ranks 2 and 3`; "" where they are all of the job
    kinds: tuple[str, ...] = ()  # of unequal devices, what each of a plan's is; "cpu@0.5": half of a core
    memories: tuple[int, ...] = ()  # and the bytes that it has

    @property
    def size(self) -> int:
        """Returns the number of ranks."""
        return self.comm.size

    def __str__(self) -> str:
        """Returns `4 × cpu, in 2 replicas`."""
        each = Counter(self.kinds or [self.device] * self.size).items()
        devices = " and ".join(f"{count} × {kind}" for kind, count in each)
        return devices + (f", in {self.replicas} replicas" if self.replicas > 1 else "")


class _Joined:
    """The communicators of this process: it can arrive only once, however many models it makes parallel."""

    comms: ClassVar[dict[Group | None, Comm]] = {}  # by the ranks of a group; None: of all ranks
    group: object = None  # torch.distributed's default group that they stand on


def joined() -> Comm | None:
    """Returns this process's communicator of all ranks, where it has one already."""
    alive = dist.is_available() and dist.is_initialized() and _Joined.group is dist.group.WORLD
    return _Joined.comms.get(None) if alive else None


def ranks_here() -> int:
    """Returns the number of ranks that torch.distributed has, or torchrun has started."""
    started = dist.is_available() and dist.is_initialized()
    return dist.get_world_size() if started else int(os.environ.get("WORLD_SIZE", "1"))


def join(
    device: torch.device,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    comm: Comm | None = None,
    timeout_s: float = 30.0,
) -> World:
    """Joins the other ranks as torchrun's environment says, or takes torch.distributed's default group if there is one.

    mesh: the ranks of that group which call it, alike; default all. LayerwiseError where it is no mesh to plan for,
    where the ranks do not fill equal nodes one after another (neither the cost model nor the measured links know other
    ones).
    """
    if comm is None and mesh is not None and not (dist.is_available() and dist.is_initialized()):
        raise LayerwiseError("device_mesh needs torch.distributed's process group: start the script with torchrun")
    size = comm.size if comm is not None else dist.get_world_size() if mesh is not None else 0
    grid = np.arange(size)[None] if mesh is None else _grid(mesh, size)
    members: Group = tuple(sorted(grid.flatten().tolist()))
    if comm is None:
        if mesh is not None and dist.get_rank() not in members:
            raise LayerwiseError(
                f"device_mesh has {ranks_text(members, size)}, and this is rank {dist.get_rank()}: {THERE}"
            )
        comm = _join(device, timeout_s, None if len(members) == size else members)
    elif len(members) < size:
        raise LayerwiseError(
            f"device_mesh has {ranks_text(members, size)}, and ParallelOptions(comm=...) has all of them: "
            "give one of the two"
        )
    facts = comm.all_gather_object(_here(device, comm.size))
    order = tuple(range(comm.size)) if mesh is None else tuple(map(members.index, grid.flatten().tolist()))
    topology = topology_of([rank["node"] for rank in facts])
    if len({facts[i]["node"] for i in order[: topology.local]}) > 1:  # neighbours of the mesh are on several nodes
        topology = Topology(comm.size, 1)
    devices = [facts[rank] for rank in order]
    cores = max(rank.get("cores", 1.0) for rank in devices)
    names = [f"{d['device']}@{c:g}" if (c := d.get("cores", 1.0) / cores) < 1 else d["device"] for d in devices]
    unequal = len(set(names)) > 1
    if unequal and len(grid) > 1:
        kinds = ", ".join(dict.fromkeys(names))
        raise LayerwiseError(f"the ranks of replicas compute with unlike devices ({kinds}): give a 1-D mesh of them")
    return World(
        comm,
        topology.nodes,
        topology.local,
        order,
        names[0] if unequal else devices[0]["device"],
        min(rank["memory_bytes"] for rank in facts),
        replicas=len(grid),
        group="" if len(members) == size else str(Members(members, size)),
        kinds=tuple(names) if unequal else (),
        memories=tuple(device["memory_bytes"] for device in devices) if unequal else (),
    )


def _join(device: torch.device, timeout_s: float, members: Group | None) -> Comm:
    if dist.is_available() and dist.is_initialized():
        if _Joined.group is not dist.group.WORLD:
            _Joined.comms, _Joined.group = {}, dist.group.WORLD
        if members not in _Joined.comms:
            alone = len(members or range(dist.get_world_size())) == 1
            made = SoloComm(device) if alone else join_default_group(device, timeout_s, members)
            _Joined.comms[members] = made
            atexit.register(_leave, made, os.getpid(), wait=False)
        return _Joined.comms[members]
    comm = start(timeout_s, device=device.type)
    if comm.size > 1:
        _Joined.comms, _Joined.group = {None: comm}, dist.group.WORLD
        atexit.register(_leave, comm, os.getpid(), wait=True)
    return comm


def _leave(comm: Comm, process: int, *, wait: bool) -> None:
    """Ends a script: tells the ranks of the error that ends this one, else waits for them.

    wait: not where the script has made the network itself. process: not in one that was forked from that.
    """
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if dist.is_initialized() and os.getpid() == process and (wait or error):  # else the script has ended the network
        try:
            comm.close(error)
        except LayerwiseError as failure:  # one line: nobody can catch it any more
            print(f"layerwise: {failure}", file=sys.stderr)


def _here(device: torch.device, ranks: int) -> dict[str, Any]:
    """Returns what this rank says of itself. Where torchrun's agents differ, so do the nodes, whatever their names."""
    node = f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', '')}"
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        return {"node": node, "device": facts.name, "memory_bytes": facts.total_memory}
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // max(local, 1)
    return {"node": node, "device": device.type, "memory_bytes": memory, "cores": cores()}


def cores() -> float:
    """Returns the cores that this process may use: its threads, or less where a control group's quota says so."""
    found = float(torch.get_num_threads())
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return found
    for _, controllers, path in groups:
        if controllers in ("", "cpu", "cpu,cpuacct"):
            top = Path("/sys/fs/cgroup") / controllers
            for group in (top / path.lstrip("/"), *(top / path.lstrip("/")).parents):
                found = min(found, _quota(group))
                if group == top:
                    break
    return found


def _quota(group: Path) -> float:
    """Returns the cores of one control group, of either version."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else inf
    except (OSError, ValueError):  # "max", or no such group
        return inf


def _grid(mesh: DeviceMesh | dist.ProcessGroup, size: int) -> NDArray[np.int64]:
    """Returns the ranks of a mesh or a process group, of `size` that there are: a row for each replica."""
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim > 2:
            raise LayerwiseError(
                f"device_mesh has {mesh.ndim} dimensions; a plan is for the ranks of a 1-D mesh, or for replicas × "
                "ranks: layerwise finds the dimensions of each layer itself"
            )
        grid: NDArray[np.int64] = mesh.mesh.cpu().numpy().astype(np.int64)
    elif isinstance(mesh, dist.ProcessGroup):
        try:
            grid = np.array(dist.get_process_group_ranks(mesh), np.int64)
        except (KeyError, RuntimeError, ValueError):
            raise LayerwiseError("device_mesh is a process group that torch.distributed no longer has") from None
    elif mesh is dist.GroupMember.NON_GROUP_MEMBER:
        raise LayerwiseError(f"device_mesh is a process group that this rank is not in: {THERE}")
    else:
        raise LayerwiseError(f"device_mesh must be a DeviceMesh or a process group, not {type(mesh).__name__}")
    if grid.max() >= size:
        raise LayerwiseError(f"device_mesh has rank {grid.max()}, and there are {size}: start as many as it has")
    return np.atleast_2d(grid)
