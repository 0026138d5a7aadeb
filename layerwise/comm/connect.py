"""Connect: the store of the rendezvous is reached within a time that holds, or one line says what to check."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Final, TypeVar

import torch
from torch._C._distributed_c10d import Store, TCPStore

from layerwise.comm.base import CommError, reason
from layerwise.comm.seat import Seat

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
