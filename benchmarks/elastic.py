"""python -m benchmarks.elastic: trainings whose ranks and agents die, stop and come back end as if undisturbed.

Two of torchrun's agents on this machine (`--nnodes 1:2 --max-restarts 3`, c10d) train a small network in float64 with
`layerwise run --replan --resume`. Each run has a fault at a random step. It must end with the losses and the parameters
of one process that nothing disturbed, to 1e-9, and may repeat at most one interval of checkpoints.

Noticed: from the fault until another rank has ended. Restarted: until all ranks have met again, PyTorch's import
included. Planned: until they have a plan. Resumed: until the first step is taken.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, tensor
from torch.distributed import TCPStore
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import tree_leaves

from layerwise.checkpoint.step_folders import latest

MODEL, STEPS, EVERY = "mlp:64x32x10", 300, 25
LOST = EVERY + 4  # steps: a checkpoint counts once it is written, beside a step or two
TIMEOUT_S, LIMIT_S, ALLOWED = 8.0, 240.0, 1e-9
RANK, AGENT, STOPPED, REJOINS, SAVING = FAULTS = (
    "rank killed",
    "agent killed with its ranks",
    "rank stopped",
    "agent killed, and another joins",
    "rank killed while it saves",
)
Event = dict[str, Any]


def job(file: str, command: list[str]) -> None:
    """A rank: `layerwise run`, which notes in the file when it does what."""
    from layerwise.cli import run_main
    from layerwise.run import __main__ as room
    from layerwise.train.saving import Saving
    from layerwise.train.session import Session

    out = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    rank, world = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    who = {"pid": os.getpid(), "agent": os.getppid(), "rank": rank, "world": world}

    def note(what: str, **more: object) -> None:
        os.write(out, (json.dumps({"what": what, "at": time.time(), **who, **more}) + "\n").encode())

    start, session, train, after = room.start, room._session, Session.train, Saving.after

    def met(timeout_s: float) -> Any:
        comm = start(timeout_s)
        note("met")
        return comm

    def planned(*args: Any) -> Session:
        note("planned")
        return session(*args)

    def told(self: Session, steps: int) -> Any:
        for step in train(self, steps):
            note("loss", step=step.number, loss=step.loss)
            yield step

    def paced(self: Saving, done: int) -> None:
        note("step", step=done)
        time.sleep(float(os.environ["PACE_S"]))
        after(self, done)

    room.start, room._session, Session.train, Saving.after = met, planned, told, paced  # type: ignore[method-assign, assignment]
    sys.exit(run_main(room.main, command))


class Run:
    """One training: its agents, and what its ranks note."""

    def __init__(self, folder: Path, plan: Path, each: int, port: int, pace_s: float) -> None:
        folder.mkdir()
        self.folder, self.plan, self.each, self.port, self.pace_s = folder, plan, each, port, pace_s
        self.file, self.checkpoints = folder / "events", folder / "ck"
        self.agents: list[subprocess.Popen[bytes]] = []

    def start(self, launcher: str = "") -> None:
        command = f"{sys.executable} -W ignore {launcher} -m benchmarks.elastic --job {self.file} {self.plan} --replan "
        command += f"--data digits --dtype float64 --optimizer momentum --steps {STEPS} --timeout {TIMEOUT_S} "
        command += f"--checkpoint {self.checkpoints} --checkpoint-every {EVERY} --resume"
        variables = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        variables |= {"PACE_S": str(self.pace_s), "LAYERWISE_CACHE": str(self.plan.parent / "cache")}
        with (self.folder / "output").open("ab") as out:
            self.agents.append(subprocess.Popen(command.split(), env=os.environ | variables, stdout=out, stderr=out))

    def join(self) -> None:
        """One more of torchrun's agents."""
        self.start(
            f"-m torch.distributed.run --nnodes 1:2 --nproc-per-node {self.each} --max-restarts 3 --rdzv-backend c10d "
            f"--rdzv-endpoint localhost:{self.port} --rdzv-id {self.folder.name} --local-addr localhost --rdzv-conf "
            "is_host=0,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
        )

    def events(self, what: str, since: float = 0.0) -> list[Event]:
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        return [e for e in map(json.loads, lines) if e["what"] == what and e["at"] > since]

    def wait(self, come: Callable[[], Any], poll_s: float = 0.02) -> Any:
        """The first result that is not empty. SystemExit where there is none, with what the ranks have said."""
        until = time.monotonic() + LIMIT_S
        while not (result := come()):
            if time.monotonic() > until or all(agent.poll() is not None for agent in self.agents):
                raise SystemExit((self.folder / "output").read_text()[-6000:] + "\nnot through")
            time.sleep(poll_s)
        return result

    def at(self, step: int, agents: int) -> list[Event]:
        """Waits until the ranks of so many agents have taken a step; returns a note of each."""

        def ranks() -> list[Event]:
            there = [e for e in self.events("planned") if e["world"] == agents * self.each and not gone(e["pid"])]
            pids = [e["pid"] for e in there if len(there) == e["world"]]
            return there if any(e["pid"] in pids and e["step"] >= step for e in self.events("step")) else []

        return self.wait(ranks)  # type: ignore[no-any-return]

    def recovered(self, fault_s: float, ranks: list[Event], hit: set[int]) -> tuple[str, ...]:
        """Seconds to notice, to restart, to plan and to resume; steps taken once more."""
        old = {e["pid"] for e in ranks}
        self.wait(lambda: any(gone(pid) for pid in old - hit or old))
        ended_s = time.time()
        taken = self.wait(lambda: [e for e in self.events("step", ended_s) if not e["rank"] and e["pid"] not in old])[0]
        met, planned = (self.events(what, ended_s) for what in ("met", "planned"))
        first = [next(e["at"] for e in events if e["pid"] == taken["pid"]) for events in (met, planned)]
        repeated = max(e["step"] for e in self.events("step") if e["pid"] in old) - taken["step"] + 1
        assert repeated <= LOST, f"{repeated} steps were lost"
        times = [fault_s, ended_s, *first, taken["at"]]
        return *(f"{end - begin:.1f}" for begin, end in pairwise(times)), str(repeated)

    def end(self) -> None:
        """Ends what is left of it."""
        for agent in self.agents:
            agent.kill()
        for pid in {e["pid"] for e in self.events("met")}:
            with suppress(OSError):
                if str(self.file) in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGKILL)

    def apart(self, alone: Run) -> float:
        """The largest difference from a run that nothing disturbed, of losses, parameters and the optimizer's state."""
        wanted = {e["step"]: e["loss"] for e in alone.events("loss")}
        losses = self.events("loss")
        assert losses[-1]["step"] == STEPS, f"the last loss is of step {losses[-1]['step']}"
        mine, other = (tree_leaves(run.state()) for run in (self, alone))
        pairs = [tuple(tensor([x], dtype=torch.float64) for x in (e["loss"], wanted[e["step"]])) for e in losses]
        pairs += [(a, b) for a, b in zip(mine, other, strict=True) if isinstance(b, Tensor)]
        return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-300)) for a, b in pairs)

    def state(self) -> Any:
        """What the last checkpoint has."""
        last = latest(self.checkpoints)
        assert last is not None
        assert last.name == f"step-{STEPS:08d}", last
        dcp_to_torch_save(last, self.folder / "state.pt")
        return torch.load(self.folder / "state.pt")


