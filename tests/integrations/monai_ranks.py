"""What the ranks of a pool (tests/comm/pool.py) train with MONAI; a single process does the same by itself."""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import layerwise
from layerwise.comm.base import Comm
from layerwise.volumes.loader import BoxLoader


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 2, 1)).double()

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.network(image), label)


def train(comm: Comm, packages: str, folder: str, epochs: int) -> dict[str, Tensor]:
    """Weights after so many epochs, of which those before a checkpoint in `folder` are not trained again."""
    sys.path.insert(0, packages)
    from monai.engines import SupervisedTrainer
    from monai.handlers import CheckpointLoader, CheckpointSaver

    from layerwise.integrations.monai import FullState, update_boxes

    images = np.random.default_rng(0).normal(size=(4, 1, 8, 8, 8))
    example = (torch.empty(2, 1, 8, 8, 8, dtype=torch.float64), torch.empty(2, 8, 8, 8, dtype=torch.int64))
    boxes = layerwise.ParallelOptions(io="boxes", measure_s=0, verbose=False)
    split = {"network.0": {"w": 2}, "network.2": {"c": 2}} if comm.size > 1 else None
    network = layerwise.parallelize(WithLoss(), example, strategy=split, options=boxes)
    optimizer = torch.optim.Adam(network.parameters(), 0.02)
    loader = BoxLoader(network, images, (images[:, 0] > 0).astype(np.int64))
    trainer = SupervisedTrainer(
        network.device, epochs, loader, network, optimizer, None, iteration_update=update_boxes, decollate=False
    )
    state = {"net": FullState(network), "optimizer": FullState(network, optimizer), "trainer": trainer}
    there = Path(folder) / "model.pt"
    if there.exists():
        CheckpointLoader(str(there), state).attach(trainer)
    CheckpointSaver(folder, state, save_final=True, final_filename="model.pt").attach(trainer)
    trainer.run()
    network.comm.barrier()
    return network.full_state_dict()
