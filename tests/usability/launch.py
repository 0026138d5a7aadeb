"""Runs a script on several processes, as torchrun does, but forked from a server that has torch imported already."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from layerwise.comm.start import leave
from tests.comm.pool import context, environment
from tests.usability.images import KEPT

SCRIPTS = Path(__file__).parent / "scripts"
PATIENCE_S = 120.0


def launch(script: str, ranks: int, runs: Sequence[tuple[str, ...]], folder: Path) -> list[str]:
    """Runs `scripts/<script>.py` on `ranks` processes, once with each of these arguments; what rank 0 prints each time.

    folder: has the data sets that it reads, and what layerwise measures of the machine. AssertionError, with its
    traceback, where a rank fails.
    """
    forks = context()
    # A store for each run: in the last one's the ranks would find the addresses of a network that is gone.
    patience = timedelta(seconds=60)
    stores = [TCPStore("127.0.0.1", 0, None, True, patience, wait_for_workers=False) for _ in runs]
    ports = [str(store.port) for store in stores]
    ends, processes = [], []
    for rank in range(ranks):
        here, there = forks.Pipe(duplex=False)
        variables = environment(rank, ranks, stores[0].port, agent=True) if ranks > 1 else {}
        variables |= {KEPT: str(folder), "LAYERWISE_CACHE": str(folder)}
        args = there, variables, str(SCRIPTS / f"{script}.py"), runs, ports if ranks > 1 else []
        process = forks.Process(target=_run, args=args, daemon=True)
        process.start()
        there.close()
        ends.append(here)
        processes.append(process)
    printed: list[list[str]] = []
    try:
        for rank, end in enumerate(ends):
            assert end.poll(PATIENCE_S), f"{script}: rank {rank} of {ranks} is not done after {PATIENCE_S:g} s"
            try:
                told = end.recv()
            except EOFError:
                told = "it has ended"
            assert isinstance(told, list), f"{script}: rank {rank} of {ranks}: {told}"
            printed.append(told)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return printed[0]


def _keep_groups() -> None:
    """torch 2.13 deadlocks now and then where the last reference to a gloo group goes with a DDP model: keep one."""
    kept, destroy = [], dist.destroy_process_group

    def destroy_process_group() -> None:
        kept.append(dist.group.WORLD)
        destroy()

    dist.destroy_process_group = destroy_process_group


def _run(
    end: Connection, variables: dict[str, str], script: str, runs: Sequence[tuple[str, ...]], ports: Sequence[str]
) -> None:
    os.environ.update(variables)
    torch.set_num_threads(1)
    _keep_groups()
    printed = []
    try:
        for number, argv in enumerate(runs):
            if ports:
                os.environ["MASTER_PORT"] = ports[number]
            sys.argv = [script, *argv]
            with contextlib.redirect_stdout(io.StringIO()) as out:
                runpy.run_path(script, run_name="__main__")
            printed.append(out.getvalue())
        atexit._run_exitfuncs()  # the ranks wait for each other: a process of multiprocessing would not
        end.send(printed)
    except BaseException:
        end.send(traceback.format_exc())
    leave(0)
