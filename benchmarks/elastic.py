"""python -m benchmarks.elastic: trainings whose ranks and nodes die, stop, are cut off and rejoin lose next to nothing.

Four of torchrun's agents (`--nnodes 1:4`, c10d), on the nodes of an emulated cluster (needs root: see
benchmarks.emulate), train a small network in float64 with `layerwise run --replan --resume`. Each run has faults at
random steps. It must end with the losses and the parameters of one process that nothing disturbed, to 1e-9, and each
fault may repeat at most one interval of checkpoints. Ranks that are cut off must end by themselves.

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
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, tensor
from torch.distributed import TCPStore
from torch.utils._pytree import tree_leaves

from benchmarks.common.nodes import Cluster, apart
from layerwise.checkpoint.reader import Reader
from layerwise.checkpoint.step_folders import latest

MODEL, STEPS, EVERY, NODES = "mlp:64x32x10", 400, 25, 4
LOST = EVERY + 4  # steps: a checkpoint counts once it is written, beside a step or two
TIMEOUT_S, LIMIT_S, ALLOWED = 12.0, 240.0, 1e-9
SWITCH = "10.77.255.254"  # where the rendezvous is, which no fault hits
RANK, NODE, STOPPED, SAVING, CUT, JOINS = (
    "rank killed", "node killed", "rank stopped", "rank killed while it saves", "two nodes cut off", "a node joins"
)  # fmt: skip
RUNS = (
    (NODE, CUT, JOINS),
    (RANK,),
    (CUT, JOINS),
    (STOPPED,),
    (SAVING,),
    (NODE, JOINS),
    (CUT,),
    (RANK, NODE),
    (SAVING, CUT),
    (NODE, CUT, JOINS),
)
Event = dict[str, Any]


def job(file: str, command: list[str]) -> None:
    """A rank: `layerwise run`, which notes in the file when it does what."""
    from layerwise.cli import run_main
    from layerwise.commands import run as room
    from layerwise.train.session import Session

    out = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    rank, world = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    who = {"pid": os.getpid(), "agent": os.getppid(), "rank": rank, "world": world}

    def note(what: str, **more: object) -> None:
        os.write(out, (json.dumps({"what": what, "at": time.time(), **who, **more}) + "\n").encode())

    start, session, train, after = room.start, room._session, Session.train, Session.after

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

    def paced(self: Session, done: int) -> None:
        note("step", step=done)
        time.sleep(float(os.environ["PACE_S"]))
        after(self, done)

    room.start, room._session, Session.train, Session.after = met, planned, told, paced  # type: ignore[method-assign, assignment]
    sys.exit(run_main(room.main, command))


class Run:
    """One training: its agents, and what its ranks note."""

    def __init__(self, folder: Path, plan: Path, cluster: Cluster, port: int, pace_s: float = 0.0) -> None:
        folder.mkdir()
        self.folder, self.plan, self.cluster, self.port, self.pace_s = folder, plan, cluster, port, pace_s
        self.file, self.checkpoints = folder / "events", folder / "ck"
        self.agents: dict[int, subprocess.Popen[bytes]] = {}  # of nodes that no fault has hit
        self.lost: list[subprocess.Popen[bytes]] = []

    def start(self, node: int, launcher: str = "") -> None:
        command = f"{sys.executable} -W ignore {launcher} -m benchmarks.elastic --job {self.file} {self.plan} --replan "
        command += f"--data digits --dtype float64 --optimizer momentum --steps {STEPS} --timeout {TIMEOUT_S} "
        command += f"--checkpoint {self.checkpoints} --checkpoint-every {EVERY} --resume"
        variables = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        variables |= {"PACE_S": str(self.pace_s), "LAYERWISE_CACHE": str(self.plan.parent / "cache")}
        variables |= {"GLOO_SOCKET_IFNAME": "eth0"} if launcher else {}
        with (self.folder / "output").open("ab") as out:
            self.agents[node] = subprocess.Popen(
                command.split(), env=os.environ | variables, stdout=out, stderr=out,
                preexec_fn=(lambda: self.cluster.enter(node)) if launcher else None,
            )  # fmt: skip

    def join(self, node: int) -> None:
        """One of torchrun's agents, of this node."""
        self.start(
            node,
            f"-m torch.distributed.run --nnodes 1:{NODES} --nproc-per-node 1 --max-restarts 10 --rdzv-backend c10d "
            f"--rdzv-endpoint {SWITCH}:{self.port} --rdzv-id {self.folder.name} "
            f"--local-addr {self.cluster.address(node)} --rdzv-conf "
            "is_host=0,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3",
        )

    def events(self, what: str, since: float = 0.0) -> list[Event]:
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        return [e for e in map(json.loads, lines) if e["what"] == what and e["at"] > since]

    def wait(self, come: Callable[[], Any], poll_s: float = 0.02) -> Any:
        """The first result that is not empty. SystemExit where there is none, with what the ranks have said."""
        until = time.monotonic() + LIMIT_S
        while not (result := come()):
            if time.monotonic() > until or all(agent.poll() is not None for agent in self.agents.values()):
                raise SystemExit(f"{self.said()}\nnot through")
            time.sleep(poll_s)
        return result

    def said(self) -> str:
        """The last that agents and ranks have printed, but for the steps."""
        lines = (self.folder / "output").read_text().splitlines()
        return "\n".join([line for line in lines if not line.startswith("step ")][-60:])

    def at(self, step: int) -> list[Event]:
        """Waits until the ranks of all agents have taken a step; returns a note of each."""

        def ranks() -> list[Event]:
            agents = {agent.pid for agent in self.agents.values()}
            there = [e for e in self.events("planned") if e["world"] == len(agents) and not gone(e["pid"])]
            there = [e for e in there if e["agent"] in agents]
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
        for agent in (*self.agents.values(), *self.lost):
            agent.kill()
        for pid in {e["pid"] for e in self.events("met")}:
            with suppress(OSError):
                if str(self.file) in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGKILL)
        for node in range(NODES):
            self.cluster.set_link(node, True)

    def off(self, alone: Run) -> float:
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
        reader = Reader(last)
        return {name: reader.full(name) for name in sorted(reader.tensors)}


