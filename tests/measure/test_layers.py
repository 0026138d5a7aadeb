"""Measuring: in order, within the budget, kept whatever happens, and taken up where it stopped."""

import json
import threading
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
import torch

from layerwise.__main__ import dispatch
from layerwise.cli import run_main, seconds
from layerwise.comm.base import Comm
from layerwise.comm.solo import SoloComm
from layerwise.machine import load, save
from layerwise.machine.layer_times import CellTime, Conditions, LayerTimes, Work
from layerwise.measure import measuring as layers
from layerwise.measure.bench import Mode, UpdateSpec
from layerwise.measure.cells import CellTask
from layerwise.measure.measuring import Measuring, measure
from layerwise.measure.timing import Stopwatch
from layerwise.plan import load_plan
from tests.comm.thread import run_threads

MODE = Mode(torch.device("cpu"), torch.float32)
START = LayerTimes(Conditions("device", "2.13.0", "float32"))


def cell(i: int, predicted_s: float = 1.0) -> CellTask:
    return CellTask("conv", (i,), "conv", UpdateSpec("sgd", (1,)), predicted_s, 0.0, Work(), Work())


class Machine:
    """Stands for the device: what was run, and how long it takes by a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, each_s: float = 7.0) -> None:
        self.now, self.ran, self.fails = 0.0, list[int](), dict[int, BaseException]()
        self.each_s = each_s
        monkeypatch.setattr(layers.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(layers, "timed", self.timed)

    def timed(self, cell: CellTask, mode: Mode, stopwatch: Stopwatch) -> CellTime:
        (number,) = cell.extents
        self.now += self.each_s
        if number in self.fails:
            raise self.fails[number]
        self.ran.append(number)
        return CellTime(float(number), 0.0, 0.0, 5)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_in_order_and_within_the_budget(machine: Machine) -> None:
    """4 samples of 1 s fit into what is left of 30 s: after 4 cells of 7 s, 2 s are left."""
    measuring = Measuring(START, MODE, lambda _: None, 30.0, SoloComm())
    seen: list[int] = []
    measure([(measuring, [cell(i) for i in (5, 3, 1, 2, 4, 9)])], seen.append)
    assert machine.ran == [5, 3, 1, 2]
    assert seen[-1] == 6
    assert measuring.taken == 4
    assert machine.now == 28
    measure([(measuring, [cell(4), cell(9, predicted_s=0.1)])])  # what is small still fits
    assert machine.ran == [5, 3, 1, 2, 9]
    assert [c.extents for c in measuring.left([cell(4), cell(5), cell(6, predicted_s=2.0), cell(9)])] == [(6,), (4,)]


def test_what_was_measured_before_is_not_measured_again(machine: Machine) -> None:
    kept: list[LayerTimes] = []
    measure([(Measuring(START, MODE, kept.append, 100.0, SoloComm()), [cell(1), cell(2)])])
    again = Measuring(kept[-1], MODE, kept.append, 100.0, SoloComm())
    measure([(again, [cell(i) for i in (1, 2, 3)])])
    assert machine.ran == [1, 2, 3]
    assert again.taken == 1
    assert set(kept[-1].cells["conv"]) == {(1,), (2,), (3,)}


def test_an_interrupt_keeps_what_there_is(machine: Machine) -> None:
    machine.fails[3] = KeyboardInterrupt()
    kept: list[LayerTimes] = []
    with pytest.raises(KeyboardInterrupt):
        measure([(Measuring(START, MODE, kept.append, 100.0, SoloComm()), [cell(i) for i in (1, 2, 3, 4)])])
    assert set(kept[-1].cells["conv"]) == {(1,), (2,)}


def test_it_is_written_now_and_then(machine: Machine) -> None:
    kept: list[LayerTimes] = []
    measure([(Measuring(START, MODE, kept.append, 100.0, SoloComm()), [cell(i) for i in (1, 2)])])
    assert [one.count for one in kept] == [1, 2, 2]  # each took more than SAVE_S, and once at the end


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "conv: does not fit into memory"),
        (torch.OutOfMemoryError("8 GiB"), "conv: does not fit into memory"),
        (ValueError("Expected more than 1 value\nper channel"), "conv: Expected more than 1 value"),
    ],
)
def test_a_cell_that_cannot_be_run_is_left_out(machine: Machine, error: BaseException, said: str) -> None:
    machine.fails[1] = error
    measuring = Measuring(START, MODE, lambda _: None, 100.0, SoloComm())
    measure([(measuring, [cell(1), cell(2)])])
    assert machine.ran == [2]
    assert measuring.failed == {("conv", (1,)): said}
    assert measuring.left([cell(1), cell(2), cell(3)]) == [cell(3)]


def test_more_than_there_is_of_memory_is_not_tried() -> None:
    with pytest.raises(MemoryError):
        layers.timed(replace(cell(1), bytes=1e18), MODE, Stopwatch(MODE.device))


def test_an_update_is_without_what_any_step_costs(machine: Machine) -> None:
    measuring = Measuring(START, MODE, lambda _: None, 100.0, SoloComm(), call_s=1.5)
    measure([(measuring, [cell(1), cell(4)])])
    assert [t.forward_s for t in measuring.times.cells["conv"].values()] == [0.0, 2.5]


MODEL = ["mlp:8x6x4", "--gpus", "2", "--batch", "4"]


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of a small network."""
    path = tmp_path_factory.mktemp("profiles") / "mine.json"
    command = ["measure", "layers", *MODEL, "--device", "cpu", "--budget", "20s", "--out", str(path), "--json"]
    assert run_main(dispatch, command) == 0
    return path


