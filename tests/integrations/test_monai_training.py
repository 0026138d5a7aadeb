"""MONAI's SupervisedTrainer over boxes on two ranks, against one, with checkpoints that both read."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from layerwise.comm.solo import SoloComm
from tests.comm.pool import run_ranks
from tests.integrations.monai_ranks import train

ZOO = Path(sys.prefix) / "zoo"  # where `make zoo` puts MONAI


def test_boxes_are_trained_and_resumed_on_another_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (ZOO / "monai").is_dir():  # of the zoo this package alone: others would be taken for the environment's
        (tmp_path / "monai").symlink_to(ZOO / "monai")
    elif find_spec("monai") is None:
        pytest.skip("MONAI is not installed")
    pytest.importorskip("ignite", reason="pytorch-ignite is not installed")
    monkeypatch.syspath_prepend(str(tmp_path))
    wanted = train(SoloComm(), str(tmp_path), str(tmp_path / "all"), 3)
    two, one = str(tmp_path / "two"), str(tmp_path / "one")
    run_ranks(2, "tests.integrations.monai_ranks:train", str(tmp_path), two, 2)
    train(SoloComm(), str(tmp_path), one, 1)
    resumed = run_ranks(2, "tests.integrations.monai_ranks:train", str(tmp_path), one, 3)
    for state in (train(SoloComm(), str(tmp_path), two, 3), *resumed):
        assert max(float((state[name] - wanted[name]).abs().max()) for name in wanted) <= 1e-9
