"""Streams: two and four ranks on the one GPU, over gloo by way of the CPU, have one device's numbers; one is killed.

NCCL refuses ranks that share a GPU, so what only NCCL does (collectives on streams of its own, DTensors) is not here.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from subprocess import PIPE, Popen
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.gpu.rows import Found, Row, Setting, printed
from layerwise.comm.base import Comm
from layerwise.comm.solo import SoloComm
from layerwise.plan import Plan
from layerwise.run.execute.predicted_bytes import PREDICTED
from layerwise.search.__main__ import main as search
from tests.comm.pool import environment, run_ranks
from tests.run.plans import (
    SMALL,
    Case,
    Trained,
    check_equal,
    optimised_plan,
    priced,
    random_plan,
    recomputed,
    small,
    train,
)

PLANS = 6  # random ones a row, every second with recomputed layers; and the best
TYPES = {"float64": (torch.float64, None, 1e-9), "float32": (torch.float32, None, 1e-2)}
TYPES |= {"bf16": (torch.float32, torch.bfloat16, 0.3)}
Process = Popen[str]
RUN = (sys.executable, "-W", "ignore", "-m", "layerwise.run")
ENDED_S = 30.0  # after a rank was killed


def rows(setting: Setting) -> list[Row]:
    """Random plans of a network, by ranks and type; then whole runs."""
    taken = [(name, ranks, "float64") for ranks in (2, 4) for name in SMALL]
    taken += [(name, 4, kind) for kind in ("float32", "bf16") for name in ("vgg16", "resnet18", "unet3d")]
    made = [
        Row(f"{n}, {r} ranks, {k}", partial(plans, setting, n, r, k))
        for n, r, k in taken[: 1 if setting.tiny else None]
    ]
    made += [Row("compiled, 2 ranks", partial(plans, setting, "lenet5", 2, "float32", compiled=True), 180.0)]
    made += [Row("layerwise run, traced", partial(run, setting)), Row("a rank is killed", partial(killed, setting))]
    return [*made, Row("sanitizer", partial(sanitized, setting), 240.0)]


@cache
def case(name: str) -> Case:
    """A small network, once a process."""
    return small(name)


def on_rank(comm: Comm, name: str, number: int, dtype: str, how: object) -> tuple[Trained, Trained | None, Plan]:
    """What this rank has trained, and on rank 0 what one device has. number: of the plan; the first is the best."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    kind, autocast, _ = TYPES[dtype]
    given = case(name)
    graph = given.graph
    io = "sample" if graph.batch >= comm.size else "free"
    plan = random_plan(graph, comm.size, number, io) if number else priced(optimised_plan(graph, comm.size), graph)
    if number % 2:
        plan = recomputed(plan, graph, number)

    def trained(on: Comm, **options: object) -> Trained:
        inputs, targets = [x.to(comm.device, kind) for x in given.inputs], [y.to(comm.device) for y in given.targets]
        made = train(replace(given, inputs=inputs, targets=targets), plan, on, dtype=kind, autocast=autocast, **options)
        made.gradients = {key: (box, gradient.cpu()) for key, (box, gradient) in made.gradients.items()}
        return made

    alone = trained(SoloComm(comm.device)) if comm.rank == 0 else None
    mine = trained(comm, compile=how)
    if dtype != "float64":  # of which the plan's bytes are
        everyone = comm.all_gather_object(mine.sent)
        plan = replace(plan, predicted={PREDICTED[k]: sum(one[k] for one in everyone) for k in PREDICTED})
    return mine, alone, plan


def plans(setting: Setting, name: str, ranks: int, dtype: str, *, compiled: bool = False) -> Found:
    """All of them; an AssertionError names the tensor that is not one device's."""
    numbers = range(2 if setting.tiny or compiled else 1 + PLANS)
    alone = {"options": {"compile_threads": 1}}  # a rank of the pool may have no children
    how = ({"backend": "eager"} if setting.tiny else alone) if compiled else False
    for number in numbers:
        try:
            call = "benchmarks.gpu.streams:on_rank", name, number, dtype, how
            made: Any = run_ranks(ranks, *call, device=setting.device)
            check_equal([mine for mine, *_ in made], *made[0][1:], tolerance=TYPES[dtype][2])
        except AssertionError as error:
            raise AssertionError(f"plan {number}: {error}") from None
    return {"told": f"{len(numbers)} plans have one device's numbers, to {TYPES[dtype][2]:g}"}


def launch(folder: Path, size: int, *flags: str, model: str = "lenet5", prefix: Sequence[str] = ()) -> list[Process]:
    """`layerwise run` on so many ranks of this machine, which share its GPU."""
    plan = folder / "plan.json"
    said = ["--gpus", str(size), "--profile", "cpu", "--global-batch", "16", "--json", "--out", str(plan)]
    printed(search, [model, *said])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [*prefix, *RUN, str(plan), "--data", "synthetic", *flags]
    here = os.environ | {"PYTHONUNBUFFERED": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    start = partial(Popen[str], command, text=True, stdout=PIPE, stderr=PIPE)
    return [start(env=here | environment(rank, size, port, agent=False)) for rank in range(size)]


def ended(ranks: Sequence[Process], limit_s: float) -> tuple[list[int], str]:
    """Exit codes, and the last line that rank 0 has on stderr. What has not ended is killed, and fails."""
    try:
        said = [one.communicate(timeout=limit_s)[1] for one in ranks]
    finally:
        for one in ranks:
            one.kill()
    return [one.wait() for one in ranks], (said[0].strip().splitlines() or [""])[-1]


def run(setting: Setting) -> Found:
    """As users start it, beside one device in float64, with a trace."""
    size, model = (2, "lenet5") if setting.tiny else (4, "unet3d:16")
    with TemporaryDirectory() as folder:
        flags = ("--steps", "3", "--compare-single", "--dtype", "float64", "--trace", f"{folder}/trace.json")
        whole(launch(Path(folder), size, *flags, model=model), 100.0)
    return {"told": f"{model} on {size} ranks ends as one device does"}


def whole(ranks: Sequence[Process], limit_s: float) -> None:
    """All of them end well."""
    codes, last = ended(ranks, limit_s)
    assert not any(codes), f"exit codes {codes}: {last}"


def killed(setting: Setting) -> Found:
    """Rank 0 names the one that was killed, and ends."""
    with TemporaryDirectory() as folder:
        ranks = launch(Path(folder), 2, "--steps", "1000000", "--timeout", "20")
        assert ranks[0].stdout is not None
        assert any("step 1/" in line for line in ranks[0].stdout), ended(ranks, 1.0)
        begun = time.monotonic()
        ranks[1].kill()
        codes, last = ended(ranks, ENDED_S)
    assert codes[0] == 2, f"exit codes {codes}: {last}"
    assert "rank 1 of 2" in last, last
    return {"told": f"after {time.monotonic() - begun:.1f} s: {last}"}


def sanitized(setting: Setting) -> Found:
    """A step of two ranks under compute-sanitizer, every tensor in memory of its own."""
    tool = shutil.which("compute-sanitizer")
    if setting.device == "cpu" or tool is None:
        return {"told": "needs a GPU, and compute-sanitizer"}
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    prefix = (tool, "--tool", "memcheck", "--error-exitcode", "99", "--report-api-errors", "no")
    with TemporaryDirectory() as folder:
        whole(launch(Path(folder), 2, "--steps", "1", "--timeout", "200", prefix=prefix), 220.0)
    return {"told": "memcheck found nothing in a step of two ranks"}
