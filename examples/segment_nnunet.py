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


def draw(folder: Path) -> None:
    """Writes a data set as nnU-Net takes it: eight images, and labels of two kinds of blobs."""
    rng, labels = np.random.default_rng(0), {"background": 0, "small": 1, "large": 2}
    for name in ("imagesTr", "labelsTr"):
        (folder / name).mkdir(parents=True)
    dataset = {"channel_names": {"0": "MR"}, "labels": labels, "numTraining": 8, "file_ending": ".nii.gz"}
    (folder / "dataset.json").write_text(json.dumps(dataset))
    for case in range(8):
        image, label = rng.normal(size=(32, 32, 32)).astype(np.float32), np.zeros((32, 32, 32), np.uint8)
        for value, size in ((1, 6), (2, 10)):
            at = tuple(slice(lo, lo + size) for lo in rng.integers(2, 20, 3))
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
    names = [Path(folder[0], "preprocessed/Dataset004_Blobs", f"{name}.json") for name in ("nnUNetPlans", "dataset")]
    plans, dataset = (json.loads(name.read_text()) for name in names)
    network = plans["configurations"]["3d_fullres"]["architecture"]["arch_kwargs"]
    network["features_per_stage"] = [8] * network["n_stages"]  # for a CPU
    nnUNetTrainerLayerwise.keywords = {"options": layerwise.ParallelOptions(measure_s=0)}
    trainer = nnUNetTrainerLayerwise(
        plans | {"continue_training": False}, "3d_fullres", 0, dataset, torch.device("cpu")
    )
    trainer.num_epochs, trainer.num_iterations_per_epoch, trainer.num_val_iterations_per_epoch = 3, 5, 1
    trainer.run_training()
    for epoch, loss in enumerate(trainer.logger.get_checkpoint()["train_losses"] if rank == 0 else ()):
        print(f"epoch {epoch}: loss {loss:.4f}")


if __name__ == "__main__":
    main()
