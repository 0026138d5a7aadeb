"""nnU-Net's training on two ranks, against nnU-Net's own trainer on one device, with checkpoints that both read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from layerwise.comm.solo import SoloComm
from tests.comm.pool import run_ranks

pytest.importorskip("nnunetv2", reason="nnU-Net is not installed")

from tests.integrations.nnunet_ranks import prepare, train

TRAIN = "tests.integrations.nnunet_ranks:train"
LABELS = {
    "classes": {"background": 0, "a": 1, "b": 2},
    "regions": {"background": 0, "all": [1, 2], "b": [2]},
}
LOGGED = ("train_losses", "val_losses", "dice_per_class_or_region", "lrs")


def same(run: Any, wanted: Any) -> None:
    for name in LOGGED:
        np.testing.assert_allclose(run[0][name], wanted[0][name], rtol=2e-4, err_msg=name)
    assert run[1].keys() == wanted[1].keys()
    for name, x in wanted[1].items():
        torch.testing.assert_close(run[1][name], x, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("labels", LABELS)
def test_two_ranks_train_as_nnunet_does(labels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path, LABELS[labels])
    wanted = train(SoloComm(), str(tmp_path), str(tmp_path / "plain"), False)
    for run in run_ranks(2, TRAIN, str(tmp_path), str(tmp_path / "two"), True):
        same(run, wanted)
    if labels == "regions":
        return
    same(train(SoloComm(), str(tmp_path), str(tmp_path / "on"), False, str(tmp_path / "two" / "half.pth")), wanted)
    plain = str(tmp_path / "plain" / "half.pth")
    for run in run_ranks(2, TRAIN, str(tmp_path), str(tmp_path / "back"), True, plain):
        same(run, wanted)
