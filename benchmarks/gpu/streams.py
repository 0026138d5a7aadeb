"""Streams: two and four ranks on the one GPU, over gloo by way of the CPU, have one device's numbers; one is killed.

NCCL refuses ranks that share a GPU, so what only NCCL does between ranks is not here.
"""

from __future__ import annotations

import math
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from subprocess import PIPE, Popen
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.gpu.rows import Found, Row, Setting, absent, die_with_parent, printed
from layerwise.comm.base import Comm
from layerwise.comm.solo import SoloComm
from layerwise.run.base import PREDICTED
from layerwise.search.__main__ import main as search
from tests.comm.pool import environment, run_ranks
from tests.run.plans import SMALL, Trained, check_equal, optimised_plan, priced, random_plan, recomputed, small, train

PLANS = 6  # random ones a row, every second with recomputed layers; and the best
TYPES = {"float64": (torch.float64, None, 1e-9), "float32": (torch.float32, None, 1e-2)}
TYPES |= {"bf16": (torch.float32, torch.bfloat16, math.inf)}  # of parameters, autocast's, and the tolerance
ROUNDING = 1.5  # times what 16 bits change on one device: ranks, which sum in another order, may be so far from it
RUN = "import benchmarks.gpu, runpy; runpy.run_module('layerwise.run', run_name='__main__')"
SANITIZERS = os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/cuda/bin"))
case = cache(small)


def rows(setting: Setting) -> list[Row]:
    """Whole runs; random plans of a network, by ranks and type."""
    kinds = [(name, 4, "float64") for name in SMALL]
    kinds += [(name, 4, kind) for kind in ("float32", "bf16") for name in ("vgg16", "resnet18", "unet3d")]
    kinds += [(name, 2, "float64") for name in SMALL]
    if setting.tiny:
        kinds = [("resnet18", 4, "float64"), ("lenet5", 2, "float64")]
    return [
        *(Row(take.__name__, partial(take, setting)) for take in (traced, killed)),
        *(Row(f"{n}, {ranks} ranks, {k}", partial(plans, setting, n, ranks, k), 400.0) for n, ranks, k in kinds),
        Row("compiled, 2 ranks", partial(plans, setting, "lenet5", 2, "float32", compiled=True)),
        Row("sanitized", partial(sanitized, setting)),
    ]


def on_rank(comm: Comm, name: str, number: int, dtype: str, options: object) -> tuple[object, ...]:
    """What this rank has trained, and on rank 0 what one device has. number: of the plan; the first is the best.

    Then the plan, and on rank 0 how far gradients may be from one device's in 16 bits, by what these change there.
    """
    die_with_parent()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    (kind, autocast, _), full = TYPES[dtype], case(name)
    graph = full.graph
    io = "sample" if graph.batch >= comm.size else "free"
    plan = random_plan(graph, comm.size, 2 * number, io) if number else priced(optimised_plan(graph, comm.size), graph)
    plan = recomputed(plan, graph, number) if number % 2 else plan
    inputs, targets = [x.to(comm.device, kind) for x in full.inputs], [y.to(comm.device) for y in full.targets]

    def trained(on: Comm, **options: object) -> Trained:
        data = replace(full, inputs=inputs, targets=targets)
        made = train(data, plan, on, dtype=kind, autocast=autocast, **options)
        made.gradients = {key: (box, gradient.cpu()) for key, (box, gradient) in made.gradients.items()}
        return made

    alone = trained(SoloComm(comm.device)) if comm.rank == 0 else None
    most = math.inf
    if alone and autocast:
        exact = train(replace(full, inputs=inputs, targets=targets), plan, SoloComm(comm.device), dtype=kind)
        most = ROUNDING * apart(alone, exact)
    mine = trained(comm, compile=options)
    if dtype != "float64":  # of which the plan's bytes are
        everyone = comm.all_gather_object(mine.sent)
        plan = replace(plan, predicted={PREDICTED[k]: sum(one[k] for one in everyone) for k in PREDICTED})
    return mine, alone, plan, most


def apart(one: Trained, other: Trained) -> float:
    """The norm of what the gradients of its boxes differ by."""
    each = [(g.cpu() - other.gradients[name][1][box.slices()].cpu()).norm() for name, (box, g) in one.gradients.items()]
    return float(torch.stack(each).norm())


