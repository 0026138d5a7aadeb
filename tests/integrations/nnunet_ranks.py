"""What the ranks of a pool (tests/comm/pool.py) train with nnU-Net; a single process does the same by itself."""

import copy
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import torch

import layerwise
from layerwise.comm.base import Comm

DATASET, PATCH, STAGES = "Dataset004_Blobs", [16, 16, 16], 4
ARCHITECTURE = {
    "network_class_name": "dynamic_network_architectures.architectures.unet.PlainConvUNet",
    "arch_kwargs": {
        "n_stages": STAGES, "features_per_stage": [4] * STAGES, "conv_op": "torch.nn.modules.conv.Conv3d",
        "kernel_sizes": [[3, 3, 3]] * STAGES, "strides": [[1, 1, 1], *[[2, 2, 2]] * (STAGES - 1)],
        "n_conv_per_stage": [1] * STAGES, "n_conv_per_stage_decoder": [1] * (STAGES - 1), "conv_bias": True,
        "norm_op": "torch.nn.modules.instancenorm.InstanceNorm3d", "norm_op_kwargs": {"eps": 1e-5, "affine": True},
        "dropout_op": None, "dropout_op_kwargs": None,
        "nonlin": "torch.nn.LeakyReLU", "nonlin_kwargs": {"inplace": True},
    },
    "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
}  # fmt: skip
RESAMPLING = {
    f"resampling_fn_{what}{suffix}": value
    for what, order in (("data", 3), ("probabilities", 1), ("seg", 1))
    for suffix, value in (
        ("", "resample_data_or_seg_to_shape"),
        ("_kwargs", {"is_seg": what == "seg", "order": order, "order_z": 0, "force_separate_z": None}),
    )
}


def plans() -> dict[str, Any]:
    configuration = {
        "data_identifier": "nnUNetPlans_3d_fullres", "preprocessor_name": "DefaultPreprocessor", "batch_size": 2,
        "patch_size": PATCH, "spacing": [1.0, 1.0, 1.0], "normalization_schemes": ["ZScoreNormalization"],
        "use_mask_for_norm": [False], "batch_dice": True, "architecture": copy.deepcopy(ARCHITECTURE), **RESAMPLING,
    }  # fmt: skip
    return {
        "dataset_name": DATASET, "plans_name": "nnUNetPlans", "image_reader_writer": "NibabelIO",
        "transpose_forward": [0, 1, 2], "transpose_backward": [0, 1, 2], "label_manager": "LabelManager",
        "configurations": {"3d_fullres": configuration}, "foreground_intensity_properties_per_channel": {"0": {}},
    }  # fmt: skip


def prepare(folder: Path, labels: dict[str, Any], cases: int = 8) -> None:
    """Writes cases with two blobs as nnU-Net's preprocessor does."""
    from nnunetv2.training.dataloading.nnunet_dataset import nnUNetDatasetBlosc2
    from nnunetv2.utilities.plans_handling.plans_handler import PlansManager

    base = folder / "preprocessed" / DATASET
    (base / "gt_segmentations").mkdir(parents=True)
    (base / "nnUNetPlans_3d_fullres").mkdir()
    dataset = {"channel_names": {"0": "MR"}, "labels": labels, "file_ending": ".nii.gz", "regions_class_order": [1, 2]}
    for name, content in (("dataset", dataset), ("nnUNetPlans", plans()), ("dataset_fingerprint", {})):
        (base / f"{name}.json").write_text(json.dumps(content))
    manager, rng = PlansManager(plans()), np.random.default_rng(0)
    configuration = manager.get_configuration("3d_fullres")
    for name in (f"case_{i}" for i in range(cases)):
        image = rng.normal(size=(22, 20, 18)).astype(np.float32)
        label = np.zeros(image.shape, np.uint8)
        for value, corner in ((1, rng.integers(2, 9, 3)), (2, rng.integers(6, 12, 3))):
            at = tuple(slice(lo, lo + 5) for lo in corner)
            label[at], image[at] = value, image[at] + 2 * value
        label[:9] = labels.get("ignore", label[:9])
        files = folder / f"{name}_0000.nii.gz", base / "gt_segmentations" / f"{name}.nii.gz"
        for file, volume in zip(files, (image, label), strict=True):
            nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), file)
        data, seg, properties = configuration.preprocessor_class(verbose=False).run_case(
            [str(files[0])], str(files[1]), manager, configuration, dataset
        )
        nnUNetDatasetBlosc2.save_case(data, seg, properties, str(base / "nnUNetPlans_3d_fullres" / name))


def train(comm: Comm, folder: str, results: str, layers: bool, resumed: str = "") -> tuple[Any, dict[str, Any]]:
    """nnU-Net's log and the final weights. layers: with layerwise's trainer, else nnU-Net's.

    Batches are drawn by their numbers. resumed: a checkpoint to go on from; that of the first epoch is half.pth.
    """
    os.environ |= {
        "nnUNet_raw": folder, "nnUNet_preprocessed": f"{folder}/preprocessed", "nnUNet_results": results,
        "nnUNet_n_proc_DA": "0", "nnUNet_def_n_proc": "1",
    }  # fmt: skip
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

    from layerwise.integrations.nnunet.trainer import nnUNetTrainerLayerwise

    base: Any = nnUNetTrainerLayerwise if layers else nnUNetTrainer

    class Seeded(base):  # type: ignore[misc]
        keywords = {  # noqa: RUF012
            "strategy": {"network.*": {"w": 2}}, "options": layerwise.ParallelOptions(measure_s=0, verbose=False),
        }  # fmt: skip

        def get_dataloaders(self) -> Any:
            loaders, iterations = super().get_dataloaders(), self.num_iterations_per_epoch
            first = self.current_epoch * iterations + comm.rank
            if not layers:
                return tuple(seeded(loader, first, 1) for loader in loaders)
            for by_turns in loaders:
                by_turns.loader = seeded(by_turns.loader, first, comm.size)
            return loaders

        def on_epoch_end(self) -> None:
            super().on_epoch_end()
            latest = Path(self.output_folder, "checkpoint_latest.pth")
            if self.local_rank == 0 and latest.exists():
                shutil.copy(latest, Path(results, "half.pth"))

    prepared = Path(folder, "preprocessed", DATASET)
    dataset = json.loads((prepared / "dataset.json").read_text())
    torch.manual_seed(0)
    trainer = Seeded(plans() | {"continue_training": False}, "3d_fullres", 0, dataset, torch.device("cpu"))
    trainer.num_epochs, trainer.num_iterations_per_epoch, trainer.num_val_iterations_per_epoch = 2, 3, 3
    trainer.save_every, trainer.logger.plot_progress_png = 1, lambda folder: None
    if resumed:
        trainer.load_checkpoint(resumed)
    trainer.run_training()  # after which the network is nnU-Net's
    return trainer.logger.get_checkpoint(), trainer.network.state_dict()


def seeded(loader: Iterator[Any], first: int, step: int) -> Iterator[Any]:
    for number in itertools.count(first, step):
        torch.manual_seed(number)
        np.random.seed(number)
        yield next(loader)
