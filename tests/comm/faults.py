"""Runs of a few processes in which something goes wrong: what each rank says, and how it ends."""

import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from layerwise.cli import run_main
from layerwise.comm.base import Comm
from layerwise.comm.process import ProcessComm
from layerwise.comm.start import join_default_group, leave, start
from tests.comm.pool import context, environment

Scenario = Callable[[Comm], None]
PATIENCE_S = 60.0  # with a run


@dataclass(frozen=True)
class End:
    """How a rank ended. seconds: since the start of the run."""

    code: int | None  # negative: by a signal; None: it had to be killed by the test
    stderr: str
    seconds: float

    @property
    def last(self) -> str:
        """The last line."""
        return self.stderr.rstrip().rpartition("\n")[2]


LOST = 255  # what multiprocessing says where its server did not tell a process's exit code in time


class Run:
    """Ranks of a world of `size` that all do `scenario`; each of `arriving` is started."""

    def __init__(
        self,
        scenario: Scenario,
        size: int,
        *,
        arriving: Sequence[int] | None = None,
        timeout_s: float = 60.0,
        **variables: str,
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.began = time.monotonic()
        self.processes: dict[int, ForkServerProcess] = {}
        self.outputs: dict[int, Path] = {}
        for rank in range(size) if arriving is None else arriving:
            handle, name = tempfile.mkstemp(prefix=f"rank{rank}-")
            os.close(handle)
            self.outputs[rank] = Path(name)
            place = environment(rank, size, port, agent=False)
            place |= {name: value.replace("RANK", str(rank)) for name, value in variables.items()}
            process = context().Process(target=_rank, args=(scenario, place, timeout_s, name), daemon=True)
            process.start()
            self.processes[rank] = process

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Sends a signal to a rank."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def said(self, rank: int, text: str) -> None:
        """Waits until a rank's stderr has this text."""
        until = time.monotonic() + 20
        while text not in self.outputs[rank].read_text():
            assert time.monotonic() < until, self.outputs[rank].read_text()
            time.sleep(0.02)

    def ends(self, stopped: Collection[int] = ()) -> dict[int, End]:
        """Waits for all, but for those that stay stopped; kills what does not end."""
        found: dict[int, End] = {}
        until = self.began + PATIENCE_S
        while len(found) < len(self.processes):
            left = self.processes.keys() - found.keys()
            for rank, process in self.processes.items():
                over = time.monotonic() > until or left <= set(stopped)
                if rank not in found and (process.exitcode is not None or over):
                    code = process.exitcode
                    if code == LOST and _code_of(self.outputs[rank]).exists():
                        code = int(_code_of(self.outputs[rank]).read_text())
                    process.kill()
                    found[rank] = End(code, self.outputs[rank].read_text(), time.monotonic() - self.began)
            time.sleep(0.02)
        for rank, process in self.processes.items():
            process.join()
            self.outputs[rank].unlink()
            _code_of(self.outputs[rank]).unlink(missing_ok=True)
        return found


def _rank(scenario: Scenario, variables: dict[str, str], timeout_s: float, stderr: str) -> None:
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_APPEND), 2)
    os.environ.update(variables)
    torch.set_num_threads(1)

    def main(_: Sequence[str] | None) -> None:
        with start(timeout_s) as comm:
            scenario(comm)

    try:
        code = run_main(main)
    except BaseException:
        traceback.print_exc()
        code = 1
    _code_of(Path(stderr)).write_text(str(code))
    leave(code)


def _code_of(stderr: Path) -> Path:
    """Where a rank writes its exit code."""
    return stderr.with_suffix(".code")


def ring(comm: Comm, steps: int = 10**6, at: Callable[[int], None] = lambda step: None) -> None:
    """Every rank sends to the next, again and again; `at` is called in every step."""
    there, back = torch.ones(1000), torch.empty(1000)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for step in range(steps):
        comm.at(step, "ring")
        at(step)
        comm.exchange([(right, there)], [(left, back)], "transfers", "ring").wait()
        time.sleep(0.01)


def rank_1_is_killed(comm: Comm) -> None:
    """In step 150, after more than a second."""
    ring(comm, at=lambda step: os.kill(os.getpid(), signal.SIGKILL) if comm.rank == 1 and step == 150 else None)


def rank_3_of_a_group_is_killed(comm: Comm) -> None:
    """Ranks 2 and 3 are a group; the others are another one, which goes on to its end."""
    group = join_default_group(comm.device, members=(0, 1) if comm.rank < 2 else (2, 3))
    if comm.rank > 1:
        ring(group, at=lambda step: os.kill(os.getpid(), signal.SIGKILL) if comm.rank == 3 and step == 150 else None)
    ring(group, 1000)
    leave(0)


