"""Machines composed of a device and links: what was asked for, sources, nearest names."""

import json

import pytest

from layerwise.__main__ import dispatch
from layerwise.cli import run_main
from layerwise.errors import LayerwiseError
from layerwise.machine import load
from layerwise.machine.catalogue import devices, reported
from layerwise.machine.profiles import parse, planned, write


@pytest.mark.parametrize("name", devices())
def test_every_device_is_a_profile_whose_numbers_have_sources(name: str) -> None:
    profile = load(name)
    assert parse(write(profile), name) == profile
    assert {"float32"} <= profile.processor.peak_flops.keys()
    assert 1e9 < profile.processor.memory_bandwidth_bytes_per_s < 1e13
    assert profile.device_graph(profile.gpus_per_node).nodes == 1
    guessed = [s for path, s in profile.sources.items() if path.endswith(("efficiency", "floor_s"))]
    assert all("assumption" in s or "benchmarks.gpu" in s for s in guessed)


def test_the_machine_is_the_one_that_was_asked_for() -> None:
    levels = load("a100-80,node=4,link=4x200Gb/s:5us").device_graph(16).levels
    assert [(v.devices, round(1 / v.beta_s_per_byte), v.devices_per_port) for v in levels] == [
        (4, 300 * 10**9, 1),
        (16, 25 * 10**9, 1),
    ]
    assert levels[1].alpha_s == pytest.approx(5e-6)
    assert load("h100,link=100Gb/s").levels[1].devices_per_port == "node"
    assert load("l4,intra=pcie3").levels[0].bandwidth_bytes_per_s == 15.75e9
    assert planned("l40s,link=25Gb/s:50us", None) == load("l40s,link=25Gb/s:50us")  # a plan may name it


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("a100", "did you mean a100-40 or a100-40-pcie"),
        ("rtx4080", "did you mean rtx4090"),
        ("l4,link=1Gb/s,link=200Gb/s", "an option is given twice"),
        ("l4,lnk=200Gb/s", r"unknown option 'lnk' \(did you mean 'link'\?\)"),
        ("l4,link=200", "give bits or bytes a second"),
        ("l4,link=3x100Gb/s", "3 ports cannot be shared equally by the 8 devices"),
        ("l4,node=0", "not a whole number from 1"),
    ],
)
def test_what_is_not_sound_is_said(spec: str, said: str) -> None:
    with pytest.raises(LayerwiseError, match=said):
        load(spec)


def test_devices_are_known_by_what_cuda_calls_them() -> None:
    names = {
        "NVIDIA A100-SXM4-80GB": "a100-80",
        "NVIDIA A100 80GB PCIe": "a100-80-pcie",
        "NVIDIA A10": "a10",
        "NVIDIA L40S": "l40s",
        "NVIDIA L4": "l4",
        "NVIDIA GeForce RTX 4090": "rtx4090",
        "NVIDIA H100 PCIe": "h100-pcie",
        "AMD Instinct MI300X": "mi300x",
        "NVIDIA H100 80GB HBM3": None,  # of a built-in profile
        "NVIDIA A10G": None,
        "NVIDIA L40": None,
    }
    assert {device: reported(device) for device in names} == names


def test_flags_compose_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    line = "search lenet5 --gpu t4 --nodes 2 --gpus-per-node 2 --link 10Gb/s --effort quick --json"
    assert run_main(dispatch, line.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["profile"], found["gpus"]) == ("t4,node=2,link=10Gb/s", 4)
    assert run_main(dispatch, ["search", "lenet5", "--gpu", "t4", "--gpus", "8"]) == 2
    assert "--link 200Gb/s" in capsys.readouterr().err
    assert run_main(dispatch, ["search", "lenet5", "--gpu", "mine.json", "--gpus", "8", "--link", "1Gb/s"]) == 2
    assert "states its own links" in capsys.readouterr().err
