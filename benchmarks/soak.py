"""python -m benchmarks.soak --minutes 120: a training on four ranks that goes on for long loses and gathers nothing.

Memory, descriptors and threads of the ranks must stay as they are after a fifth of the time; a checkpoint is written
every 100 steps, while a reader checks the newest one each second; half-way the clock is set back by an hour, in the
ranks; two searches at a time share the cache of the training, and must find the same; but for a line a step the ranks
must say nothing. SIGTERM ends it. Before, another trains into a file system that gets full (needs root): it must end
with one sentence, and leave the checkpoint before.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table
from torch.distributed import TCPStore

from benchmarks.common.nodes import apart, mount
from layerwise.checkpoint import STOPPED, latest
from layerwise.checkpoint.reader import Reader
from layerwise.plan import load_plan
from tests.comm.pool import environment

MODEL, RANKS, EVERY, PACE_S, LOOK_S = "mlp:64x256x10", 4, 100, 0.05, 1.0
PYTHON = (sys.executable, "-W", "ignore", "-m")
GREW_BYTES, STEP_BYTES = 4 << 20, 256  # what an allocator takes by the way; what is kept of a step for the report
BACK_S = 3600.0
FULL = "size=200k"  # two checkpoints have room in it
STORES: list[TCPStore] = []  # which the ranks talk to
Use = tuple[int, int, int]  # of a process: bytes in memory, descriptors, threads


def use(pid: int) -> Use:
    """What a process has now."""
    lines = (line.split(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    status = {name: value.split()[0] for name, value in lines if value.split()}
    return 1024 * int(status["VmRSS"]), sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()), int(status["Threads"])


def job(back_s: float, command: list[str]) -> None:
    """A rank: `layerwise run` at a steady pace, whose clock goes back by an hour after so many seconds."""
    from layerwise.cli import run_main
    from layerwise.commands.run import main as run
    from layerwise.train.session import Session

    clock, began, after = time.time, time.monotonic(), Session.after
    time.time = lambda: clock() - BACK_S * (time.monotonic() - began > back_s)

    def paced(self: Session, done: int) -> None:
        time.sleep(PACE_S)
        after(self, done)

    Session.after = paced  # type: ignore[method-assign]
    sys.exit(run_main(run, command))


def start(folder: Path, plan: Path, checkpoints: Path, ranks: int, back_s: float) -> list[subprocess.Popen[bytes]]:
    """The ranks of a training without an end."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    command = [*PYTHON, "benchmarks.soak", "--job", str(back_s), str(plan), "--data", "digits", "--steps", "100000000"]
    command += ["--checkpoint", str(checkpoints), "--checkpoint-every", str(EVERY)]
    STORES.append(store)
    started = []
    for rank in range(ranks):
        variables = os.environ | environment(rank, ranks, store.port, agent=True)
        with (folder / f"output{rank}").open("wb") as out:
            started.append(subprocess.Popen(command, env=variables, stdout=out, stderr=out))
    return started


def plan_of(gpus: int, out: Path) -> subprocess.Popen[bytes]:
    """A search under way."""
    flags = ["--gpus", str(gpus), "--profile", "cpu", "--global-batch", "16", "--gpus-per-node", str(gpus)]
    return subprocess.Popen([*PYTHON, "layerwise.search", MODEL, *flags, "--out", str(out)], stdout=subprocess.DEVNULL)


def read(checkpoints: Path) -> bool:
    """Whether the newest checkpoint was checked; not where it was pruned meanwhile."""
    newest = latest(checkpoints)
    if newest is None:
        return False
    try:
        reader = Reader(newest)
        reader.verify(sorted(reader.files))
    except Exception:
        if newest.exists():
            raise
        return False
    return True