def rank_0_is_killed(comm: Comm) -> None:
    """The one that serves the store."""
    ring(comm, at=lambda step: os.kill(os.getpid(), signal.SIGKILL) if comm.rank == 0 and step == 150 else None)


def cascade(comm: Comm) -> None:
    """Rank 0 waits for 2, 2 waits for 1, and 1 is killed."""
    comm.at(0, "chain")
    if comm.rank == 1:
        time.sleep(1.3)
        os.kill(os.getpid(), signal.SIGKILL)
    comm.exchange([], [({0: 2, 2: 1}[comm.rank], torch.empty(3))], "transfers", "chain").wait()


def in_flight(comm: Comm) -> None:
    """Rank 1 is killed while messages are under way that nobody waits for yet."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for step in range(10**6):
        comm.at(step, "skip")
        handles = []
        for what in ("skip 1", "skip 2"):
            there, back = torch.ones(100_000), torch.empty(100_000)
            handles.append(comm.exchange([(right, there)], [(left, back)], "transfers", what))
        time.sleep(0.01)
        if comm.rank == 1 and step == 150:
            os.kill(os.getpid(), signal.SIGKILL)
        for handle in reversed(handles):
            handle.wait()


def in_all_reduce(comm: Comm) -> None:
    """Rank 1 is killed while all add up."""
    total = torch.ones(100_000)
    for step in range(10**6):
        comm.at(step, "weights")
        if comm.rank == 1 and step == 150:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.all_reduce(total, (0, 1, 2), "sync", "gradients").wait()
        time.sleep(0.01)


def rank_1_fails(comm: Comm) -> None:
    """Of its own."""

    def fail(step: int) -> None:
        if comm.rank == 1 and step == 150:
            raise KeyError("no such sample")

    ring(comm, at=fail)


def rank_1_ends_early(comm: Comm) -> None:
    """After three steps, as a loop over a shorter data set does."""
    for step in range(1, 4 if comm.rank == 1 else 10):
        comm.at(step, "the model")
        comm.tell([step])()


def rank_0_fails(comm: Comm) -> None:
    """Of its own, and the store goes with it."""

    def fail(step: int) -> None:
        if comm.rank == 0 and step == 150:
            raise KeyError("no such sample")

    ring(comm, at=fail)


def rank_1_sticks(comm: Comm) -> None:
    """Alive, but does not go on."""
    ring(comm, at=lambda step: time.sleep(100) if comm.rank == 1 and step == 150 else None)


def other_plans(comm: Comm) -> None:
    """Ranks 0 and 1 both want to receive."""
    comm.at(3, "conv1" if comm.rank == 0 else "conv2")
    if comm.rank < 2:
        comm.exchange([], [(1 - comm.rank, torch.empty(3))], "transfers", f"conv{comm.rank + 1}").wait()


def goes_on(comm: Comm) -> None:
    """Until somebody ends it."""
    ring(comm, at=lambda step: print("under way", file=os.fdopen(2, "w", closefd=False)) if step == 5 else None)


def ends_well(comm: Comm) -> None:
    """With 20 steps, in which a worker process (as a data loader has) is sent SIGTERM."""
    pid = os.fork()
    if not pid:
        time.sleep(60)
    os.kill(pid, signal.SIGTERM)
    assert os.waitpid(pid, 0)[1] == signal.SIGTERM
    ring(comm, 20)
    comm.handshake({"plan": "abc", "torch": torch.__version__})


def overdue_on_the_gpu(comm: Comm) -> None:
    """As with NCCL: rank 1 never starts what the others have started; only their GPUs wait for it."""

    class Work:
        def is_completed(self) -> bool:
            return False

    assert isinstance(comm, ProcessComm)
    comm.at(3, "weights")
    if comm.rank != 1:
        comm._last = (cast("dist.Work", Work()), "gradients", time.monotonic())
    time.sleep(100)


def only_rank_0_goes_on(comm: Comm) -> None:
    """The others are stopped, as if the network of rank 0 were cut: it serves the store and hears nobody."""
    ring(comm, at=lambda step: os.kill(os.getpid(), signal.SIGSTOP) if comm.rank and step == 150 else None)


def rank_1_is_killed_at_the_end(comm: Comm) -> None:
    """When all have done their part: between the last two barriers."""
    if comm.rank == 1:
        assert isinstance(comm, ProcessComm)
        comm._watch.stop = lambda: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]


def joins_while_rank_0_is_stopped(comm: Comm) -> None:
    """With torch.distributed's default group, for which no guard ends a process; rank 0 serves its store."""
    if comm.rank == 0:
        time.sleep(2)
        os.kill(os.getpid(), signal.SIGSTOP)
    join_default_group(comm.device, 3.0)


def differs(comm: Comm) -> None:
    """Rank 1 has another plan."""
    comm.handshake({"torch": torch.__version__, "plan": "b1" if comm.rank == 1 else "a0"})
