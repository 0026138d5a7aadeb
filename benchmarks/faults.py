"""python -m benchmarks.faults: a rank is killed, a cable is cut: how a training on a cluster ends (needs root).

A searched plan is trained by `python -m layerwise.run` on an emulated cluster (benchmarks.emulate), with a
checkpoint after every step. Once the steps are under way the fault is injected. Every other rank must end by itself,
not with 0, within the time-out and a little, and rank 0's last line must name the rank that was hit; where it is rank 0
that was hit, so must all the others'. Then the newest checkpoint must be whole: it is exported, and one process goes on
from it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from layerwise.checkpoint.step_folders import latest

PYTHON = (sys.executable, "-W", "ignore", "-m")
STARTING_S = 120.0  # until the first step, when the machine is busy
SLACK_S = 10.0  # over the time-out: a stuck step is seen after it, then told to the others
AWAY_S = 5.0  # a killed process is noticed by its connections: no time-out is waited for


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to a rank, and what must follow."""

    title: str
    flags: tuple[str, ...]  # of the emulation
    hit: int  # the rank that is to be named
    within_s: float  # in which the others must have ended


@dataclass(frozen=True, slots=True)
class End:
    """How a rank ended: exit code, seconds after the fault, its last line."""

    code: int
    seconds: float
    last: str


def faults(nodes: int, timeout_s: float, after_s: float) -> list[Fault]:
    last = nodes - 1
    cut = timeout_s + SLACK_S
    return [
        Fault(f"rank {last} killed", ("--kill-rank", f"{last}@{after_s}"), last, AWAY_S),
        Fault("rank 0 killed", ("--kill-rank", f"0@{after_s}"), 0, AWAY_S),
        Fault(f"node {last} cut off", ("--cut-node", f"{last}@{after_s}"), last, cut),
    ]


def search(model: str, gpus: int, folder: Path) -> Path:
    """A plan for so many nodes of the profile `cpu`."""
    plan = folder / f"plan{gpus}.json"
    flags = ["--gpus", str(gpus), "--profile", "cpu", "--global-batch", "16", "--out", str(plan)]
    subprocess.run([*PYTHON, "layerwise.search", model, *flags], check=True, stdout=subprocess.DEVNULL)
    return plan


def run(fault: Fault, plan: Path, checkpoints: Path, args: argparse.Namespace) -> dict[int, End]:
    """Trains until the fault has ended it; how each rank ended."""
    harness = ["benchmarks.emulate", "--nodes", str(args.nodes), "--rate", args.rate, "--all-output", "--quiet"]
    harness += [*fault.flags, "--after", "step 1/", "--timeout", str(STARTING_S + fault.within_s)]
    rank = ["layerwise.run", str(plan), "--steps", "1000000", "--timeout", str(args.timeout)]
    rank += ["--checkpoint", str(checkpoints), "--checkpoint-every", "1"]
    environment = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(
        [*PYTHON, *harness, "--", *PYTHON, *rank],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    lines: dict[int, str] = {}
    for number, line in re.findall(r"^\[(\d+)\] (.+)$", done.stdout, re.MULTILINE):
        lines[int(number)] = line.strip()
    ends = re.findall(r"rank (\d+) ended with (\d+) ([\d.]+) s after the fault", done.stderr)
    if len(ends) != args.nodes:
        raise SystemExit(f"{fault.title}: {len(ends)} of {args.nodes} ranks ended\n{done.stdout[-3000:]}{done.stderr}")
    return {int(r): End(int(code), float(seconds), lines.get(int(r), "")) for r, code, seconds in ends}


def show(fault: Fault, ends: dict[int, End], killed: bool) -> Table:
    table = Table("rank", "exit code", "after", title=fault.title, title_justify="left", box=None)
    for rank, end in sorted(ends.items()):
        table.add_row(str(rank), f"{end.code}{' (killed)' if killed and rank == fault.hit else ''}", f"{end.seconds} s")
    return table


def check(fault: Fault, ends: dict[int, End]) -> None:
    """AssertionError unless all others ended in time, and those that must name the rank do."""
    others = {rank: end for rank, end in ends.items() if rank != fault.hit}
    for rank, end in others.items():
        assert end.code == 2, f"rank {rank} ended with {end.code}: {end.last}"
        assert end.seconds <= fault.within_s, f"rank {rank} ended after {end.seconds} s"
    assert ends[fault.hit].code != 0
    for rank in {0} & others.keys() or others.keys():
        assert re.match(rf"layerwise: error: rank {fault.hit} of \d+ ", ends[rank].last), ends[rank].last


def go_on(checkpoints: Path, alone: Path, folder: Path) -> str:
    """The newest checkpoint is exported, and one process takes one more step from it."""
    newest = latest(checkpoints)
    assert newest is not None
    steps = int(newest.name.removeprefix("step-"))
    exported = [*PYTHON, "layerwise.commands.export", str(checkpoints), str(folder / "model.safetensors")]
    subprocess.run(exported, check=True, stdout=subprocess.DEVNULL)
    resumed = [*PYTHON, "layerwise.run", str(alone), "--steps", str(steps + 1), "--checkpoint", str(checkpoints)]
    done = subprocess.run([*resumed, "--resume"], check=True, text=True, stdout=subprocess.PIPE)
    assert f"going on from {newest}" in done.stdout, done.stdout
    assert f"step {steps + 1}/{steps + 1} " in done.stdout, done.stdout
    left = [path.name for path in checkpoints.iterdir() if path.name.startswith(".")]
    assert not left, f"{left} are left over"
    return f"one process went on from {newest.name}"


def main() -> None:
    """Run and print."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="lenet5")
    p.add_argument("--nodes", type=int, default=4)
    p.add_argument("--rate", default="100mbit", help="of each node's link (default: 100mbit)")
    p.add_argument("--timeout", type=float, default=8.0, metavar="S", help="of layerwise run (default: 8)")
    p.add_argument(
        "--after", type=float, default=3.0, metavar="S", help="from the first step to the fault (default: 3)"
    )
    args = p.parse_args()
    console = Console(width=150, highlight=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan, alone = search(args.model, args.nodes, folder), search(args.model, 1, folder)
        for number, fault in enumerate(faults(args.nodes, args.timeout, args.after)):
            checkpoints = folder / f"checkpoints{number}"
            ends = run(fault, plan, checkpoints, args)
            console.print(show(fault, ends, "--kill-rank" in fault.flags))
            teller = 1 if fault.hit == 0 else 0
            console.print(f"rank {teller}'s last line: {ends[teller].last}", soft_wrap=True)
            check(fault, ends)
            console.print(f"then: {go_on(checkpoints, alone, folder)}\n")


if __name__ == "__main__":
    main()