def gone(pid: int) -> bool:
    """True for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def disturbed(run: Run, fault: str, chance: random.Random) -> list[tuple[str, ...]]:
    """Trains with this fault; the rows of the table."""
    run.join()
    run.join()
    step = chance.randrange(EVERY, STEPS // 2)
    ranks = run.at(step - step % EVERY - 2 if fault == SAVING else step, 2)
    victim = chance.choice(ranks)
    hit, dead = {victim["pid"]}, victim["agent"] if fault in (AGENT, REJOINS) else None
    if dead is not None:
        hit = {e["pid"] for e in ranks if e["agent"] == dead}
        os.kill(dead, signal.SIGKILL)
    if fault == SAVING:
        run.wait(lambda: list(run.checkpoints.glob(".step-*.tmp-*")), 0.0002)
    fault_s = time.time()
    for pid in hit:
        os.kill(pid, signal.SIGSTOP if fault == STOPPED else signal.SIGKILL)
    rows = [(f"{fault}: {2 * run.each} ranks, step {step}", *run.recovered(fault_s, ranks, hit))]
    if fault == REJOINS:
        ranks = run.at(0, 1)
        joined_s = time.time()
        run.join()
        rows.append(("  it joins (its start counts)", *run.recovered(joined_s, ranks, set())))
    codes = [agent.wait(LIMIT_S) for agent in run.agents if agent.pid != dead]
    assert not any(codes), f"{codes}: {(run.folder / 'output').read_text()[-6000:]}"
    return rows


def main() -> None:
    """Run and print."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--runs", type=int, default=10)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--only", choices=FAULTS)
    p.add_argument("--job", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.job:
        job(args.job[0], args.job[1:])
    chance, store = random.Random(args.seed), TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    columns = ("fault", "noticed", "restarted", "planned", "resumed", "steps lost", "apart")
    table = Table(*columns, title=f"Seconds; {STEPS} steps, a checkpoint every {EVERY}", title_justify="left", box=None)
    with tempfile.TemporaryDirectory() as name:
        plan = Path(name) / "plan.json"
        flags = ["--gpus", "2", "--profile", "cpu", "--global-batch", "16", "--out", str(plan)]
        search = [sys.executable, "-W", "ignore", "-m", "layerwise.search", MODEL, *flags]
        subprocess.run(search, check=True, stdout=subprocess.DEVNULL)
        alone = Run(Path(name) / "alone", plan, 1, store.port, 0.0)
        alone.start()
        assert alone.agents[0].wait(LIMIT_S) == 0, (alone.folder / "output").read_text()
        for number in range(args.runs):
            fault = args.only or FAULTS[number % len(FAULTS)]
            each, pace_s = 1 + number // len(FAULTS) % 2, 0.1 if fault == REJOINS else 0.02
            run = Run(Path(name) / f"run{number}", plan, each, store.port, pace_s)
            try:
                rows = disturbed(run, fault, chance)
            finally:
                run.end()
            apart = run.apart(alone)
            for row in rows:
                table.add_row(*row, f"{apart:.0e}")
            assert apart <= ALLOWED, f"{fault}: {apart} apart"
            print(rows, f"{apart:.0e}", file=sys.stderr, flush=True)
    Console(width=150, highlight=False).print(table)


if __name__ == "__main__":
    main()
