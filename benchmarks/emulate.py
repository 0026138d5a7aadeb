"""python -m benchmarks.emulate ... -- COMMAND: one process a rank on an emulated cluster of rate-limited nodes.

Each node is a Linux network namespace. Its only way out is `eth0`, a veth cable to one bridge (a non-blocking switch).
Every cable is a full-duplex NIC of --rate: a token bucket shapes what leaves the node, another what the switch port
sends to it, so that incast is limited too. Ranks of one node talk over loopback and are not limited.

    python -m benchmarks.emulate --nodes 2 --rate 1gbit -- python train.py
    python -m benchmarks.emulate --nodes 4 --rate 100mbit --kill-rank 1@5 -- python train.py
    python -m benchmarks.emulate --nodes 4 --rate 100mbit --cut-node 1@5 -- python train.py
    python -m benchmarks.emulate --nodes 4 --kill-rank 1@2 --after "step 1/" -- python train.py

The seconds of a fault count from the start, or from the first line of rank 0 that has the text of --after.

Each rank gets torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR,
MASTER_PORT), GLOO_SOCKET_IFNAME, OMP_NUM_THREADS, and EMU_RATE_BPS (0: unlimited).

Exit status: 0 if every rank exited 0; else that of the first rank that failed (128 + signal if killed); 124 after
--timeout; 130 / 143 after Ctrl-C / SIGTERM; 2 on a usage or set-up error. A rank that --kill-rank killed is not
counted, and after an injected fault the others are left to react by themselves until they exit or time out.

The work happens in private PID, mount and network namespaces: when the harness ends for any reason, SIGKILL included,
the kernel kills every process inside and frees everything. Nothing of the machine's own network is changed. (Except:
--cpu-quota makes cgroup directories, removed at the end; a SIGKILL leaves them behind, empty. It also wakes up every
core each millisecond, by a real-time process, so that the limit holds at that grain.)

Needs Linux, root, `ip` and `tc` (Debian: iproute2); of Python only the standard library.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from benchmarks.common.nodes import Cluster, EmulationError, new_pids, quotas, separate

PORT = 29500  # of rank 0, in namespaces of its own
GRACE_S = 10.0  # that the other ranks get after one fails


def say(text: str) -> None:
    """A line of the harness itself."""
    print(f"[emulate] {text}", file=sys.stderr, flush=True)


def parse_rate(text: str) -> float | None:
    """`1gbit`, `100mbit` -> bits per second; `none` -> None."""
    if text.lower() == "none":
        return None
    match = re.fullmatch(r"([\d.]+)([kmg]?)bit", text.strip(), re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"bad rate {text!r}: write 100mbit, 1gbit or none")
    return float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[match[2].lower()]


def parse_fault(text: str) -> tuple[int, float]:
    """`1@5` -> (1, 5.0); without a time, after 5 s."""
    match = re.fullmatch(r"(\d+)(?:@([\d.]+))?", text)
    if not match:
        raise argparse.ArgumentTypeError(f"bad fault {text!r}: write 1 or 1@5")
    return int(match[1]), float(match[2] or 5)


def busy_seconds() -> float:
    """CPU-seconds of the whole machine so far."""
    user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """CPU-seconds of children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Rank:
    """One process of the command, and what it prints."""

    def __init__(self, cluster: Cluster, args: argparse.Namespace, rank: int, cgroup: Path | None) -> None:
        self.rank, self.node = rank, rank // args.ranks_per_node
        self.awaited, self.said = args.after.encode(), threading.Event()
        self.injected, self.status = False, None
        self.tail: collections.deque[bytes] = collections.deque(maxlen=40)
        own = {
            "RANK": rank,
            "LOCAL_RANK": rank % args.ranks_per_node,
            "GROUP_RANK": self.node,
            "WORLD_SIZE": args.nodes * args.ranks_per_node,
            "LOCAL_WORLD_SIZE": args.ranks_per_node,
            "MASTER_ADDR": cluster.address(0),
            "MASTER_PORT": PORT,
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": 1,
            "PYTHONUNBUFFERED": 1,
            "EMU_RATE_BPS": cluster.rate or 0,
        }

        def prepare() -> None:
            os.setsid()
            if cgroup:
                (cgroup / "cgroup.procs").write_text("0")
            cluster.enter(self.node)

        self.process = subprocess.Popen(
            args.command, env=os.environ | {k: str(v) for k, v in own.items()}, preexec_fn=prepare,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.prefix = f"[{rank}] ".encode() if args.all_output else b""
        self.show = rank == 0 or args.all_output
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self) -> None:
        for line in self.process.stdout:
            self.tail.append(line)
            if self.awaited in line:
                self.said.set()
            if self.show:
                with contextlib.suppress(OSError):
                    sys.stdout.buffer.write(self.prefix + line)
                    sys.stdout.buffer.flush()

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def poll(self) -> int | None:
        status = self.process.poll()
        return None if status is None else status if status >= 0 else 128 - status


