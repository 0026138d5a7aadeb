"""A pool of real processes, the ranks of a gloo network: `run_ranks(4, "tests.run.steps:train", plan)`.

Started at the first use of a size, then kept until the test session ends. They are forked from a server that has torch
imported, so that starting eight takes a second. A function takes a ProcessComm, then the arguments.
"""

import atexit
import contextlib
import importlib
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

COMM_TIMEOUT_S = 60.0


class RankError(AssertionError):
    """A rank of a pool raised; the message is its traceback. The pool is thrown away."""


@cache
def context(device: str = "cpu") -> BaseContext:
    """Processes forked from a server that has imported what all of them need. A GPU does not work in forked ones."""
    if device == "cuda":
        return multiprocessing.get_context("spawn")
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["tests.comm.preload"])
    with contextlib.chdir(Path(__file__).parents[2]):  # a test may be elsewhere, and would not find `tests` there
        forkserver.ensure_running()
    return made


def environment(rank: int, size: int, port: int, *, agent: bool) -> dict[str, str]:
    """torchrun's variables, as those of ranks on one machine. agent: the store is served by the caller."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": str(agent),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


class Pool:
    """`size` ranks, waiting for calls."""

    def __init__(self, size: int, device: str) -> None:
        forks: Any = context(device)
        # The tests' process serves the store, as torchrun's agent does: so no port can be taken by somebody else.
        self.store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
        self.ends: list[Connection] = []
        self.processes: list[BaseProcess] = []
        for rank in range(size):
            here, there = forks.Pipe()
            variables = environment(rank, size, self.store.port, agent=True)
            process = forks.Process(target=_serve, args=(there, variables, device), daemon=True)
            process.start()
            there.close()
            self.ends.append(here)
            self.processes.append(process)

    def run(self, call: bytes, timeout_s: float) -> list[object]:
        """What each rank returns. RankError where one raises, ends or does not answer."""
        for end in self.ends:
            end.send_bytes(call)
        results: dict[int, object] = {}
        while len(results) < len(self.ends):
            open_ends = [end for rank, end in enumerate(self.ends) if rank not in results]
            ready = wait(open_ends, timeout_s)
            if not ready:
                raise RankError(f"ranks {sorted(set(range(len(self.ends))) - set(results))} did not return")
            for end in ready:
                assert isinstance(end, Connection)
                rank = self.ends.index(end)
                try:
                    done, value = pickle.loads(end.recv_bytes())
                except EOFError:
                    raise RankError(f"rank {rank} of {len(self.ends)} has ended") from None
                if not done:
                    raise RankError(f"rank {rank} of {len(self.ends)}: {value}")
                results[rank] = value
        return [results[rank] for rank in range(len(self.ends))]

    def end(self) -> None:
        """Ends the processes."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


_pools: dict[tuple[int, str], Pool] = {}


def run_ranks(size: int, function: str, *args: object, timeout_s: float = 120.0, device: str = "cpu") -> list[object]:
    """Calls `package.module:function` with a ProcessComm and `args` on `size` processes; their results, by rank.

    Arguments and results are pickled. timeout_s: for the slowest rank. device: cuda for ranks that share the GPUs.
    """
    key = size, device
    if key in _pools and not all(process.is_alive() for process in _pools[key].processes):
        _pools.pop(key).end()  # a rank has ended while nothing was asked of it
    if key not in _pools:
        _pools[key] = Pool(size, device)
    try:
        return _pools[key].run(pickle.dumps((function, args)), timeout_s)
    except BaseException:
        _pools.pop(key).end()  # its ranks may be anywhere
        raise


@atexit.register
def _end() -> None:
    while _pools:
        _pools.popitem()[1].end()


def _serve(end: Connection, variables: dict[str, str], device: str) -> None:
    os.environ.update(variables)
    import torch

    from layerwise.comm.start import leave, start

    torch.set_num_threads(1)
    comm = None
    while True:
        try:
            name, args = pickle.loads(end.recv_bytes())
        except EOFError:
            leave(0)
        try:
            module, _, attribute = name.partition(":")
            function: Callable[..., object] = getattr(importlib.import_module(module), attribute)
            comm = comm or start(COMM_TIMEOUT_S, device=device)
            torch.manual_seed(0)  # whatever ran here before: the ranks' models start alike, in any order of the tests
            answer = pickle.dumps((True, function(comm, *args)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        end.send_bytes(answer)
