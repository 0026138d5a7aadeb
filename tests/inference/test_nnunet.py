"""nnU-Net's trained folders: labels are those that its own steps, written out here, give on one device."""

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import ndimage
from torch import Tensor, nn

import layerwise
from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from layerwise.inference.predict import Predicted
from layerwise.inference.windows import profile
from layerwise.integrations.nnunet import predict
from layerwise.integrations.nnunet.folder import TrainedFolder
from tests.comm.thread import run_threads

Volume = NDArray[Any]
PATCH = (16, 16, 12)
ARCHITECTURE = {
    "network_class_name": "dynamic_network_architectures.architectures.unet.PlainConvUNet",
    "arch_kwargs": {
        "n_stages": 2, "features_per_stage": [4, 8], "conv_op": "torch.nn.modules.conv.Conv3d", "kernel_sizes": [3, 3],
        "strides": [1, 2], "n_conv_per_stage": [1, 1], "n_conv_per_stage_decoder": [1], "conv_bias": True,
        "norm_op": "torch.nn.modules.instancenorm.InstanceNorm3d", "norm_op_kwargs": {"eps": 1e-5, "affine": True},
        "dropout_op": None, "dropout_op_kwargs": None,
        "nonlin": "torch.nn.LeakyReLU", "nonlin_kwargs": {"inplace": True},
    },
    "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
}  # fmt: skip
RESAMPLING = {
    f"resampling_fn_{what}{suffix}": value
    for what, order in (("data", 3), ("probabilities", 1))
    for suffix, value in (
        ("", "resample_data_or_seg_to_shape"),
        ("_kwargs", {"is_seg": False, "order": order, "order_z": 0, "force_separate_z": None}),
    )
}


