"""python -m docs.gallery runs the eight jobs of docs/gallery.md; it writes what they print, their times and pictures.

`--only NAME` runs one job, and leaves the rest of the page as it is. The text beside the jobs is written by hand.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

import layerwise

ROOT = Path(__file__).parents[1]
PAGE, PICTURES = ROOT / "docs/gallery.md", ROOT / "docs/gallery"
MACHINE = "two cores of a shared virtual machine"
LOSS = re.compile(r"^(?:step|epoch) (\d+).*? loss (-?\d+\.\d+)", re.MULTILINE)
MOST = 24  # lines of output that a page shows


def decoder() -> tuple[object, tuple[object, ...]]:
    """HunyuanVideo's decoder, narrow, and a latent of five frames, for `layerwise search docs.gallery:decoder`."""
    import torch
    from diffusers import AutoencoderKLHunyuanVideo

    sizes = {"block_out_channels": (16, 16, 32, 32), "layers_per_block": 1, "norm_num_groups": 4}
    vae = AutoencoderKLHunyuanVideo(latent_channels=4, **sizes)
    return vae.decoder.eval(), (torch.randn(1, 4, 2, 32, 32),)


def losses(outputs: Mapping[str, str], folder: Path) -> plt.Figure:
    """A loss for each step or epoch, a line for each command."""
    figure, axes = plt.subplots(figsize=(5, 2.4), layout="constrained")
    trained = [(command, LOSS.findall(output)) for command, output in outputs.items() if LOSS.search(output)]
    for number, (command, values) in enumerate(trained):
        found = re.search(r"nproc-per-node (\d+)", command)
        label = f"{found[1]} ranks" if found else "one process"
        steps, seen = zip(*((int(step), float(loss)) for step, loss in values), strict=True)
        axes.plot(steps, seen, marker="ox"[number % 2], lw=2 - number % 2, ls=("-", "--")[number % 2], label=label)
    axes.set(xlabel="step or epoch", ylabel="loss")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def plan(outputs: Mapping[str, str], folder: Path) -> plt.Figure:
    """The plan that the job has written."""
    return layerwise.plot.layers(layerwise.load_plan(folder / "plan.json"))


def curves(outputs: Mapping[str, str], folder: Path) -> None:
    """The job has drawn curves.png itself."""


@dataclass(frozen=True)
class Job:
    """Commands that run one after the other in an empty folder, and what draws their picture."""

    commands: Sequence[str]
    picture: Callable[[Mapping[str, str], Path], plt.Figure | None]


TWO = "torchrun --nproc-per-node 2"
JOBS = {
    "unet": Job(
        [
            "layerwise search unet3d:32 --loss dice+ce --gpus 4 --gpus-per-node 4 --profile cpu --global-batch 1 "
            "--io boxes --out plan.json",
            "torchrun --nproc-per-node 4 examples/segment_volume.py",
        ],
        plan,
    ),
    "nnunet": Job(["python examples/segment_nnunet.py", f"{TWO} examples/segment_nnunet.py"], losses),
    "decoder": Job(
        [
            f"{TWO} examples/decode_video.py",
            "layerwise search docs.gallery:decoder --gpus 4 --gpus-per-node 4 --profile cpu --inference "
            "--global-batch 1 --out plan.json",
        ],
        plan,
    ),
    "bert": Job(["python examples/train_transformers.py", f"{TWO} examples/train_transformers.py"], losses),
    "lightning": Job(["python examples/train_lightning.py", f"{TWO} examples/train_lightning.py"], losses),
    "vgg": Job(["layerwise search vgg16 --gpus 16 --profile pcie --out plan.json"], plan),
    "cosmoflow": Job(
        [
            "layerwise oracle cosmoflow:512 --gpus 4..1024 --batch 0.25 --strategy spatial,ds --profile v100 "
            "--samples 1584 --plot curves.png"
        ],
        curves,
    ),
    "resume": Job(
        [
            "layerwise search lenet5 --gpus 2 --profile cpu --global-batch 16 --out two.json",
            f"{TWO} -m layerwise.run two.json --data digits --steps 20 --checkpoint ck",
            "torchrun --nproc-per-node 4 -m layerwise.run two.json --replan --data digits --steps 40 --checkpoint ck "
            "--resume",
        ],
        losses,
    ),
}


def run(command: str, folder: Path) -> str:
    """Returns what the command prints to its standard output; what it says beside is shown if it fails."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "150", "NO_COLOR": "1"}
    environment["LAYERWISE_CACHE"] = str(folder / "cache")
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode:
        raise SystemExit(f"{command}: exit status {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-6000:]}")
    return done.stdout


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def shown(output: str) -> str:
    """Returns the first and the last lines, without a busy machine's seconds and the dicts of HF's Trainer."""
    lines = [line.rstrip() for line in output.strip().splitlines() if not line.startswith(("{'", "import "))]
    if len(lines) > MOST:
        lines = [*lines[: MOST // 2], "…", *lines[-MOST // 2 :]]
    return "\n".join(lines)


def made(name: str) -> str:
    """Runs a job and draws its picture; returns its part of the page."""
    job = JOBS[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "examples").symlink_to(ROOT / "examples")
        used = cpu_s()
        outputs = {command: run(command, folder) for command in job.commands}
        used = cpu_s() - used
        PICTURES.mkdir(exist_ok=True)
        if figure := job.picture(outputs, folder):
            figure.savefig(folder / "curves.png", dpi=90)
        (PICTURES / f"{name}.png").write_bytes((folder / "curves.png").read_bytes())
    text = "\n".join(f"$ {command}\n{shown(output)}\n" for command, output in outputs.items())
    when = f"{used:.0f} s of CPU on {MACHINE}, {datetime.date.today():%Y-%m-%d}"
    return f"\n```\n{text}```\n\n![{name}](gallery/{name}.png)\n\n*{when}.*\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", choices=list(JOBS), nargs="+", default=list(JOBS))
    for name in parser.parse_args().only:
        part = made(name)
        before, mark, rest = PAGE.read_text(encoding="utf-8").partition(f"<!-- job: {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        assert end, f"docs/gallery.md has no mark of {name}"
        PAGE.write_text(before + mark + part + end + after, encoding="utf-8")
        print(name, "is done", flush=True)


if __name__ == "__main__":
    sys.exit(main())
