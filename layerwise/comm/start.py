"""Start: makes this process a rank, as torchrun's environment says (`Seat`), connects it to the store, and ends it."""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Final, Literal, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from layerwise.comm.base import Comm, CommError, Group, Members, ranks, reason
from layerwise.comm.guard import Guard
from layerwise.comm.process import SLACK_S, ProcessComm
from layerwise.comm.solo import SoloComm
from layerwise.comm.together import in_thread
from layerwise.comm.watch import Watch
from layerwise.errors import LayerwiseError

Backend = Literal["gloo", "nccl"]
POLL_S: Final = 0.05  # between two checks of who has arrived
CONNECT_SLACK_S: Final = 1.0  # for torch to answer after the time-out


@dataclass(frozen=True, slots=True)
class Seat:
    """This process's place among the ranks, as torchrun's environment says."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str  # of the store
    port: int
    agent: bool  # torchrun serves the store, otherwise rank 0 does

    @property
    def address(self) -> str:
        """Returns the store's address."""
        return f"{self.host}:{self.port}"


def read_environment(environment: Mapping[str, str]) -> Seat | None:
    """Returns torchrun's variables, or None if there are none. Raises LayerwiseError if they are invalid."""
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return None
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if not environment.get(name)]
    if missing:
        raise LayerwiseError(
            f"{' and '.join(missing)} not set, though other variables of torchrun are: start the ranks with torchrun"
        )

    def number(name: str, low: int, high: int, default: int | None = None) -> int:
        text = environment.get(name) or str(default)
        if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
            raise LayerwiseError(
                f"{name} is {text!r}, but must be an integer from {low} to {high}: start the ranks with torchrun"
            )
        return int(text)

    size = number("WORLD_SIZE", 1, 2**20)
    local_size = number("LOCAL_WORLD_SIZE", 1, size, size)
    rank = number("RANK", 0, size - 1)
    return Seat(
        rank,
        size,
        number("LOCAL_RANK", 0, local_size - 1, rank % local_size),
        local_size,
        environment["MASTER_ADDR"],
        number("MASTER_PORT", 1, 65535),
        environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def start(timeout_s: float = 30.0, device: str | None = None) -> Comm:
    """Joins the other ranks. Returns a SoloComm without torchrun's environment, or if there is one rank.

    timeout_s: for the others to arrive, and later for every operation. device: default a GPU if there is one. NCCL
    sends if every rank of this node has its own GPU, else gloo. Raises LayerwiseError for an invalid environment, and
    CommError if ranks do not arrive or do not fit together.

    Call it in the main thread, and call `leave` at the end: it handles SIGTERM, and a thread may end this process, with
    one line on stderr, if another rank has failed and the main thread does not return.
    """
    if not 0 < timeout_s < 10**6:
        raise LayerwiseError(f"the time-out is {timeout_s:g} s, but must be positive and less than 10^6 s")
    seat = read_environment(os.environ)
    where = _device(seat, device)
    if seat is None or seat.size == 1:
        return SoloComm(where)
    own_gpu = where.type == "cuda" and torch.cuda.device_count() >= seat.local_size
    backend: Backend = "nccl" if own_gpu and dist.is_nccl_available() else "gloo"
    if where.type == "cuda":
        torch.cuda.set_device(where)
    stores = connect(seat, timeout_s)
    name = _name(seat, stores[0], timeout_s) if seat.agent else ""
    store, own = (PrefixStore(f"layerwise/{name}", connection) for connection in stores)
    watch = _watch(seat, own, timeout_s)
    Guard(watch).start()
    watch.enter("the arrival of all ranks", timeout_s + SLACK_S)
    answer = partial(_answer, stores[0], name) if seat.agent and seat.rank == 0 else None
    _arrive(seat, store, watch, backend, timeout_s, answer)
    watch.enter("the first connection to all ranks", timeout_s + SLACK_S)
    try:
        dist.init_process_group(
            "gloo",
            store=PrefixStore("groups", store),
            rank=seat.rank,
            world_size=seat.size,
            timeout=timedelta(seconds=timeout_s),
        )
    except RuntimeError as error:
        raise watch.error(f"{watch.find(reason(error))}; this rank was connecting to the others") from error
    watch.leave()
    return ProcessComm(where, timeout_s, watch, nccl=backend == "nccl")


def join_default_group(device: torch.device, timeout_s: float = 30.0, members: Group | None = None) -> ProcessComm:
    """Returns a Comm over the default group that the user has created. It never ends this process.

    members: some of its ranks, ascending, which alone call this; default all.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    backends = str(dist.get_backend_config(dist.group.WORLD))
    nccl = device.type == "cuda" and "nccl" in backends
    host, port = os.environ.get("MASTER_ADDR", "unknown"), os.environ.get("MASTER_PORT", "0")
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    seat = Seat(dist.get_rank(), dist.get_world_size(), 0, 1, host, int(port), agent)
    try:
        own = in_thread(_get_default_store().clone).result(timeout_s)  # type: ignore[attr-defined]
    except (TimeoutError, RuntimeError) as error:
        raise CommError(
            f"the default group's store does not answer rank {seat.rank} within {timeout_s:g} s: its server at "
            f"{seat.address} has ended, is stopped or is cut off ({reason(error)})"
        ) from error
    if nccl and members is not None and dist.group.WORLD is not None and dist.group.WORLD.bound_device_id is not None:
        raise LayerwiseError(
            "NCCL would split a group of some ranks from the default group, which needs all ranks: do not pass "
            "device_id to init_process_group"
        )
    prefix = "layerwise" if members is None else f"layerwise/{'_'.join(map(str, members))}"
    watch = _watch(seat, PrefixStore(prefix, own), timeout_s, members)
    return ProcessComm(device, timeout_s, watch, nccl=nccl, members=members)


def leave(code: int) -> NoReturn:
    """Ends the process with this exit code, at once: a normal exit of torch with gloo sometimes aborts (134)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def connect(seat: Seat, timeout_s: float) -> tuple[Store, Store]:
    """Returns connections to the store for the main thread and the watch; rank 0 serves it unless torchrun does.

    Raises CommError if none is available within the time-out (and a second).
    """
    serves = seat.rank == 0 and not seat.agent

    def do() -> tuple[Store, Store]:
        limit = timedelta(seconds=timeout_s)
        store = TCPStore(seat.host, seat.port, None, serves, timeout=limit, wait_for_workers=False, multi_tenant=True)
        return store, store.clone()  # type: ignore[attr-defined]

    try:
        # Torch itself waits up to twice that, and for ever if somebody accepts and says nothing.
        return in_thread(do).result(timeout_s + CONNECT_SLACK_S)
    except (TimeoutError, RuntimeError) as error:
        if serves:
            what = f"rank 0 of {seat.size} cannot serve a store at {seat.address}: {reason(error)}; is the port taken?"
        else:
            server = "torchrun's store" if seat.agent else f"rank 0 of {seat.size}"
            what = (
                f"{server} does not answer rank {seat.rank} at {seat.address} within {timeout_s:g} s: it was not "
                "started, has ended or is stopped, the network is cut, or another program listens there;"
            )
        raise CommError(f"{what} check MASTER_ADDR and MASTER_PORT") from error


def _device(seat: Seat | None, name: str | None) -> torch.device:
    if name is not None and torch.device(name).type == "cpu":
        return torch.device("cpu")
    device = default_device(seat.local_rank if seat else 0)
    if device.type == "cpu" and name is not None:
        raise LayerwiseError(f"device {name!r} is not available: PyTorch finds no GPU here")
    return device


def default_device(local_rank: int) -> torch.device:
    """Returns a GPU for this rank of a node, or the CPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return torch.device("cuda", local_rank % count) if count else torch.device("cpu")


def _watch(seat: Seat, own: Store, timeout_s: float, members: Group | None = None) -> Watch:
    serves, who = seat.rank == 0 and not seat.agent, Members(members or tuple(range(seat.size)), seat.size)
    server = "torchrun" if seat.agent else ranks([0], seat.size)
    return Watch(own, seat.rank, who, timeout_s, server=server, address=seat.address, serves=serves)


def _name(seat: Seat, store: Store, timeout_s: float) -> str:
    """Returns a name for this start of all ranks, which rank 0 makes and tells every rank that asks.

    It is needed because torchrun's store still has the keys of earlier starts, and its agents count restarts
    separately.
    """
    name = uuid.uuid4().hex
    if seat.rank == 0:
        return name

    def ask() -> str:
        store.set(f"layerwise/asks/{seat.rank}", name)
        store.wait([f"layerwise/told/{name}"], timedelta(seconds=timeout_s))
        return store.get(f"layerwise/told/{name}").decode()

    try:
        return in_thread(ask).result(timeout_s + SLACK_S)
    except (TimeoutError, RuntimeError) as error:
        raise CommError(
            f"rank 0 of {seat.size} has not arrived within {timeout_s:g} s, as rank {seat.rank} reports: it was not "
            f"started, ended early, or has no connection to {seat.address} ({reason(error)})"
        ) from error


def _answer(store: Store, name: str, missing: Sequence[int]) -> None:
    """Tells the name to those who ask. A question left by an earlier start gets an answer that nobody reads."""
    for rank in missing:
        if store.check([f"layerwise/asks/{rank}"]):
            store.set(f"layerwise/told/{store.get(f'layerwise/asks/{rank}').decode()}", name)


def _arrive(
    seat: Seat,
    store: Store,
    watch: Watch,
    backend: Backend,
    timeout_s: float,
    answer: Callable[[Sequence[int]], None] | None,
) -> None:
    """Waits until all ranks have arrived and agree on what communication needs.

    answer: called with the ranks that may be missing, until all have arrived.
    """
    facts = {"WORLD_SIZE": str(seat.size), "torch version": torch.__version__, "backend": backend}
    others, until = [rank for rank in range(seat.size) if rank != seat.rank], time.monotonic() + timeout_s
    try:
        if store.add(f"taken/{seat.rank}", 1) > 1:
            raise watch.error(watch.accuse(f"two processes say that they are rank {seat.rank} of {seat.size}"))
        store.set(f"arrived/{seat.rank}", json.dumps(facts))
        for index, rank in enumerate(others):
            while not store.check([f"arrived/{rank}"]):
                if answer is not None:
                    answer(others[index:])
                watch.check()
                overdue = time.monotonic() > until
                missing = [other for other in others if not store.check([f"arrived/{other}"])] if overdue else []
                if missing:
                    have = f"{ranks(missing, seat.size)} {'has' if len(missing) == 1 else 'have'}"
                    text = f"{have} not arrived within {timeout_s:g} s: not started, ended early, or without a way to"
                    raise watch.error(watch.accuse(f"{text} {seat.address}"))
                time.sleep(POLL_S)
            theirs = json.loads(store.get(f"arrived/{rank}"))
            for name, value in facts.items():
                if theirs.get(name) != value:
                    text = f"the ranks differ in {name}: {value} on rank {seat.rank}, {theirs.get(name)} on rank {rank}"
                    raise watch.error(watch.accuse(f"{text}; start every rank in the same way"))
    except RuntimeError as error:  # torch's error about the store
        raise watch.error(watch.find(reason(error))) from error
