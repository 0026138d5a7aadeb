"""Seat: which rank this process is, as torchrun says; connect: its way to the store, within a time that holds."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final, TypeVar

import torch
from torch._C._distributed_c10d import Store, TCPStore

from layerwise.comm.base import CommError, reason
from layerwise.errors import LayerwiseError


@dataclass(frozen=True, slots=True)
class Seat:
    """What torchrun's environment says of this process."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str  # of the store
    port: int
    agent: bool  # torchrun serves the store, else rank 0 does

    @property
    def address(self) -> str:
        """The store's."""
        return f"{self.host}:{self.port}"


def read_environment(environment: Mapping[str, str]) -> Seat | None:
    """torchrun's variables; None where there are none. Raises LayerwiseError where they make no sense."""
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return None
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if not environment.get(name)]
    if missing:
        raise LayerwiseError(f"{' and '.join(missing)} not set, while other variables of torchrun are: use torchrun")

    def number(name: str, low: int, high: int, default: int | None = None) -> int:
        text = environment.get(name) or str(default)
        if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
            raise LayerwiseError(f"{name} is {text!r}; it must be a whole number from {low} to {high}: use torchrun")
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


T = TypeVar("T")
SLACK_S: Final = 1.0  # for torch to answer after the time-out
FATAL: Final = 3  # of c10's levels: it aborts


def connect(seat: Seat, timeout_s: float) -> tuple[Store, Store]:
    """Two connections to the store, for the main thread and for the watch; rank 0 serves it where torchrun does not.

    CommError where there is none to be had within the time-out (and a second).
    """
    hush()
    serves = seat.rank == 0 and not seat.agent

    def do() -> tuple[Store, Store]:
        limit = timedelta(seconds=timeout_s)
        store = TCPStore(seat.host, seat.port, None, serves, timeout=limit, wait_for_workers=False, multi_tenant=True)
        return store, store.clone()  # type: ignore[attr-defined]

    try:
        return bounded(do, timeout_s + SLACK_S)  # torch waits for up to twice the time, and for ever for who is silent
    except (TimeoutError, RuntimeError) as error:
        if serves:
            said = f"rank 0 of {seat.size} cannot serve a store at {seat.address}: {reason(error)}; the port is taken?"
        else:
            server = "torchrun's store" if seat.agent else f"rank 0 of {seat.size}"
            said = (
                f"{server} does not answer at {seat.address} within {timeout_s:g} s, says rank {seat.rank}: it was not "
                "started, has ended or is stopped, the network is cut, or another program listens there;"
            )
        raise CommError(f"{said} check MASTER_ADDR and MASTER_PORT") from error


def bounded(act: Callable[[], T], limit_s: float) -> T:
    """What it returns; TimeoutError where that takes longer: it is then left to itself, in a thread that ends nothing.

    For what blocks inside torch, whose own time-out does not count while somebody accepts and says nothing.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="layerwise connect", daemon=True).start()
    return future.result(limit_s)


def hush() -> None:
    """torch's C++ logs a stack trace for every connection that fails; the line that says what happened is ours.

    Not where the user has chosen with TORCH_CPP_LOG_LEVEL, which torch reads when it is imported.
    """
    if "TORCH_CPP_LOG_LEVEL" in os.environ:
        return
    with suppress(OSError, ValueError):  # a build without the library or the flag
        library = next((Path(torch.__file__).parent / "lib").glob("libc10.*"), Path())
        ctypes.c_int.in_dll(ctypes.CDLL(os.fspath(library)), "FLAGS_caffe2_log_level").value = FATAL
