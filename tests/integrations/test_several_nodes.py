"""The page on several nodes: its Slurm script starts torchrun on every node, with stand-ins for Slurm's commands."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.comm.launch import ROOT
from tests.train.command import environment, save_plans

COMMANDS = {
    "scontrol": "echo 127.0.0.1; echo localhost",  # the nodes' names
    "srun": '"$@" > first 2>&1 & "$@" > second 2>&1; wait $!',
    "torchrun": f'exec {sys.executable} -W ignore -m torch.distributed.run "$@"',
}


@pytest.mark.slow  # four processes import torch; the recipe of tests/train/test_signals.py is like it
def test_slurm_starts_torchrun_on_two_nodes(tmp_path: Path) -> None:
    page = (ROOT / "docs/how-to/several_nodes.md").read_text()
    script = re.search(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", page, re.DOTALL)
    assert script is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    small = {"--nproc-per-node 8": "--nproc-per-node 1", "29500": port, "plan.json": "two.json", "100 --resume": "2"}
    text = script[1]
    for said, here in small.items():
        assert said in text
        text = text.replace(said, f"{here} --steps 4 --timeout 60" if said == "100 --resume" else here)
    (tmp_path / "job").write_text(text)
    (tmp_path / "bin").mkdir()
    for name, line in COMMANDS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    save_plans(tmp_path)
    place = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    place |= {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
    subprocess.run(["bash", "job"], cwd=tmp_path, env=environment() | place, check=True, timeout=240)
    said = (tmp_path / "first").read_text() + (tmp_path / "second").read_text()
    assert (tmp_path / "checkpoints" / "step-00000004").exists(), said
