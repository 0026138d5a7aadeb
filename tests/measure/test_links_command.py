"""layerwise measure links: what a user gets wrong, and a run between two processes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from layerwise.cli import run_main
from layerwise.comm.solo import SoloComm
from layerwise.errors import LayerwiseError
from layerwise.machine import load, save
from layerwise.measure import __main__ as links_command
from layerwise.measure.__main__ import main, parser
from layerwise.measure.topology import Topology
from tests.comm.launch import launch

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
    assert "WORLD_SIZE is 'two'; it must be a whole number" in capsys.readouterr().err


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
