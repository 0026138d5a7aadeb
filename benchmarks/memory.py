"""python -m benchmarks.memory: networks train on four ranks, each under a memory limit that no other plan can keep.

Each run has the same batches and initial values. AlexNet does not fit into one rank. For the others it is proven that
any plan which neither recomputes nor shares out states needs more than the limit. The fastest plan of the least memory
that such a plan was found to need is run under it, and must fail, and say so. What is searched with these choices must
train, with the losses of one rank without a limit.

Measured: the most memory of the fullest rank that no file is behind (RssAnon), every 5 ms, without a limit, less that
of a rank that trains a network of next to nothing, and less what tracing the case's network leaves in a process that
does only that (`after_trace`: PyTorch's objects, which no plan counts). The limit of a run is the kernel's RLIMIT_DATA:
what these two take, what the search was told that a step may take, and 5 % of that, as predictions are to be within
these; besides what is only reserved, such as stacks of threads, which RLIMIT_DATA counts, too.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rich.console import Console
from rich.table import Table

from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel, CostOptions
from layerwise.graph.fuse import fuse
from layerwise.importers.load import load_model, names_code
from layerwise.machine import load
from layerwise.quantities import units
from layerwise.search.find import search
from layerwise.search.make_plan import make_plan
from layerwise.search.priced.variants import OFFERS
from layerwise.search.report.sentences import choices, nothing_fits
from layerwise.search.result import SearchResult

RANKS, STEPS, SAMPLING_S, UNLIMITED = 4, 2, 0.005, 1e15
TOLERANCE = 1e-3  # of losses in float32
ROOM = 1.05  # of what is predicted, that a process may take
# Memory that is freed goes back to the kernel at once, so that what is resident is what is held: malloc's, and what MKL
# copies matrices into, which it else keeps for the next product.
FREED = {"MALLOC_MMAP_THRESHOLD_": str(2**16), "MALLOC_ARENA_MAX": "1", "MKL_DISABLE_FAST_MM": "1"}
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"} | FREED


@dataclass(frozen=True, slots=True)
class Case:
    """What trains under which limit, and on how many ranks it does not."""

    model: str
    batch: int
    optimizer: str
    limit_bytes: int
    too_few: int = RANKS
    reserve_bytes: int = 0  # of the limit, for what no plan counts: copies that oneDNN makes for convolutions


CASES = {
    "alexnet": Case("alexnet", 4, "momentum", 450 * 10**6, too_few=1),
    "mlp": Case("mlp:1536x1536x1536x1536x1536x1536x1536", 3072, "adam", 150 * 10**6),
    "gpt": Case("benchmarks.common.large:gpt", 8, "adam", 130 * 10**6),
    "unet": Case("benchmarks.common.large:unet", 1, "adam", 420 * 10**6, reserve_bytes=95 * 10**6),
}
TINY = Case("mlp:8x8", 4, "adam", 10**9)


@dataclass(frozen=True, slots=True)
class End:
    """How a run ended."""

    code: int
    own_bytes: float  # the most of a process that no file is behind
    data_bytes: float  # and that RLIMIT_DATA counts
    losses: list[float]  # empty where it failed
    said: list[str]  # lines of stderr


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan's file, and the search that it is of."""

    path: Path
    result: SearchResult


def planned(case: Case, ranks: int, limit_bytes: float, offer: Sequence[str], folder: Path) -> Planned:
    """The best plan for ranks on this machine of so much memory."""
    graph = fuse(load_model(case.model, case.batch))
    options = CostOptions(io="sample" if case.batch >= ranks else "free", optimizer=case.optimizer)
    model = CostModel(graph, load("cpu").device_graph(ranks, ranks), options)
    space = SearchSpace(ranks)
    result = search(model, space, memory_limit_bytes=limit_bytes, offer=offer)
    path = folder / f"{ranks} {limit_bytes:.0f} {len(offer)}.json"
    make_plan(case.model, "cpu", model, space, result, fused=True).save(path)
    return Planned(path, result)


def train(plan: Path, model: str, ranks: int, limit_bytes: float | None) -> End:
    """Some steps on random numbers; every process is under the limit."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    command = [sys.executable, "-W", "ignore", "-m", *(torchrun if ranks > 1 else []), "layerwise.run", str(plan)]
    command += ["--data", "synthetic", "--steps", str(STEPS), "--json", "--timeout", "300"]
    command += ["--model", model] if names_code(model) else []

    def limit() -> None:
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (int(limit_bytes), int(limit_bytes)))

    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, env=ENVIRONMENT, stdout=out, stderr=err, preexec_fn=limit)
        peaks = Peaks(process.pid)
        code = process.wait()
        own, data = peaks.end()
        out.seek(0)
        err.seek(0)
        text, lines = out.read(), err.read().strip().splitlines()
    return End(code, own, data, json.loads(text)["losses"] if code == 0 else [], lines)


class Peaks:
    """Looks at a process and all that come of it, until `end`."""

    def __init__(self, pid: int) -> None:
        self._pid, self._own, self._data, self._over = pid, 0.0, 0.0, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def end(self) -> tuple[float, float]:
        """Bytes of the largest process: that no file is behind, and that RLIMIT_DATA counts."""
        self._over.set()
        self._thread.join()
        return self._own, self._data

    def _look(self) -> None:
        while not self._over.wait(SAMPLING_S):
            for pid in _descendants(self._pid):
                own, data = held(pid)
                self._own, self._data = max(self._own, own), max(self._data, data)


def _descendants(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:  # it has ended
            continue
        for child in children:
            yield from _descendants(int(child))


def held(pid: int) -> tuple[float, float]:
    """Bytes of a process: that no file is behind, and that RLIMIT_DATA counts; none where it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0, 0.0
    sizes = {name: rest.split()[0] for name, _, rest in (line.partition(":") for line in lines) if rest.split()}
    return 1024.0 * int(sizes.get("RssAnon", 0)), 1024.0 * int(sizes.get("VmData", 0))


