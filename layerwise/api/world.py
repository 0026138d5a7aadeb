"""World: the ranks that this process trains with, the nodes that they are on, and what they compute with."""

from __future__ import annotations

import atexit
import os
import socket
import sys
from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from layerwise.comm.base import Comm
from layerwise.comm.solo import SoloComm
from layerwise.comm.start import join_default_group, start
from layerwise.errors import LayerwiseError
from layerwise.measure.topology import topology_of

ALL = "a model is split over all ranks that torchrun has started: leave device_mesh out, or start as many as it has"


@dataclass(frozen=True, slots=True)
class World:
    """The ranks."""

    comm: Comm  # how they talk
    nodes: int  # how many machines
    gpus_per_node: int  # ranks on each of them
    device_order: tuple[int, ...]  # the rank that is each device of a plan: ranks of a node are neighbours
    device: str  # what a rank computes with: "NVIDIA H100 80GB HBM3", "cpu"
    memory_bytes: int  # that the poorest rank has of it

    @property
    def size(self) -> int:
        """How many ranks."""
        return self.comm.size


class _Joined:
    """The communicator of this process: it can arrive only once, however many models it makes parallel."""

    comm: Comm | None = None
    group: object = None  # torch.distributed's default group that it stands on


def joined() -> Comm | None:
    """How this process talks to the other ranks, where it does already."""
    alive = dist.is_available() and dist.is_initialized() and _Joined.group is dist.group.WORLD
    return _Joined.comm if alive else None


def join(
    device: torch.device,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    comm: Comm | None = None,
    timeout_s: float = 30.0,
) -> World:
    """Joins the other ranks as torchrun's environment says, or takes torch.distributed's default group if there is one.

    Every rank calls it alike. LayerwiseError where the mesh is not one of all ranks, where the ranks do not fill equal
    nodes one after another (neither the cost model nor the measured links know other ones), or have unlike devices.
    """
    if comm is None:
        comm = _join(device, timeout_s)
    facts = comm.all_gather_object(_here(device, comm.size))
    topology = topology_of([rank["node"] for rank in facts])
    kinds = Counter(rank["device"] for rank in facts)
    if len(kinds) > 1:
        raise LayerwiseError(
            f"the ranks compute with different devices ({', '.join(kinds)}): layerwise plans for equal ones; start as "
            "many ranks as there are equal devices"
        )
    order = _order(mesh, comm.size) if mesh is not None else tuple(range(comm.size))
    return World(
        comm,
        topology.nodes,
        topology.local,
        order,
        facts[0]["device"],
        min(rank["memory_bytes"] for rank in facts),
    )


def _join(device: torch.device, timeout_s: float) -> Comm:
    if dist.is_available() and dist.is_initialized():
        if _Joined.comm is None or _Joined.group is not dist.group.WORLD:
            alone = dist.get_world_size() == 1
            _Joined.comm = SoloComm(device) if alone else join_default_group(device, timeout_s)
            _Joined.group = dist.group.WORLD
            atexit.register(_leave, _Joined.comm, os.getpid(), wait=False)
        return _Joined.comm
    comm = start(timeout_s, device=device.type)
    if comm.size > 1:
        _Joined.comm, _Joined.group = comm, dist.group.WORLD
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


def _here(device: torch.device, ranks: int) -> dict[str, str | int]:
    """What this rank says of itself. Where torchrun's agents differ, so do the nodes, whatever their names."""
    node = f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', '')}"
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        return {"node": node, "device": facts.name, "memory_bytes": facts.total_memory}
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // max(local, 1)
    return {"node": node, "device": device.type, "memory_bytes": memory}


def _order(mesh: DeviceMesh | dist.ProcessGroup, size: int) -> tuple[int, ...]:
    """The ranks of a 1-D mesh, or of a process group, which must be all ranks."""
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise LayerwiseError(
                f"device_mesh has {mesh.ndim} dimensions; a plan needs a 1-D mesh over all {size} ranks: layerwise "
                "finds the dimensions itself"
            )
        ranks = [int(rank) for rank in mesh.mesh.tolist()]
    elif isinstance(mesh, dist.ProcessGroup):
        ranks = dist.get_process_group_ranks(mesh)
    elif mesh is dist.GroupMember.NON_GROUP_MEMBER:
        raise LayerwiseError(f"device_mesh is a process group that this rank is not in; {ALL}")
    else:
        raise LayerwiseError(f"device_mesh must be a 1-D DeviceMesh or a process group, not {type(mesh).__name__}")
    if sorted(ranks) != list(range(size)):
        raise LayerwiseError(f"device_mesh has ranks {ranks} of {size}; {ALL}")
    return tuple(ranks)