def run_ranks(cluster: Cluster, args: argparse.Namespace, cgroups: list[Path], parent: int) -> int:
    """Starts the ranks, injects the faults, waits. Returns the exit status."""
    stop: list[int] = []
    for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)):
        signal.signal(number, lambda *_, status=status: stop.append(status))
    started, machine, own = time.monotonic(), busy_seconds(), own_seconds()
    world = args.nodes * args.ranks_per_node
    ranks = [Rank(cluster, args, rank, cgroups[rank] if cgroups else None) for rank in range(world)]
    kinds = (("kill", args.kill_rank), ("cut", args.cut_node))
    faults = sorted((second, what, i) for what, wanted in kinds for i, second in wanted)
    result, deadline, injected = None, None, None
    began = None if args.after else 0.0  # when the clock of the faults starts
    while True:
        now = time.monotonic() - started
        if began is None and ranks[0].said.is_set():
            began = now
        while faults and began is not None and faults[0][0] <= now - began:
            _, what, i = faults.pop(0)
            injected = now
            if what == "kill":
                ranks[i].injected = ranks[i].poll() is None
                ranks[i].signal(signal.SIGKILL)
                say(f"t={now:.1f}s: killed rank {i}")
            else:
                cluster.set_link(i, False)
                say(f"t={now:.1f}s: cut the link of node {i}")
        for r in [r for r in ranks if r.status is None]:
            r.status = r.poll()
            if r.status is not None and injected is not None:
                say(f"rank {r.rank} ended with {r.status} {now - injected:.1f} s after the fault")
            if r.status and not r.injected and result is None:
                result = r.status
                if injected is None:
                    deadline = now + GRACE_S  # the others may still want to complain
                say(f"t={now:.1f}s: rank {r.rank} (node {r.node}) exited with {r.status}")
                if not r.show:
                    r.reader.join(0.5)
                    sys.stderr.buffer.write(b"".join(f"[{r.rank}] ".encode() + line for line in r.tail))
                    sys.stderr.flush()
        left = [r.rank for r in ranks if r.status is None]
        if not left:
            break
        if stop:
            result = stop[0]
            break
        if select.select([parent], [], [], 0)[0]:  # end of file: the outer process is gone
            result = 137
            break
        if args.timeout and now > args.timeout:
            say(f"timeout after {args.timeout:g}s; still running: ranks {left}")
            result = 124
            break
        if deadline is not None and now > deadline:
            say(f"stopping the other ranks {left}")
            break
        time.sleep(0.02)
    finish(ranks)
    span = max(0.01, time.monotonic() - started)
    mine = own_seconds() - own
    other = (busy_seconds() - machine - mine) / span
    if not args.quiet:
        say(f"CPU use over {span:.1f}s: ranks {mine / span:.2f} cores, everything else {other:.2f}")
    if other > 0.35:
        say(f"warning: {other:.2f} cores went to something else during this run: do not trust its timings")
    return result or 0


def finish(ranks: list[Rank]) -> None:
    """Ends those that still run, gently first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        left = [r for r in ranks if r.poll() is None]
        for r in left:
            r.signal(number)
        until = time.monotonic() + 2.0
        while any(r.poll() is None for r in left) and time.monotonic() < until:
            time.sleep(0.02)
    for r in ranks:
        r.reader.join(1.0)


def inside(args: argparse.Namespace, cgroups: list[Path], parent: int) -> int:
    """Process 1 of the private PID namespace: its end takes everything with it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(143))
    try:
        separate()
        cluster = Cluster(args.nodes, args.rate)
        cluster.build()
        return run_ranks(cluster, args, cgroups, parent)
    except (EmulationError, FileNotFoundError) as error:
        say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        return 130
    except SystemExit as end:
        return end.code


def launch(args: argparse.Namespace, cgroups: list[Path]) -> int:
    """Forks process 1 and waits for it. This process's own network namespace stays as it is."""
    read, write = os.pipe()
    new_pids()
    child = os.fork()
    if child == 0:
        code = 2
        try:
            os.close(write)
            code = inside(args, cgroups, read)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    os.close(read)

    def forward(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, forward)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status if status >= 0 else 128 - status


def main() -> int:
    """Parse, check, launch."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--nodes", type=int, default=2)
    p.add_argument("--ranks-per-node", type=int, default=1)
    p.add_argument("--rate", type=parse_rate, default="1gbit", help="each node's link, each way: 100mbit, 1gbit, none")
    p.add_argument("--timeout", type=float, default=600, help="seconds; 0: none")
    p.add_argument("--cpu-quota", default="", help="hard limit of CPU cores for each rank: 0.4; or of each 0.2,0.4")
    p.add_argument("--all-output", action="store_true", help="what every rank prints, not rank 0 only")
    p.add_argument("--kill-rank", type=parse_fault, action="append", default=[], metavar="RANK[@SEC]")
    p.add_argument("--cut-node", type=parse_fault, action="append", default=[], metavar="NODE[@SEC]")
    p.add_argument("--after", default="", metavar="TEXT", help="faults count from rank 0's first line that has it")
    p.add_argument("--quiet", action="store_true", help="no line of CPU use")
    p.add_argument("command", nargs=argparse.REMAINDER)
    args = p.parse_args()
    args.command = args.command[args.command[:1] == ["--"] :]
    world = args.nodes * args.ranks_per_node
    if not args.command:
        p.error("no command: put it after --")
    try:
        cores = [float(part) for part in args.cpu_quota.split(",") if part]
    except ValueError:
        cores = [0.0]
    if len(cores) not in (0, 1, world) or min(cores, default=1.0) <= 0:
        p.error(f"--cpu-quota must be a number above 0, or {world} of them")
    if args.nodes < 1 or args.ranks_per_node < 1:
        p.error("--nodes and --ranks-per-node must be at least 1")
    if any(i >= world for i, _ in args.kill_rank):
        p.error("--kill-rank: no such rank")
    if any(i >= args.nodes for i, _ in args.cut_node):
        p.error("no such node")
    for tool in ("ip", "tc"):
        if not shutil.which(tool):
            p.error(f"{tool} not found (apt-get install iproute2)")
    try:
        with quotas(cores * world if len(cores) == 1 else cores) as cgroups:
            return launch(args, cgroups)
    except EmulationError as error:
        say(f"error: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