class Net(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv3d(2, 4, 3, padding=1), nn.InstanceNorm3d(4, affine=True)
        self.head = nn.Conv3d(4, classes, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(nn.functional.leaky_relu(self.norm(self.first(x)), inplace=True))
        return made


def trained(folder: Path, network: nn.Module, change: Callable[[dict[str, Any]], object] = lambda plans: None) -> None:
    """Writes what nnU-Net's trainer writes."""
    fullres = {
        "preprocessor_name": "DefaultPreprocessor", "patch_size": PATCH, "spacing": [2.0, 1.0, 1.0],
        "normalization_schemes": ["ZScoreNormalization", "CTNormalization"], "use_mask_for_norm": [True, False],
        "architecture": ARCHITECTURE, **RESAMPLING,
    }  # fmt: skip
    plans = {
        "image_reader_writer": "SimpleITKIO", "transpose_forward": [1, 0, 2], "transpose_backward": [1, 0, 2],
        "configurations": {"3d_fullres": {"inherits_from": "base"}, "base": fullres}, "label_manager": "LabelManager",
        "foreground_intensity_properties_per_channel": {
            "1": {"mean": 0.5, "std": 2.0, "percentile_00_5": -1.0, "percentile_99_5": 2.0}
        },
        "dataset": {"channel_names": {"0": "MR", "1": "CT"}, "labels": {"background": 0, "a": 1, "b": [2]}},
        "saved": {"trainer_name": "nnUNetTrainer_250epochs_NoMirroring", "inference_allowed_mirroring_axes": (0, 2)},
    }  # fmt: skip
    change(plans)
    (folder / "fold_0").mkdir(parents=True, exist_ok=True)
    (folder / "dataset.json").write_text(json.dumps(plans.pop("dataset")))
    saved = plans.pop("saved")
    (folder / "plans.json").write_text(json.dumps(plans))
    log = {"mean_fg_dice": [np.float64(0.5), np.float32(0.1)], "steps": np.int64(3)}
    init = {"configuration": "3d_fullres", "plans": plans, "device": torch.device("cpu")}
    torch.save(
        {
            "network_weights": network.state_dict(),
            "logging": log,
            "_best_ema": np.float64(1),
            "init_args": init,
            **saved,
        },
        folder / "fold_0" / "checkpoint_final.pth",
    )


def case(folder: Path, name: str, shape: tuple[int, int, int], zooms: tuple[float, float, float]) -> list[Volume]:
    """Writes two channels (x, y, z) with zeros around them."""
    rng = np.random.default_rng(len(name))
    images = []
    for channel in range(2):
        x = ndimage.gaussian_filter(rng.normal(size=shape) * 9, 1).astype(np.float32)
        x[:2], x[:, :, -1] = 0, 0
        x[5:7, 4:6, 4:6] *= channel  # a hole of one channel alone
        nibabel.save(nibabel.Nifti1Image(x, np.diag([*zooms, 1.0])), folder / f"{name}_{channel:04d}.nii.gz")
        images.append(x)
    return images


@torch.no_grad()
def expected(network: nn.Module, images: list[Volume], zooms: tuple[float, ...]) -> Volume:
    """The labels (x, y, z): the network once on a case that is no larger than the patch, and its mirrored ways."""
    x = np.stack([image.T for image in images]).transpose(0, 2, 1, 3)
    spacing = np.array(zooms)[[1, 2, 0]]
    inside = (x != 0).any(0)
    box = tuple(slice(index.min(), index.max() + 1) for index in np.nonzero(inside))
    mask, part = ndimage.binary_fill_holes(inside)[box], x[(slice(None), *box)].copy()
    part[0][mask] = (part[0][mask] - part[0][mask].mean()) / part[0][mask].std()
    part[1] = (part[1].clip(-1, 2) - 0.5) / 2
    cropped = part.shape[1:]
    shape = tuple(round(float(n * s / t)) for n, s, t in zip(cropped, spacing, (2.0, 1.0, 1.0), strict=True))
    factors = [n / m for n, m in zip(shape, cropped, strict=True)]
    if shape != cropped:
        zoomed = [ndimage.zoom(c.astype(float), factors, order=3, mode="nearest", grid_mode=True) for c in part]
        part = np.stack([z.clip(c.min(), c.max()) for z, c in zip(zoomed, part, strict=True)]).astype(np.float32)
    before = [(n - m) // 2 for n, m in zip(PATCH, shape, strict=True)]
    padded = np.pad(part, [(0, 0), *((b, n - m - b) for b, n, m in zip(before, PATCH, shape, strict=True))])
    given = torch.from_numpy(padded)[None]
    ways: list[tuple[int, ...]] = [(), (2,), (4,), (2, 4)]
    logits = torch.stack([network(given.flip(way)).flip(way) for way in ways]).mean(0)[0].numpy()
    logits = logits[(slice(None), *(slice(b, b + n) for b, n in zip(before, shape, strict=True)))]
    back = [m / n for n, m in zip(shape, cropped, strict=True)]
    logits = np.stack([ndimage.zoom(c, back, order=1, mode="nearest", grid_mode=True) for c in logits])
    labels = np.zeros(x.shape[1:], np.uint8)
    labels[box] = logits.argmax(0)
    return labels.transpose(1, 0, 2).T


def run(ranks: int, *args: Any, network: nn.Module | None = None, **more: Any) -> list[Predicted]:
    def one(comm: Comm) -> Predicted:
        options = layerwise.ParallelOptions(comm=comm, measure_s=0)
        built = copy.deepcopy(network)
        return predict(*args, network=built, device="cpu", progress=False, options=options, **more)

    return run_threads(ranks, one)


@pytest.fixture
def network(tmp_path: Path) -> Net:
    torch.manual_seed(0)
    made = Net(3)
    trained(tmp_path / "model", made)
    (tmp_path / "images").mkdir()
    return made


@pytest.mark.parametrize("ranks", [1, 2])
def test_cases_of_a_trained_folder(ranks: int, network: Net, tmp_path: Path) -> None:
    """Cropped, normalised, resampled there and back; a case without its second channel is named."""
    zooms = {"alike": (1.0, 2.0, 1.0), "finer": (0.8, 2.2, 1.1)}
    cases = {name: case(tmp_path / "images", name, (13, 14, 13), each) for name, each in zooms.items()}
    case(tmp_path / "images", "less", (13, 14, 13), (1.0, 2.0, 1.0))
    (tmp_path / "images" / "less_0001.nii.gz").unlink()
    arguments = (tmp_path / "model", tmp_path / "images", tmp_path / "labels")
    with pytest.raises(LayerwiseError, match=r"1 of 3 samples failed, 2 are written: less: file .*less_0001"):
        run(ranks, *arguments, network=network)
    for name, images in cases.items():
        made = nibabel.load(tmp_path / "labels" / f"{name}.nii.gz")
        wanted = expected(network, images, zooms[name])
        labels = np.asarray(made.dataobj)
        assert (labels != wanted).mean() < 1e-3  # ties of logits in float32
        assert set(np.unique(wanted)) == {0, 1, 2}
        assert np.allclose(made.affine, np.diag([*zooms[name], 1.0]))
    assert not list((tmp_path / "labels").rglob("*.npy"))
    files = [[str(path) for path in sorted((tmp_path / "images").glob("alike*"))]]
    assert run(ranks, tmp_path / "model", files, tmp_path / "labels", network=network)[0].skipped == ("alike",)


def test_regions(tmp_path: Path) -> None:
    def change(plans: dict[str, Any]) -> None:
        regions = {"background": 0, "all": [1, 2], "part": [2]}
        plans["dataset"] |= {"labels": regions, "regions_class_order": [1, 2]}

    torch.manual_seed(0)
    network = Net(2)
    trained(tmp_path / "model", network, change)
    images = case(tmp_path, "one", (16, 16, 14), (1.0, 2.0, 1.0))
    run(2, tmp_path / "model", tmp_path, tmp_path / "labels", network=network, mirror=False, window=(14, 12, 12))
    labels = np.asarray(nibabel.load(tmp_path / "labels" / "one.nii.gz").dataobj)
    assert labels.shape == images[0].shape
    assert set(np.unique(labels)) == {0, 1, 2}


def test_the_plans_network(tmp_path: Path) -> None:
    """Deep supervision is off, and values of another network are refused."""
    pytest.importorskip("dynamic_network_architectures", reason="dynamic-network-architectures is not installed")
    from dynamic_network_architectures.architectures.unet import PlainConvUNet

    arguments: dict[str, Any] = {
        name: getattr(nn, value.rpartition(".")[2]) if isinstance(value, str) else value
        for name, value in ARCHITECTURE["arch_kwargs"].items()
    }
    network = PlainConvUNet(2, num_classes=3, deep_supervision=True, **arguments)
    trained(tmp_path, network)
    folder = TrainedFolder.read(tmp_path, 0, "checkpoint_final.pth", built=False)
    x, made = torch.randn(1, 2, *PATCH), folder.load_into(folder.network())
    assert torch.equal(made(x), network.eval()(x)[0])
    with pytest.raises(LayerwiseError, match="not of the network"):
        folder.load_into(Net(3))


class Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("attacked",)


WRONG: dict[str, Callable[[dict[str, Any]], object]] = {
    "tensors and numbers alone": lambda plans: plans["saved"].update(more=Attack()),
    "whose network may be its own": lambda plans: plans["saved"].update(trainer_name="nnUNetTrainerBN"),
    "a cascade": lambda plans: plans["configurations"]["base"].update(previous_stage="3d_lowres"),
    "a 2-D configuration": lambda plans: plans["configurations"]["base"].update(patch_size=[8, 8]),
    "the reader Tiff3DIO": lambda plans: plans.update(image_reader_writer="Tiff3DIO"),
    "the preprocessor Mine": lambda plans: plans["configurations"]["base"].update(preprocessor_name="Mine"),
    "plans name the network 'os.system'": lambda plans: plans["configurations"]["base"].update(
        architecture=ARCHITECTURE | {"network_class_name": "os.system"}
    ),
    "cannot be read": lambda plans: plans.pop("configurations"),
}


@pytest.mark.parametrize("said", WRONG)
def test_a_folder_is_data(said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    case(tmp_path, "one", (13, 14, 13), (1.0, 2.0, 1.0))
    trained(tmp_path / "model", Net(3), WRONG[said])
    with pytest.raises(LayerwiseError, match=said):
        run(1, tmp_path / "model", tmp_path, tmp_path / "labels")
    assert not Path("attacked").exists()
    with pytest.raises(LayerwiseError, match="has no fold_3"):
        run(1, tmp_path / "model", tmp_path, tmp_path / "labels", fold=3)


def test_what_cases_cannot_be(network: Net, tmp_path: Path) -> None:
    wrong: list[tuple[object, str]] = [
        (tmp_path / "images", "has no files such as"),
        ([["a/x_0000.nii.gz"], ["b/x_0000.nii.gz"]], "two cases are called 'x'"),
        (["a.png"], "a case is files that end in"),
        (3, "give a folder"),
    ]
    for samples, said in wrong:
        with pytest.raises(LayerwiseError, match=said):
            run(1, tmp_path / "model", samples, tmp_path / "labels", network=network)


@pytest.mark.parametrize("size", [8, 11, 16])
def test_windows_weigh_as_nnunets(size: int) -> None:
    delta = np.zeros(size)
    delta[size // 2] = 1
    theirs = ndimage.gaussian_filter(delta, size / 8, mode="constant", cval=0)
    np.testing.assert_allclose(profile(size, "nnunet"), theirs / theirs.max(), rtol=1e-9)
