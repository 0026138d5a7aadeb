"""One network of the zoo through all that layerwise does with it: exported, imported, planned, run."""

from __future__ import annotations

import copy
import io
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.zoo.compare import NARROW, TOLERANCES, Reference, compared, reference, traced_once
from benchmarks.zoo.example import SAMPLES, Example
from benchmarks.zoo.networks import build
from benchmarks.zoo.plans import PLANS, RANKS
from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.importers.load import Network, network_of
from layerwise.machine import load as load_profile
from layerwise.search.find import search

GPUS, PER_GPU, PROFILE = 8, 8, "h100"


@dataclass
class Row:
    """What became of a network. `stage`: where it stopped, or "done"; `said`: the sentence that stopped it."""

    name: str
    stage: str = "build"
    dtype: str = "float64"
    said: str = ""
    loud: bool = True  # whether what stopped it is layerwise's own sentence
    parameters: int = 0
    layers: int = 0
    export_s: float = 0.0  # CPU time, as all here
    import_s: float = 0.0
    plan_s: float = 0.0
    proven: bool = False
    final_nodes: int = 0
    gain: float = 0.0  # predicted, over data parallelism
    planned: str = ""  # why there is no plan for 8 GPUs, if there is none
    narrow: bool = False  # parts of it compute in float32 whatever the rest does, so it is compared to that
    single: bool = False  # all of it computes in float32, as PyTorch has no kernel of float64 for some of it
    widened: bool = False  # so rounded that it is compared with these parts in float64, too
    random: bool = False  # it draws: plans are compared with one rank's layers, not with PyTorch
    differences: dict[str, float] = field(default_factory=dict)  # by plan: the largest, relative (see compare)
    refused: dict[str, str] = field(default_factory=dict)  # by plan: the sentence
    wrong: dict[str, str] = field(default_factory=dict)  # by plan: what differs most
    cpu_s: float = 0.0
    seconds: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether all plans ran and gave PyTorch's numbers."""
        return self.stage == "done" and not self.refused and not self.wrong and bool(self.differences)


def trial(name: str, dtype: str = "float64", *, timed: bool = True) -> Row:
    """All of it, as far as it goes. timed: with the time of torch.export, and a plan for 8 GPUs."""
    row, started, cpu = Row(name, dtype=dtype), time.perf_counter(), time.process_time()
    try:
        _stages(row, timed=timed)
        row.stage = "done"
    except Exception as error:  # whatever it is: it is what the table tells of this network
        row.said, row.loud = one_line(error), isinstance(error, LayerwiseError)
    row.seconds, row.cpu_s = time.perf_counter() - started, time.process_time() - cpu
    return row


