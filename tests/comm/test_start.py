"""torchrun's environment, and what is said of it where it makes no sense."""

from pathlib import Path

import pytest
import torch

from layerwise.comm.base import Members
from layerwise.comm.solo import SoloComm
from layerwise.comm.start import read_environment, start
from layerwise.comm.verdict import Sign, gone_text
from layerwise.errors import LayerwiseError
from tests.comm.launch import launch

GOOD = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


def test_without_torchrun_a_process_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert isinstance(start(), SoloComm)
    assert start(device="cpu").device == torch.device("cpu")
    for name, value in GOOD.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    assert isinstance(start(), SoloComm)


def test_defaults() -> None:
    seat = read_environment(GOOD)
    assert seat is not None
    assert (seat.local_rank, seat.local_size, seat.address, seat.agent) == (1, 4, "node0:29500", False)
    assert read_environment({"PATH": "x"}) is None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"RANK": ""}, "RANK not set"),
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "MASTER_ADDR and MASTER_PORT not set"),
        ({"RANK": "4"}, "RANK is '4', but must be an integer from 0 to 3"),
        ({"RANK": "-1"}, "RANK is '-1'"),
        ({"RANK": "one"}, "RANK is 'one'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0', but must be an integer from 1"),
        ({"WORLD_SIZE": "²"}, "WORLD_SIZE is '²'"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT is '65536'"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK is '4', but must be an integer from 0 to 3"),
        ({"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE is '5', but must be an integer from 1 to 4"),
    ],
)
def test_a_bad_environment(change: dict[str, str], text: str) -> None:
    with pytest.raises(LayerwiseError, match=text.replace("(", r"\(")):
        read_environment(GOOD | change)


AGAIN = """
import os
import torch.distributed as dist
from layerwise.comm.start import leave, start
os.environ["TORCHELASTIC_RESTART_COUNT"] = os.environ["RANK"]  # agents count by themselves
for number in range(2):
    with start(20) as comm:
        print(comm.all_gather_text(str(number)))
    dist.destroy_process_group()
leave(0)
"""


def test_ranks_meet_in_a_store_that_has_seen_an_earlier_start(tmp_path: Path) -> None:
    (tmp_path / "again.py").write_text(AGAIN)
    done = launch([str(tmp_path / "again.py")], 3)
    assert done.codes == [0, 0, 0], done.stderr
    assert set(done.stdout) == {"['0', '0', '0']\n['1', '1', '1']\n"}


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bad_time_out(timeout_s: float) -> None:
    with pytest.raises(LayerwiseError, match="the time-out is"):
        start(timeout_s)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in GOOD.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LayerwiseError, match="device 'cuda' is not available"):
        start(device="cuda")


def sign(waits_for: str = "", since_s: float = 0.1, *, step: int | None = 3, ended: bool = False) -> Sign:
    return Sign(100.0, step, "conv1", waits_for, since_s, ended)


def test_what_is_said_of_ranks_that_are_gone() -> None:
    """Also of several, of which one never arrived. (test_faults.py has what real ranks say.)"""
    text = gone_text([3, 1], {1: sign(step=None)}, Members((0, 1, 2, 3), 4), 99.0, 0)
    assert text.startswith("ranks 1 and 3 of 4 are gone (last signs 0.0 s ago, before its first step; none: it never")
    assert text.endswith("killed, or their network is cut")
    text = gone_text([1], {}, Members((0, 1), 2), 0.0, 0)
    assert "it never arrived): not started, or ended early as its own output says" in text
    text = gone_text([3], {}, Members((2, 3), 4), 0.0, 2)
    assert text.startswith("rank 3 of the group of ranks 2 and 3 is gone")
