"""Rounds that the host disturbs do not count."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import pytest
import torch

from layerwise.cli import run_main
from layerwise.comm.base import Comm
from layerwise.comm.solo import SoloComm
from layerwise.errors import LayerwiseError
from layerwise.machine import load, save
from layerwise.measure import __main__ as links_command
from layerwise.measure import timing
from layerwise.measure.__main__ import main, parser
from layerwise.measure.timing import MOST, ROUNDS, TRIES, timed
from layerwise.measure.topology import Topology
from tests.comm.launch import launch

WARM = 2  # calls that do not count


@dataclass
class Alone:
    """A single rank."""

    device = torch.device("cpu")

    def barrier(self) -> None:
        """There is nobody to wait for."""

    def all_gather_object(self, value: object) -> list[object]:
        return [value]


class Machine:
    """Rounds take a second each, and longer by what the host takes."""

    def __init__(self, takes: Callable[[int], float]) -> None:
        self.now = self.taken = 0.0
        self.calls, self.takes = 0, takes

    def operation(self) -> None:
        took = self.takes(self.calls)
        self.calls += 1
        self.taken += took
        self.now += 1.0 + took


Made = Callable[[Callable[[int], float]], Machine]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Made:
    def made(takes: Callable[[int], float]) -> Machine:
        found = Machine(takes)
        monkeypatch.setattr(timing, "stolen_s", lambda: found.taken)
        monkeypatch.setattr(timing, "now_s", lambda _: found.now)
        monkeypatch.setattr("os.cpu_count", lambda: 2)
        return found

    return made


def seconds(machine: Machine) -> float:
    return timed(cast(Comm, Alone()), machine.operation).seconds


def test_undisturbed_rounds_are_not_repeated(machine: Made) -> None:
    quiet = machine(lambda _: 0.03)
    assert seconds(quiet) == pytest.approx(1.03)
    assert quiet.calls == WARM + ROUNDS


def test_disturbed_rounds_are_repeated(machine: Made) -> None:
    burst = machine(lambda call: 0.5 * (call < WARM + ROUNDS + 2))
    assert seconds(burst) == pytest.approx(1.0)
    assert burst.calls == WARM + ROUNDS + 2 + ROUNDS


def test_the_least_disturbed_count_where_all_are(machine: Made) -> None:
    busy = machine(lambda call: 0.1 if call % 3 == 0 else 0.5)
    assert seconds(busy) == pytest.approx(1.1)
    assert busy.calls == WARM + TRIES * ROUNDS


def test_fast_rounds_count_only_by_what_was_stolen(machine: Made) -> None:
    """The choice is blind to the result: a disturbed round is left out even where it is the faster one."""
    odd = machine(lambda call: 0.0)
    operation = odd.operation

    def fast_when_disturbed() -> None:
        operation()
        if odd.calls % 2:
            odd.taken, odd.now = odd.taken + 0.2, odd.now - 0.5

    assert timed(cast(Comm, Alone()), fast_when_disturbed).seconds == pytest.approx(1.0)


def test_of_equally_disturbed_rounds_the_earlier_ones_count(machine: Made) -> None:
    busy = machine(lambda _: 0.5)
    operation = busy.operation

    def ever_faster() -> None:
        operation()
        busy.now -= 0.01 * busy.calls

    last = WARM + ROUNDS
    middle = 1.5 - 0.01 * (WARM + 1 + last) / 2
    assert timed(cast(Comm, Alone()), ever_faster).seconds == pytest.approx(middle)
    assert busy.calls == WARM + TRIES * ROUNDS


def test_short_operations_are_repeated_in_a_round(machine: Made) -> None:
    short = machine(lambda _: -1.0 + 1e-6)  # of a microsecond
    assert timed(cast(Comm, Alone()), short.operation).seconds == pytest.approx(1e-6)
    assert short.calls == WARM + ROUNDS * MOST


def test_a_kernel_that_does_not_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(timing, "STAT", tmp_path / "none")
    assert timing.stolen_s() == 0.0


def test_of_all_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "stat"
    path.write_text("cpu  1 2 3 4 5 6 7 250 0 0\ncpu0 1 2 3 4 5 6 7 130 0 0\n")
    monkeypatch.setattr(timing, "STAT", path)
    assert timing.stolen_s() == pytest.approx(250 / os.sysconf("SC_CLK_TCK"))


TORCHRUN = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def test_one_rank_has_no_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    out = tmp_path / "x.json"
    assert run_main(main, ["links", "--out", str(out)]) == 2
    err = capsys.readouterr().err
    assert "links are measured between ranks, and here is only one: torchrun" in err
    assert err.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize(
    ("out", "text", "said"),
    [
        ("missing/x.json", None, "cannot be written"),
        ("x.json", "{", "is not JSON"),
        ("x.json", '{"format": "layerwise-profile", "version": 1}', "missing"),
    ],
)
def test_what_is_wrong_with_the_file_is_said_before_anybody_is_waited_for(
    out: str,
    text: str | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    if text is not None:
        (tmp_path / out).write_text(text)
    assert run_main(main, ["links", "--out", str(tmp_path / out)]) == 2
    assert said in capsys.readouterr().err
    assert (tmp_path / out).read_text() == text if text is not None else not (tmp_path / out).exists()


def test_an_environment_that_is_not_torchruns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (TORCHRUN | {"WORLD_SIZE": "two"}).items():
        monkeypatch.setenv(name, value)
    assert run_main(main, ["links", "--out", str(tmp_path / "x.json")]) == 2
    assert "WORLD_SIZE is 'two', but must be an integer" in capsys.readouterr().err


def test_a_profile_of_one_node_is_refused_before_two_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(replace(load("cpu"), levels=load("cpu").levels[:1]), tmp_path / "x.json")
    monkeypatch.setattr(links_command, "start", lambda _: SoloComm(torch.device("cpu")))
    monkeypatch.setattr(links_command, "find_topology", lambda _: Topology(2, 1))
    monkeypatch.setattr(links_command, "measure_links", lambda *_: pytest.fail("measured"))
    args = parser().parse_args(["links", "--out", str(tmp_path / "x.json")])
    with pytest.raises(LayerwiseError, match="describes a single node, and these are 2: give another with --profile"):
        links_command._measure_links(args)


def test_two_processes_write_a_profile_that_search_takes(tmp_path: Path) -> None:
    out = tmp_path / "mine.json"
    done = launch(["-m", "layerwise.measure", "links", "--out", str(out), "--budget", "0.1", "--json"])
    assert done.codes == [0, 0], done.stderr
    links = json.loads(done.stdout[0])["links"]
    profile = load(out)
    assert profile.links is not None
    assert profile.links.as_json() == links
    assert (links["conditions"]["nodes"], links["conditions"]["ranks_per_node"]) == (1, 2)
    assert {c["operation"] for c in links["curves"]} >= {"exchange", "all_reduce"}
    assert "measured by layerwise" in profile.sources["levels[0].bandwidth_bytes_per_s"]