def grown(uses: Sequence[Use]) -> Use:
    """How much the last fifth has more than the second."""
    fifth = max(len(uses) // 5, 1)
    first, last = uses[fifth : 2 * fifth] or uses[:1], uses[-fifth:]
    more = [int(median(use[i] for use in last) - median(use[i] for use in first)) for i in range(3)]
    return more[0], more[1], more[2]


def soaked(folder: Path, minutes: float) -> None:
    """Trains for so long; AssertionError where something grows, fails or differs."""
    plan, checkpoints = folder / "plan.json", folder / "ck"
    assert plan_of(RANKS, plan).wait() == 0
    ranks = start(folder, plan, checkpoints, RANKS, 30 * minutes)
    uses: list[list[Use]] = [[] for _ in ranks]
    until, checked, searches = time.monotonic() + 60 * minutes, 0, 0
    seen, pair = set[str](), list[subprocess.Popen[bytes]]()
    while time.monotonic() < until:
        time.sleep(LOOK_S)
        assert all(rank.poll() is None for rank in ranks), (folder / "output0").read_text()[-3000:]
        if checkpoints.exists():
            checked += read(checkpoints)
            names = {path.name for path in checkpoints.glob("step-*")}
            assert len(names) <= 3, names
            seen |= names
        if not seen:
            continue  # it has not begun
        for rank, each in zip(ranks, uses, strict=True):
            each.append(use(rank.pid))
        if all(search.poll() is not None for search in pair):
            assert not any(search.returncode for search in pair)
            found = [load_plan(path).strategy for path in folder.glob("pair*.json")]
            assert all(strategy == found[0] for strategy in found), "two searches differ"
            searches += len(pair)
            pair = [plan_of(2 + searches // 2 % 7, folder / f"pair{i}.json") for i in range(2)]
    for rank in ranks:
        rank.send_signal(signal.SIGTERM)
    codes = [rank.wait(60) for rank in ranks]
    for search in pair:
        search.kill()
    said = [line for rank in range(RANKS) for line in (folder / f"output{rank}").read_text().splitlines()]
    other = [line for line in said if not line.startswith("step ")]
    table = Table("rank", "memory", "grown by", "descriptors", "threads", title=f"{minutes:g} minutes", box=None)
    for rank, each in enumerate(uses):
        more, last = grown(each), each[-1]
        counts = (f"{count} {added:+}" for count, added in zip(last[1:], more[1:], strict=True))
        table.add_row(str(rank), f"{last[0] / 1e6:.0f} MB", f"{more[0] / 1e6:+.1f} MB", *counts)
    out = Console(width=150, highlight=False)
    out.print(table)
    out.print(f"{len(seen)} checkpoints seen, {checked} checked, {searches} searches; not of steps:")
    out.print("\n".join(other), markup=False)
    assert codes == [STOPPED] * RANKS, codes
    assert len(other) < 20
    for memory, *counts in map(grown, uses):
        assert memory < GREW_BYTES + STEP_BYTES * (len(said) - len(other)), "memory grows"
        assert counts == [0, 0], "descriptors or threads grow"


def full(folder: Path) -> None:
    """Trains until there is no room."""
    plan, checkpoints = folder / "one.json", folder / "small" / "ck"
    assert plan_of(1, plan).wait() == 0
    checkpoints.parent.mkdir()
    mount("none", str(checkpoints.parent), "tmpfs", 0, FULL)
    (rank,) = start(folder, plan, checkpoints, 1, 1e9)
    try:
        code, said = rank.wait(120), (folder / "output0").read_text().splitlines()[-1]
        assert (code, "Traceback" in said) == (2, False), said
        assert read(checkpoints)
        print(f"a full disk: {said}; {latest(checkpoints)} is sound", flush=True)
    finally:
        rank.kill()
        rank.wait()
        subprocess.run(["umount", checkpoints.parent], check=True)


def main() -> int:
    """Parses, and soaks in namespaces of its own."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--minutes", type=float, default=120.0)
    p.add_argument("--job", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.job:
        job(float(args.job[0]), args.job[1:])

    def act() -> int:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        with tempfile.TemporaryDirectory() as name:
            os.environ["LAYERWISE_CACHE"] = f"{name}/cache"
            full(Path(name))
            soaked(Path(name), args.minutes)
        return 0

    return apart(act)


if __name__ == "__main__":
    sys.exit(main())
