"""nnU-Net plans, preprocesses and trains, on volumes that are drawn here. Needs: pip install layerwise[nnunet]

python examples/segment_nnunet.py, or: torchrun --nproc-per-node 2 examples/segment_nnunet.py
"""

import json
import os
import tempfile
from pathlib import Path

import nibabel
import numpy as np
import torch
import torch.distributed as dist

import layerwise


def draw(folder: Path) -> None:  # a data set as nnU-Net takes it: images, and labels of two kinds of cubes
    rng, labels = np.random.default_rng(0), {"background": 0, "grey": 1, "white": 2}
    (folder / "imagesTr").mkdir(parents=True)
    (folder / "labelsTr").mkdir()
    dataset = {"channel_names": {"0": "MR"}, "labels": labels, "numTraining": 8, "file_ending": ".nii.gz"}
    (folder / "dataset.json").write_text(json.dumps(dataset))
    for case in range(8):
        image, label = rng.normal(size=(32, 32, 32)).astype(np.float32), np.zeros((32, 32, 32), np.uint8)
        for value in (1, 2):
            at = tuple(slice(lo, lo + 8) for lo in rng.integers(2, 22, 3))
            image[at], label[at] = image[at] + 2 * value, value
        nibabel.save(nibabel.Nifti1Image(image, np.eye(4)), folder / f"imagesTr/case{case}_0000.nii.gz")
        nibabel.save(nibabel.Nifti1Image(label, np.eye(4)), folder / f"labelsTr/case{case}.nii.gz")


def main() -> None:
    rank = int(os.environ.get("RANK", "0"))
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
        dist.broadcast_object_list(folder)
    os.environ |= {f"nnUNet_{name}": f"{folder[0]}/{name}" for name in ("raw", "preprocessed", "results")}
    os.environ |= {"nnUNet_n_proc_DA": "1", "nnUNet_def_n_proc": "1"}
    from nnunetv2.experiment_planning import plan_and_preprocess_api as nnunet

    from layerwise.integrations.nnunet.trainer import nnUNetTrainerLayerwise

    if rank == 0:
        draw(Path(folder[0], "raw", "Dataset004_Blobs"))
        nnunet.extract_fingerprints([4], num_processes=1)
        nnunet.plan_experiments([4])
        nnunet.preprocess([4], configurations=["3d_fullres"], num_processes=[1])
    if dist.is_initialized():
        dist.barrier()
    prepared = Path(folder[0], "preprocessed/Dataset004_Blobs")
    plans, dataset = (json.loads((prepared / f"{name}.json").read_text()) for name in ("nnUNetPlans", "dataset"))
    configuration = plans["configurations"]["3d_fullres"]
    configuration["patch_size"] = [16, 16, 16]  # for a CPU
    configuration["architecture"]["arch_kwargs"]["features_per_stage"] = [8, 8, 8, 8]
    nnUNetTrainerLayerwise.keywords = {"options": layerwise.ParallelOptions(measure_s=0)}
    trainer = nnUNetTrainerLayerwise(
        plans | {"continue_training": False}, "3d_fullres", 0, dataset, torch.device("cpu")
    )
    trainer.num_epochs, trainer.num_iterations_per_epoch, trainer.num_val_iterations_per_epoch = 3, 4, 1
    trainer.run_training()
    for epoch, loss in enumerate(trainer.logger.get_checkpoint()["train_losses"] if rank == 0 else ()):
        print(f"epoch {epoch}: loss {loss:.4f}")


if __name__ == "__main__":
    main()