def test_the_profile_has_every_cell(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = load(profile)
    (times,) = found.layers
    assert times.conditions.device == found.processor.name
    assert times.conditions.dtype == "float32"
    assert set(times.made) >= {"date", "machine", "python", "layerwise"}
    assert {"runtime layer", "runtime copy", "runtime step sgd", "update by sgd"} < set(times.cells)
    assert all(t.samples >= 5 and t.forward_s >= 0 for cells in times.cells.values() for t in cells.values())
    assert [level.name for level in found.levels] == ["node", "cluster"]  # of the profile it began with


def test_times_of_the_runtime_are_not_counted_as_cells(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["measure", "layers", *MODEL, "--device", "cpu", "--budget", "0.001s", "--json"]
    assert run_main(dispatch, command) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["measured_now"] == done["measured"] < done["cells"]


def test_a_second_run_has_nothing_to_do(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = load(profile).layers[0].cells
    command = ["measure", "layers", *MODEL, "--device", "cpu", "--out", str(profile), "--json"]
    assert run_main(dispatch, command) == 0
    done = json.loads(capsys.readouterr().out)
    assert (done["measured_now"], done["missing"], done["measured"]) == (0, 0, done["cells"])
    assert done["best_share"] == pytest.approx(1)
    assert load(profile).layers[0].cells == before


def test_a_plan_says_that_it_rests_on_it(profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    assert run_main(dispatch, ["search", *MODEL, "--profile", str(profile), "--out", str(plan)]) == 0
    out = capsys.readouterr().out
    assert "100% measured on" in out
    assert "WARNING" not in out
    made = load_plan(plan).provenance["compute_time"]
    assert isinstance(made, dict)
    assert made["measured"] == pytest.approx(1)
    assert made["conditions"]["dtype"] == "float32"
    assert run_main(dispatch, ["search", *MODEL, "--profile", str(profile), "--dtype", "float64", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["compute_time"]["measured"], said["compute_time"]["conditions"]) == (0.0, None)
    assert "bytes and memory are those of float32 tensors" in said["warnings"][0]
    assert "so t_C in float64 is analytic" in said["warnings"][1]


def test_a_profile_that_is_damaged_or_of_another_device(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.json"
    file.write_text(profile.read_text()[:-100])
    command = ["measure", "layers", *MODEL, "--device", "cpu", "--out", str(file)]
    assert run_main(dispatch, command) == 2
    assert f"profile {file} is not JSON" in capsys.readouterr().err
    save(load(profile), file)
    other = file.read_text().replace(load(profile).layers[0].conditions.device, "NVIDIA H100")
    file.write_text(other)
    assert run_main(dispatch, command) == 2
    assert "has times of another device, 'NVIDIA H100'" in capsys.readouterr().err
    assert file.read_text() == other


def test_budgets() -> None:
    assert [seconds(text) for text in ("120s", "2m", "0.5h", "90")] == [120, 120, 1800, 90]


def test_kinds_are_measured_at_once_each_by_its_own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 2 are of one kind, rank 1 is of another, and rank 3 of none: every rank learns all times."""

    def timed(cell: CellTask, mode: Mode, stopwatch: Stopwatch) -> CellTime:
        return CellTime(float(threads[threading.get_ident()]), 0.0, 0.0, 5)

    monkeypatch.setattr(layers, "timed", timed)
    threads = dict[int, int]()

    def rank(comm: Comm) -> list[dict[int, float]]:
        threads[threading.get_ident()] = comm.rank
        kinds = [Measuring(START, MODE, lambda _: None, inf, comm, ranks=ranks) for ranks in ((0, 2), (1,))]
        measure([(kinds[0], [cell(i) for i in range(4)]), (kinds[1], [cell(i) for i in (1, 7)])])
        return [{i: t.forward_s for (i,), t in kind.times.cells["conv"].items()} for kind in kinds]

    assert run_threads(4, rank) == [[{0: 0.0, 1: 2.0, 2: 0.0, 3: 2.0}, {1: 1.0, 7: 1.0}]] * 4