def gone(pid: int) -> bool:
    """True for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def disturbed(run: Run, faults: tuple[str, ...], chance: random.Random) -> Iterator[tuple[str, ...]]:
    """Trains with these faults, one after the other; the rows of the table."""
    for node in range(NODES):
        run.join(node)
    for number, fault in enumerate(faults):
        step = EVERY + 60 * number + chance.randrange(50) if fault != JOINS else 0
        ranks = run.at(step - step % EVERY - 2 if fault == SAVING else step)
        if fault == SAVING:
            run.wait(lambda: list(run.checkpoints.glob(".step-*.tmp-*")), 0.0002)
        begun_s, count = time.time(), len(ranks)
        hit = inflict(run, fault, chance, ranks)
        yield f"{fault}: {count} ranks, step {step}", *run.recovered(begun_s, ranks, hit)
        if fault == CUT:
            run.wait(lambda hit=hit: all(map(gone, hit)))  # by themselves
    codes = [agent.wait(LIMIT_S) for agent in run.agents.values()]
    assert not any(codes), f"{codes}: {run.said()}"


def inflict(run: Run, fault: str, chance: random.Random, ranks: list[Event]) -> set[int]:
    """The fault itself; returns the processes of the ranks that are hit."""
    if fault == JOINS:
        node = min(set(range(NODES)) - run.agents.keys())
        for agent in run.lost:  # what still waits there for the network: the node has started anew
            agent.kill()
        run.cluster.set_link(node, True)
        run.join(node)
        return set()
    victims = chance.sample(ranks, 2 if fault == CUT else 1)
    nodes = [node for node, agent in run.agents.items() if agent.pid in {e["agent"] for e in victims}]
    if fault in (NODE, CUT):
        run.lost += [run.agents.pop(node) for node in nodes]
    if fault == CUT:
        for node in nodes:
            run.cluster.set_link(node, False)
    elif fault == NODE:
        run.lost[-1].kill()
    for victim in victims if fault != CUT else ():
        os.kill(victim["pid"], signal.SIGSTOP if fault == STOPPED else signal.SIGKILL)
    return {e["pid"] for e in victims}


def runs(args: argparse.Namespace) -> int:
    """Runs and prints, in the switch of the cluster."""
    cluster = Cluster(NODES, None)
    cluster.build()
    cluster.call(f"ip addr add {SWITCH}/16 dev br0")
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    columns = ("fault", "noticed", "restarted", "planned", "resumed", "steps lost", "apart")
    table = Table(*columns, title=f"Seconds; {STEPS} steps, a checkpoint every {EVERY}", title_justify="left", box=None)
    with tempfile.TemporaryDirectory() as name:
        plan = Path(name) / "plan.json"
        flags = ["--gpus", "2", "--profile", "cpu", "--global-batch", "16", "--out", str(plan)]
        search = [sys.executable, "-W", "ignore", "-m", "layerwise.search", MODEL, *flags]
        subprocess.run(search, check=True, stdout=subprocess.DEVNULL)
        alone = Run(Path(name) / "alone", plan, cluster, store.port)
        alone.start(0)
        assert alone.agents[0].wait(LIMIT_S) == 0, (alone.folder / "output").read_text()
        for number in range(args.first, args.first + args.runs):
            faults, chance = RUNS[number % len(RUNS)], random.Random(f"{args.seed} {number}")
            run = Run(Path(name) / f"run{number}", plan, cluster, store.port, 0.2 if JOINS in faults else 0.05)
            try:
                rows = list(disturbed(run, faults, chance))
            finally:
                run.end()
            off = run.off(alone)
            for row in rows:
                table.add_row(*row, f"{off:.0e}")
            assert off <= ALLOWED, f"{faults}: {off} off"
            print(rows, f"{off:.0e}", file=sys.stderr, flush=True)
    Console(width=150, highlight=False).print(table)
    return 0


def main() -> int:
    """Parses, and runs in namespaces of its own, whose processes all end with it."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--runs", type=int, default=10)
    p.add_argument("--first", type=int, default=0, metavar="N", help="the number of the first run: each has its faults")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--job", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.job:
        job(args.job[0], args.job[1:])
    return apart(lambda: runs(args))


if __name__ == "__main__":
    sys.exit(main())
