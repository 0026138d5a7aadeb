"""nnU-Net's training on two ranks, against nnU-Net's own trainer on one device, and all of it by its commands."""

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch

from layerwise.comm.solo import SoloComm
from tests.comm.launch import ROOT
from tests.comm.pool import run_ranks

pytest.importorskip("nnunetv2", reason="nnU-Net is not installed")

from tests.integrations.nnunet_ranks import DATASET, prepare, train

TRAIN = "tests.integrations.nnunet_ranks:train"
LABELS = {
    "classes": {"background": 0, "a": 1, "b": 2},
    "regions": {"background": 0, "all": [1, 2], "b": [2]},
    "ignored": {"background": 0, "a": 1, "b": 2, "ignore": 3},
    "ignored regions": {"background": 0, "all": [1, 2], "b": [2], "ignore": 3},
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
    if labels != "classes":
        return
    same(train(SoloComm(), str(tmp_path), str(tmp_path / "on"), False, str(tmp_path / "two" / "half.pth")), wanted)
    plain = str(tmp_path / "plain" / "half.pth")
    for run in run_ranks(2, TRAIN, str(tmp_path), str(tmp_path / "back"), True, plain):
        same(run, wanted)


PLANS = "nnUNetPlans"
SHORT = """
import layerwise
from layerwise.integrations.nnunet.trainer import nnUNetTrainerLayerwise

class Short(nnUNetTrainerLayerwise):
    keywords = {"options": layerwise.ParallelOptions(measure_s=0)}

    def initialize(self):
        super().initialize()
        self.num_epochs, self.num_iterations_per_epoch, self.num_val_iterations_per_epoch = 1, 2, 1
"""

# nnU-Net imports every trainer of its own to find one; two of them need timm, which needs a torchvision of this torch.
ANY = """
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
"""


class Commands:
    """nnU-Net's console scripts, as pip writes them, with their folders in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "trainers").mkdir()
        (folder / "trainers" / "short.py").write_text(SHORT)
        if find_spec("timm") is None:
            (folder / "stubs" / "timm" / "models").mkdir(parents=True)
            for module in ("layers", "models/eva"):
                (folder / "stubs" / "timm" / f"{module}.py").write_text(ANY)
        self.variables = os.environ | {
            "PYTHONPATH": f"{folder}/stubs:{ROOT}:{os.environ.get('PYTHONPATH', '')}",
            "nnUNet_raw": f"{folder}/raw", "nnUNet_preprocessed": f"{folder}/preprocessed",
            "nnUNet_results": f"{folder}/results", "nnUNet_extTrainer": f"{folder}/trainers",
            "nnUNet_n_proc_DA": "1", "nnUNet_def_n_proc": "1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip

    def run(self, name: str, *arguments: str, ranks: int = 1) -> str:
        """What a console script prints."""
        (entry,) = entry_points(group="console_scripts", name=name)
        script = self.folder / name
        script.write_text(f"from {entry.module} import {entry.attr}\nif __name__ == '__main__':\n    {entry.attr}()\n")
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        return self.python(*launcher, str(script), *arguments)

    def python(self, *arguments: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, env=self.variables, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        return done.stdout


@pytest.mark.slow
def test_nnunets_commands_plan_train_and_predict(tmp_path: Path) -> None:
    prepare(tmp_path, LABELS["classes"])
    raw, prepared = tmp_path / "raw" / DATASET, tmp_path / "preprocessed" / DATASET
    (raw / "imagesTr").mkdir(parents=True)
    shutil.move(prepared / "gt_segmentations", raw / "labelsTr")
    for image in tmp_path.glob("*.nii.gz"):
        shutil.move(image, raw / "imagesTr")
    dataset = json.loads((prepared / "dataset.json").read_text())
    (raw / "dataset.json").write_text(json.dumps(dataset | {"numTraining": 8}))
    shutil.rmtree(prepared)
    commands = Commands(tmp_path)
    commands.run("nnUNetv2_extract_fingerprint", "-d", "4", "-np", "1")
    commands.run("nnUNetv2_plan_experiment", "-d", "4")
    commands.run("nnUNetv2_preprocess", "-d", "4", "-plans_name", PLANS, "-c", "3d_fullres", "-np", "1")
    training = ("4", "3d_fullres", "0", "-tr", "Short", "-p", PLANS, "-device", "cpu")
    commands.run("nnUNetv2_train", *training, ranks=2)
    trained = tmp_path / "results" / DATASET / f"Short__{PLANS}__3d_fullres" / "fold_0"
    validated = sorted((trained / "validation").glob("*.nii.gz"))
    assert len(validated) == 2
    model = ("-d", "4", "-c", "3d_fullres", "-f", "0", "-tr", "Short", "-p", PLANS, "-device", "cpu")
    del commands.variables["nnUNet_extTrainer"]  # nnU-Net by itself predicts
    (tmp_path / "images").mkdir()
    for file in validated:
        shutil.copy(raw / "imagesTr" / file.name.replace(".nii", "_0000.nii"), tmp_path / "images")
    commands.run("nnUNetv2_predict", "-i", str(tmp_path / "images"), "-o", str(tmp_path / "labels"), *model)
    for file in validated:
        predicted = nibabel.load(tmp_path / "labels" / file.name).get_fdata()
        assert (predicted == nibabel.load(file).get_fdata()).mean() > 0.999
    commands.variables["nnUNet_extTrainer"] = str(tmp_path / "trainers")
    final = trained / "checkpoint_final.pth"
    told = commands.run("nnUNetv2_train", *training, "-pretrained_weights", str(shutil.move(final, tmp_path)))
    assert "Loading pretrained weights from file" in told
    assert final.exists()