def one_line(error: BaseException) -> str:
    """The first line of an error that says something."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return said if isinstance(error, LayerwiseError) else f"{type(error).__name__}: {said}"[:300]


def _stages(row: Row, *, timed: bool) -> None:
    network_of(nn.Linear(2, 2), (torch.randn(2, 2),), 2, "first")  # what layerwise imports at its first call, likewise
    torch.manual_seed(0)
    torch.set_num_threads(1)
    _export(nn.Linear(2, 2), (torch.randn(2, 2),))  # what torch.export imports at its first call is nobody's time
    given = prepared(build(row.name), getattr(torch, row.dtype))
    if row.dtype == "float64" and not _runs(given):
        row.single = True
        given = prepared(build(row.name), torch.float32)
    call = given.call(given.inputs)
    row.parameters = sum(p.numel() for p in given.model.parameters())
    row.stage = "export"
    if timed:
        with _clock(row, "export_s"):
            _export(given.model, *call)
    row.stage = "import"
    try:
        with _clock(row, "import_s"):
            network = network_of(given.model, call[0], SAMPLES * RANKS, row.name, call[1])
    except LayerwiseError:
        if not timed:
            row.stage = "export"
            _export(given.model, *call)  # whose failure it is not, or is
            row.stage = "import"
        raise
    row.layers = len(network.graph.inner)
    row.stage = "plan"
    try:
        if timed:
            _plan(row, network)
    except LayerwiseError as error:
        row.planned = str(error)
    row.stage = "run"
    made = {stage.space.out.dtype for layer in network.graph.inner for stage in layer.stages}
    row.narrow = row.dtype == "float64" and "float32" in made and not row.single
    tolerance = TOLERANCES["float32" if row.single else row.dtype]
    with traced_once():
        _run(row, given, network, NARROW if row.narrow else tolerance)
    if row.narrow and row.wrong:  # by rounding alone? then it is not where nothing is rounded so
        row.widened, row.wrong, row.refused, row.differences = True, {}, {}, {}
        with widened():
            network = network_of(given.model, call[0], SAMPLES * RANKS, row.name, call[1])
            with traced_once():
                _run(row, given, network, tolerance)


def _runs(given: Example) -> bool:
    """Whether PyTorch itself has all that the network needs in its element type."""
    positional, named = given.call(given.inputs)
    try:
        with torch.no_grad():
            copy.deepcopy(given.model)(*positional, **named)
    except RuntimeError:
        return False
    return True


@contextmanager
def widened() -> Iterator[None]:
    """Within it what is cast to float32 is cast to float64, in all threads: each rank traces the model once more."""
    with ExitStack() as stack:
        for where, name, value in ((Tensor, "float", Tensor.double), (torch, "float32", torch.float64)):
            stack.enter_context(mock.patch.object(where, name, value))
        yield


def _export(model: nn.Module, inputs: tuple[Tensor, ...], named: Mapping[str, Tensor] | None = None) -> None:
    with redirect_stderr(io.StringIO()):  # where it fails, it prints the graph so far
        torch.export.export(model, inputs, dict(named or {}), strict=False)


def _plan(row: Row, network: Network) -> None:
    """For 8 GPUs."""
    graph = fuse(network.graph.rebatch(GPUS * PER_GPU))
    with _clock(row, "plan_s"):
        found = search(CostModel(graph, load_profile(PROFILE).device_graph(GPUS)), SearchSpace(GPUS))
    row.proven, row.final_nodes = bool(found.optimum.proven), found.optimum.final_nodes
    row.gain = found.baselines["data"].timeline.total_s / found.fastest.timeline.total_s


def _run(row: Row, given: Example, network: Network, tolerance: float) -> None:
    """Under every kind of plan, on two ranks."""
    inputs = tuple(torch.cat([x, _other(x)]) for x in given.inputs)
    wanted: Reference = reference(given, inputs, network)
    row.random = wanted.random
    for kind, make in PLANS.items():
        try:
            plan = make(network)
            away = compared(network, plan, given, inputs, wanted)
        except LayerwiseError as error:
            row.refused[kind] = str(error)
            continue
        row.differences[kind] = max(away.values(), default=0.0)
        if not row.differences[kind] <= tolerance:  # no number, too
            worst = max(away, key=lambda key: away[key] if away[key] == away[key] else float("inf"))
            row.wrong[kind] = f"{worst}: {away[worst]:.1e}"


def prepared(given: Example, dtype: torch.dtype) -> Example:
    """In training, in this element type, with nothing dropped: PyTorch's draws are others than layerwise's."""
    model = given.model.to(dtype).train()
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or (name == "p" and "Drop" in type(module).__name__)):
                setattr(module, name, 0.0)
    inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in given.inputs)
    return replace(given, model=model, inputs=inputs)


def _other(x: Tensor) -> Tensor:
    """Other samples of the same kind."""
    return x.flip(0).roll(1, -1) if not x.is_floating_point() else torch.randn_like(x)


@contextmanager
def _clock(row: Row, name: str) -> Iterator[None]:
    begun = time.process_time()
    yield
    setattr(row, name, time.process_time() - begun)


def as_json(row: Row) -> dict[str, object]:
    """For a file."""
    return asdict(row) | {"exact": row.exact}


def row_of(told: Mapping[str, Any]) -> Row:
    """From `as_json`."""
    return Row(**{key: value for key, value in told.items() if key != "exact"})