def plans(setting: Setting, name: str, ranks: int, dtype: str, *, compiled: bool = False) -> Found:
    """All of them; an AssertionError names the tensor that is not one device's."""
    alone = {"options": {"compile_threads": 1}}  # a rank of the pool may have no children
    options = ({"backend": "eager"} if setting.tiny else alone) if compiled else False
    numbers = range(2 if setting.tiny or compiled else 1 + PLANS)
    for number in numbers:
        try:
            call = "benchmarks.gpu.streams:on_rank", name, number, dtype, options
            made: Any = run_ranks(ranks, *call, device=setting.device)
            every, (_, single, plan, most) = [mine for mine, *_ in made], made[0]
            check_equal(every, single, plan, tolerance=TYPES[dtype][2])
            off = max(apart(mine, single) for mine in every)
            assert off <= most, f"gradients are {off:.2e} from one device's; {most:.2e} is what rounding explains"
        except AssertionError as error:
            raise AssertionError(f"plan {number}: {error}") from None
    to = f"to {TYPES[dtype][2]:g}" if TYPES[dtype][1] is None else "but for rounding"
    return {"told": f"{len(numbers)} plans have one device's numbers, {to}"}


@contextmanager
def launched(size: int, *flags: str, model: str = "lenet5", tool: Sequence[str] = ()) -> Iterator[list[Popen[str]]]:
    """`layerwise run` on so many ranks of this machine, which share its GPU; killed at the end."""
    with TemporaryDirectory() as folder:
        options = ["--gpus", str(size), "--profile", "cpu", "--global-batch", "16", "--out", f"{folder}/plan.json"]
        printed(search, [model, *options, "--json"])
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [*tool, sys.executable, "-W", "ignore", "-c", RUN, options[-1], "--data", "synthetic", *flags]
        start = partial(Popen[str], command, text=True, stdout=PIPE, stderr=PIPE, preexec_fn=die_with_parent)
        here = os.environ | {"PYTHONUNBUFFERED": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        ranks = [start(env=here | environment(rank, size, port, agent=False)) for rank in range(size)]
        try:
            yield ranks
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def ended(ranks: Sequence[Popen[str]], limit_s: float) -> tuple[list[int], str]:
    """Exit codes, and the last line that rank 0 has on stderr."""
    stderr = [rank.communicate(timeout=limit_s)[1] for rank in ranks]
    return [rank.returncode for rank in ranks], (stderr[0].strip().splitlines() or [""])[-1]


def traced(setting: Setting) -> Found:
    """As users start it, beside one device in float64, with a trace."""
    size, model = (2, "lenet5") if setting.tiny else (4, "unet3d:16")
    flags = ("--steps", "3", "--compare-single", "--dtype", "float64", "--trace", f"{setting.out}/trace.json")
    with launched(size, *flags, model=model) as ranks:
        codes, last = ended(ranks, 200.0)
    assert not any(codes), f"exit codes {codes}: {last}"
    return {"told": f"{model} on {size} ranks ends as one device does"}


def killed(setting: Setting) -> Found:
    """Rank 0 names the one that was killed, and ends."""
    with launched(2, "--steps", "1000000", "--timeout", "20") as ranks:
        assert ranks[0].stdout is not None
        assert any("step 1/" in line for line in ranks[0].stdout), ended(ranks, 1.0)
        begun_s = time.monotonic()
        ranks[1].kill()
        codes, last = ended(ranks, 60.0)
    assert codes[0] == 2, f"exit codes {codes}: {last}"
    assert "rank 1 of 2" in last, last
    return {"told": f"after {time.monotonic() - begun_s:.1f} s: {last}"}


def sanitized(setting: Setting) -> Found:
    """A step of two ranks under compute-sanitizer, every tensor in memory of its own."""
    tool = shutil.which("compute-sanitizer", path=SANITIZERS)
    if setting.device == "cpu" or tool is None:
        return absent("a GPU" if tool else "compute-sanitizer")
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    prefix = (tool, "--tool", "memcheck", "--error-exitcode", "99", "--report-api-errors", "no")
    with launched(2, "--steps", "1", "--timeout", "200", tool=prefix) as ranks:
        codes, last = ended(ranks, 230.0)
    assert not any(codes), f"exit codes {codes}: {last}"
    return {"told": "memcheck found nothing in a step of two ranks"}
