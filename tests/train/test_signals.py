"""SIGTERM and SIGUSR1 to layerwise run: before, between and after its steps, on one rank, on two and under Slurm."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from layerwise.__main__ import dispatch
from layerwise.checkpoint import STOPPED, latest
from layerwise.cli import run_main
from tests.comm.launch import ROOT, launch
from tests.train.command import environment, strict

pytestmark = pytest.mark.usefixtures("here")

DATA = """
import os, signal, sys, time
import torch

class Samples(torch.utils.data.Dataset):
    reads = 0

    def __len__(self):
        return 80

    def __getitem__(self, i):
        self.reads += 1
        if self.reads == int(os.environ.get("AT", "0")) and os.environ.get("RANK", "0") == os.environ["WHO"]:
            os.kill(os.getpid(), int(os.environ["NUMBER"]))
        time.sleep(float(os.environ.get("PACE_S", "0")))
        if os.path.isdir("ck"):
            open("seen", "a").write(" ".join(sorted(os.listdir("ck"))) + "\\n")
        return torch.linspace(0, 1, 64).roll(i), torch.tensor(i % 10)

def data():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where CI runs in the background
    if os.environ.get("EARLY"):
        os.kill(os.getpid(), int(os.environ["NUMBER"]))
    samples = Samples()
    return samples, samples
"""
FLAGS = ("--data", "signals:data", "--dtype", "float64", "--checkpoint", "ck", "--json")


@pytest.fixture(autouse=True)
def signals(here: Path) -> None:
    (here / "signals.py").write_text(DATA)


def undisturbed(steps: int, capsys: pytest.CaptureFixture[str], *more: str) -> list[float]:
    """The losses on one rank; of the rest, where it resumes."""
    assert run_main(dispatch, ["run", "one.json", *FLAGS, "--steps", str(steps), *more]) == 0
    losses: list[float] = strict(capsys.readouterr().out)["losses"]
    return losses


@pytest.mark.parametrize("who", [0, 1])
def test_sigterm_to_one_rank_saves_on_all_and_ends_them(who: int, capsys: pytest.CaptureFixture[str]) -> None:
    variables = {"AT": "30", "WHO": str(who), "NUMBER": str(signal.SIGTERM.value), "PACE_S": "0.03"}
    done = launch(["-m", "layerwise.run", "two.json", *FLAGS, "--steps", "400"], variables=variables)
    assert done.codes == [STOPPED, STOPPED], done.stderr
    saved = latest("ck")
    assert saved is not None
    assert f"SIGTERM: saved {saved}, from which --resume goes on; exit status {STOPPED}" in done.stderr[0]
    steps = int(saved.name.removeprefix("step-"))
    assert 7 <= steps < 60  # a rank reads 4 samples a step; half a second later at most all agree
    rest = undisturbed(steps + 4, capsys, "--resume")
    assert undisturbed(steps + 4, capsys, "--checkpoint", "other")[steps:] == pytest.approx(rest, rel=1e-9)


def test_a_checkpoint_that_is_asked_for_is_there_at_once() -> None:
    """It is not finished with the next one, or at the end."""
    variables = {"AT": "40", "WHO": "0", "NUMBER": str(signal.SIGUSR1.value), "PACE_S": "0.01"}
    done = launch(["-m", "layerwise.run", "one.json", *FLAGS, "--steps", "40"], 1, variables)
    assert done.codes == [0], done.stderr
    seen = set(Path("seen").read_text().split())
    assert not any(".tmp" in name for name in seen)
    (asked,) = {name for name in seen if name.startswith("step-")} - {"step-00000040"}
    assert int(asked.removeprefix("step-")) < 40


def test_sigusr1_before_the_first_step_ends_nothing() -> None:
    variables = {"EARLY": "1", "NUMBER": str(signal.SIGUSR1.value)}
    done = launch(["-m", "layerwise.run", "one.json", *FLAGS, "--steps", "2"], 1, variables)
    assert done.codes == [0], done.stderr


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGTERM, -signal.SIGTERM, ""), (signal.SIGINT, 130, "layerwise: interrupted\n")],
)
def test_a_signal_without_a_checkpoint_ends_at_once(number: signal.Signals, code: int, said: str) -> None:
    variables = {"AT": "40", "WHO": "0", "NUMBER": str(number.value)}
    done = launch(["-m", "layerwise.run", "one.json", "--data", "signals:data", "--steps", "100"], 1, variables)
    assert (done.codes, done.stderr) == ([code], [said])


SLURM = {
    "srun": 'exec env PACE_S=0.02 "$@"',
    # Slurm sends it to every process of a step: to torchrun, which sends it on, and to the ranks themselves.
    "scancel": "echo $@ > asked; read -r pid < step.pid; kill ${1/--signal=/-} $pid $(cat /proc/$pid/task/*/children)",
    "scontrol": 'echo "$@" > requeued',
}


def test_slurms_recipe(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That of the docs, with a scancel of its own: saved before the time is over, put into the queue, gone on with."""
    page = (ROOT / "docs/how-to/resume_on_other_ranks.md").read_text()
    script = re.search(r"    #SBATCH --requeue.*?\n    wait\n", page, re.DOTALL)
    assert script is not None
    command = "srun torchrun --nproc-per-node 2 -m layerwise.run two.json --data signals:data --steps 4000"
    text = re.sub(r"srun torchrun .*?(?=--checkpoint)", f"{command} --dtype float64 ", script[0], flags=re.DOTALL)
    assert "--checkpoint ck --resume &\n" in text
    (here / "job").write_text(text.replace("--resume &", "--resume --timeout 60 & echo $! > step.pid;"))
    (here / "bin").mkdir()
    for name, line in SLURM.items():
        (here / "bin" / name).write_text(f"#!/bin/bash\n{line}\n")
        (here / "bin" / name).chmod(0o755)
    torchrun = f'#!/bin/bash\nexec {sys.executable} -W ignore -m torch.distributed.run "$@"\n'
    (here / "bin" / "torchrun").write_text(torchrun)
    (here / "bin" / "torchrun").chmod(0o755)
    place = {"PATH": f"{here / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    with (
        (here / "out").open("w") as out,
        subprocess.Popen(["bash", "job"], stdout=out, stderr=out, env=environment() | place) as job,
    ):
        until = time.monotonic() + 100
        while "step 2/" not in (here / "out").read_text() and time.monotonic() < until and job.poll() is None:
            time.sleep(0.1)
        job.send_signal(signal.SIGUSR1)
        job.wait(60)
    said = (here / "out").read_text()
    asked = [(here / name).read_text() for name in ("asked", "requeued")]
    assert asked == ["--signal=TERM 7\n", "requeue 7\n"], said
    assert f"exit status {STOPPED}" in said
    saved = latest("ck")
    assert saved is not None
    steps = int(saved.name.removeprefix("step-"))
    rest = undisturbed(steps + 2, capsys, "--resume")
    assert undisturbed(steps + 2, capsys, "--checkpoint", "other")[steps:] == pytest.approx(rest, rel=1e-9)