@cache
def nothing(ranks: int) -> End:
    """What a rank takes that trains a network of next to nothing."""
    with tempfile.TemporaryDirectory() as folder:
        plan = planned(TINY, ranks, TINY.limit_bytes, (), Path(folder))
        return train(plan.path, TINY.model, ranks, None)


@cache
def after_trace(case: Case) -> float:
    """Bytes that no file is behind, of a process that has read the case's network and let it go again."""
    imports = "import gc, os, sys, layerwise.commands.run; from benchmarks import memory; "
    imports += "from layerwise.importers.load import load_network; "
    code = imports + "load_network(sys.argv[1], int(sys.argv[2])); gc.collect(); print(memory.held(os.getpid())[0])"
    command = [sys.executable, "-W", "ignore", "-c", code, case.model, str(case.batch)]
    return float(subprocess.run(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, check=True).stdout)


def besides(case: Case, ranks: int) -> float:
    """Bytes of a rank that are none of the step's: PyTorch, Python, and what tracing the network leaves."""
    traced = after_trace(case) - after_trace(TINY)
    return nothing(ranks).own_bytes + traced


def run(case: Case, table: Table, folder: Path) -> str:
    """Adds the rows of a case; returns what the search says without the choices. AssertionError where it is not so."""
    alone = planned(case, 1, UNLIMITED, (), folder)
    few, limit = case.too_few, case.limit_bytes
    refused = planned(case, few, limit, (), folder)
    least = refused.result.least
    assert least is not None
    assert least.lower_bound_bytes > limit
    forced = planned(case, few, least.bytes, (), folder)
    chosen = planned(case, RANKS, limit - case.reserve_bytes, OFFERS, folder)
    assert chosen.result.best.fits, nothing_fits(chosen.result)
    whole, free = (train(one.path, case.model, ranks, None) for one, ranks in ((alone, 1), (chosen, RANKS)))
    assert whole.code == free.code == 0, (whole.said, free.said)
    may_take = besides(case, RANKS) + ROOM * limit + free.data_bytes - free.own_bytes
    failed, trained = train(forced.path, case.model, few, may_take), train(chosen.path, case.model, RANKS, may_take)
    row(table, case, "on one rank", 1, alone, None, whole, whole)
    row(table, case, "on one rank" if few == 1 else "without the choices", few, forced, limit, failed, None)
    row(table, case, "searched", RANKS, chosen, limit, trained, free)
    assert failed.code != 0
    assert any("ran out of memory" in line for line in failed.said), failed.said
    assert trained.code == 0, trained.said
    for end in (free, trained):
        pairs = zip(whole.losses, end.losses, strict=True)
        assert all(math.isclose(a, b, rel_tol=TOLERANCE) for a, b in pairs), (whole.losses, end.losses)
    return f"{nothing_fits(refused.result)}. {' '.join(choices(chosen.result.best.strategy.values()))}"


def row(
    table: Table, case: Case, name: str, ranks: int, plan: Planned, limit: float | None, end: End, free: End | None
) -> None:
    """One run. free: the same without a limit, whose memory is told."""
    predicted, bound = plan.result.best.price.memory_bytes, "none" if limit is None else units(limit, "B")
    sizes = [units(predicted, "B"), "", ""]
    if free is not None:
        measured = free.own_bytes - besides(case, ranks)
        sizes[1:] = units(measured, "B"), f"{measured / predicted:.2f}"
    table.add_row(name, str(ranks), bound, *sizes, " ".join(f"{x:.4f}" for x in end.losses) or "out of memory")


def main() -> None:
    """Run and print."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES))
    args = p.parse_args()
    out = Console(width=140, highlight=False)
    for name in args.only:
        case = CASES[name]
        title = f"{name}: {case.model}, batch {case.batch}, {case.optimizer}"
        heads = ("ranks", "limit", "predicted", "measured", "measured / predicted", "losses")
        table = Table("plan", *heads, title=title, title_justify="left", box=None)
        try:
            with tempfile.TemporaryDirectory() as folder:
                said = run(case, table, Path(folder))
        finally:  # also where it is not as it should be
            out.print(table)
        out.print(said, "", sep="\n")


if __name__ == "__main__":
    main()
