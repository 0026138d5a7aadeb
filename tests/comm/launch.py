"""Runs a command or a script on several ranks, as torchrun does, but forked from a server that has torch imported.

torchrun's own ranks take ten seconds, most of them for imports. What it adds (its agent, the ends of the ranks) is
tested once for every command, by `torchrun` here.
"""

import atexit
import os
import runpy
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.distributed import TCPStore

from layerwise.comm.start import leave
from tests.comm.pool import context, environment

PATIENCE_S = 120.0
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Done:
    """How a run ended, by rank."""

    codes: list[int | None]
    stdout: list[str]
    stderr: list[str]


def launch(command: Sequence[str], ranks: int = 2, variables: Mapping[str, str] | None = None) -> Done:
    """Runs `-m MODULE ARGUMENTS...` or `SCRIPT.py ARGUMENTS...` on so many processes, here; a rank alone has no peers.

    variables: more of the environment. A rank that does not end in two minutes is killed; its code is None.
    """
    forks = context()
    # The caller serves the store, as torchrun's agent does.
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    processes = []
    with TemporaryDirectory() as folder:
        for rank in range(ranks):
            mine = environment(rank, ranks, store.port, agent=True) if ranks > 1 else {}
            args = (list(command), str(Path.cwd()), mine | dict(variables or {}), f"{folder}/{rank}")
            processes.append(forks.Process(target=_rank, args=args, daemon=True))
        try:
            for process in processes:
                process.start()
            for process in processes:
                wait([process.sentinel], PATIENCE_S)
            codes = [process.exitcode for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.join()
        stdout, stderr = (
            [Path(f"{folder}/{rank}.{name}").read_text() for rank in range(ranks)] for name in ("stdout", "stderr")
        )
    return Done(codes, stdout, stderr)


def torchrun(command: Sequence[str], ranks: int = 2, options: Sequence[str] = ("--standalone",)) -> Done:
    """What `torchrun OPTIONS COMMAND` does: its agent is forked as ranks are elsewhere, and starts the ranks by itself.

    In the result the agent and its ranks are one: a code, an output and an error output.
    """
    agent = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *options, *command]
    return launch(agent, 1, {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"})


def _rank(command: list[str], folder: str, variables: dict[str, str], file: str) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{file}.{name}", os.O_WRONLY | os.O_CREAT), number)
    os.environ.update(variables)
    os.chdir(folder)
    torch.set_num_threads(1)
    code: int | str | None = 0
    try:
        if command[0] == "-m":
            sys.path.insert(0, folder)
            sys.argv = command[1:]
            sys.modules.pop(f"{command[1]}.__main__", None)  # imported by the server, here it is run
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(command[0]).parent.resolve()))
            sys.argv = command
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        traceback.print_exc()
        code, sys.last_value = 1, error
    atexit._run_exitfuncs()  # the ranks wait for each other: a process of multiprocessing would not
    leave(code if isinstance(code, int) else int(bool(code)))
