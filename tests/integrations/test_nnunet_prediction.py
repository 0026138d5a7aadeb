"""nnU-Net's prediction over ranks: its own labels of one device; a folder's files are data."""

import copy
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import layerwise
from layerwise.api.parallelize import parallelize
from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from layerwise.integrations.nnunet import predict, prediction
from layerwise.integrations.nnunet.prediction import Windows
from layerwise.integrations.nnunet.reading import check_names, read_checkpoint
from tests.api.keywords import quiet
from tests.comm.thread import run_threads
from tests.integrations.nnunet_ranks import PATCH, plans

WINDOW = (1, 1, 8, 8, 8)


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.InstanceNorm3d(4, affine=True), nn.Conv3d(4, 3, 1)).eval()


def serving(run: Callable[[Windows, list[Tensor]], None]) -> list[list[Tensor]]:
    """What two ranks have after rank 0 has run this."""
    folds = [network(seed).state_dict() for seed in range(2)]

    def rank(comm: Comm) -> list[Tensor]:
        plain = network(0)
        plain.load_state_dict(folds[0])  # threads draw from one generator
        model = parallelize(plain, torch.zeros(WINDOW), **quiet(comm, batch=1, inference=True))
        windows, made = Windows(model, copy.deepcopy(folds)), list[Tensor]()
        with torch.inference_mode():
            windows.serve(lambda: run(windows, made))
        return made

    return run_threads(2, rank, timeout_s=30)


def test_all_ranks_compute_what_rank_0_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "BEAT_S", 0.02)
    x = torch.randn(2, *WINDOW, generator=torch.Generator().manual_seed(0))

    def run(windows: Windows, made: list[Tensor]) -> None:
        for fold, each in ((0, x[0]), (1, x[1]), (0, x[1])):
            windows.load_state_dict(windows._folds[fold])
            time.sleep(0.1)  # nnU-Net reads
            made.append(windows(each))

    made, nothing = serving(run)
    assert not nothing
    with torch.no_grad():
        wanted = [network(0)(x[0]), network(1)(x[1]), network(0)(x[1])]
    torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-6)


def test_what_fails_on_rank_0_ends_all() -> None:
    def run(windows: Windows, made: list[Tensor]) -> None:
        raise ValueError("no such case")

    with pytest.raises(LayerwiseError, match="nnU-Net failed on rank 0: ValueError: no such case"):
        serving(run)


class Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("attacked",)


def checkpoint(path: Path, weights: Any, **more: Any) -> None:
    path.parent.mkdir(parents=True)
    log = {"mean_fg_dice": [np.float64(0.5), np.float32(0.1)], "steps": np.int64(3)}
    init = {"configuration": "3d_fullres", "plans": plans(), "device": torch.device("cpu")}
    saved = {"network_weights": weights, "logging": log, "_best_ema": np.float64(1), "init_args": init}
    mirrors = {"trainer_name": "nnUNetTrainer", "inference_allowed_mirroring_axes": (0, 2)}
    torch.save(saved | mirrors | more, path)


def test_a_checkpoint_is_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint(tmp_path / "fold_0" / "good.pth", network(0).state_dict())
    assert read_checkpoint(tmp_path / "fold_0" / "good.pth")["trainer_name"] == "nnUNetTrainer"
    checkpoint(tmp_path / "fold_1" / "bad.pth", network(0).state_dict(), more=Attack())
    with pytest.raises(LayerwiseError, match="no checkpoint of tensors and numbers alone"):
        read_checkpoint(tmp_path / "fold_1" / "bad.pth")
    assert not Path("attacked").exists()
    with pytest.raises(LayerwiseError, match=r"has no fold_2/good\.pth"):
        read_checkpoint(tmp_path / "fold_2" / "good.pth")


@pytest.mark.parametrize(
    "name", ["os.system", "torch.hub.load", "torch.nn.modules.module.torch.hub.load", "builtins.exec"]
)
@pytest.mark.parametrize("where", ["network_class_name", "conv_op"])
def test_plans_name_layers_and_networks_alone(name: str, where: str, tmp_path: Path) -> None:
    changed, file = plans(), tmp_path / "plans.json"
    file.write_text(json.dumps(changed))
    check_names(file)
    architecture = changed["configurations"]["3d_fullres"]["architecture"]
    (architecture if where in architecture else architecture["arch_kwargs"])[where] = name
    file.write_text(json.dumps(changed))
    with pytest.raises(LayerwiseError, match=f"names '{name}', which is no class"):
        check_names(file)
    file.write_text("[]")
    with pytest.raises(LayerwiseError, match="cannot be read"):
        check_names(file)


def test_labels_are_those_of_nnunet(tmp_path: Path) -> None:
    """Of two folds, mirrored, in windows; of a case that is there already nothing is computed."""
    pytest.importorskip("nnunetv2", reason="nnU-Net is not installed")
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor
    from nnunetv2.utilities.get_network_from_plans import get_network_from_plans
    from nnunetv2.utilities.plans_handling.plans_handler import PlansManager

    folder, images = tmp_path / "model", tmp_path / "images"
    images.mkdir()
    labels = {"background": 0, "a": 1, "b": 2}
    dataset = {"channel_names": {"0": "MR"}, "labels": labels, "file_ending": ".nii.gz"}
    configuration = PlansManager(plans()).get_configuration("3d_fullres")
    for fold in range(2):
        torch.manual_seed(fold)
        made = get_network_from_plans(
            configuration.network_arch_class_name,
            configuration.network_arch_init_kwargs,
            configuration.network_arch_init_kwargs_req_import,
            1,
            3,
            deep_supervision=False,
        )
        checkpoint(folder / f"fold_{fold}" / "checkpoint_final.pth", made.state_dict())
    for name, content in (("plans", plans()), ("dataset", dataset)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    rng = np.random.default_rng(0)
    for name in ("one", "two"):
        x = rng.normal(size=(PATCH[0] + 6, PATCH[1], PATCH[2] - 2)).astype(np.float32)
        nibabel.save(nibabel.Nifti1Image(x, np.eye(4)), images / f"{name}_0000.nii.gz")
    alone = nnUNetPredictor(device=torch.device("cpu"), allow_tqdm=False)
    alone.initialize_from_trained_model_folder(str(folder), (0, 1), "checkpoint_final.pth")
    (tmp_path / "alone").mkdir()
    alone.predict_from_files_sequential(str(images), str(tmp_path / "alone"))

    def rank(comm: Comm) -> None:
        options = layerwise.ParallelOptions(comm=comm, measure_s=0)
        predict(folder, images, tmp_path / "two", folds=(0, 1), processes=0, device="cpu", options=options)

    run_threads(2, rank, timeout_s=120)
    for name in ("one", "two"):
        found, wanted = (nibabel.load(tmp_path / place / f"{name}.nii.gz").get_fdata() for place in ("two", "alone"))
        assert set(np.unique(wanted)) == {0, 1, 2}
        assert (found != wanted).mean() < 1e-3  # ties of logits in float16
    os.utime(tmp_path / "two" / "one.nii.gz", (0, 0))
    run_threads(2, rank, timeout_s=120)
    assert (tmp_path / "two" / "one.nii.gz").stat().st_mtime == 0
