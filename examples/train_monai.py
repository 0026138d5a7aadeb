"""MONAI's SupervisedTrainer. Needs: pip install layerwise[monai]

python examples/train_monai.py
torchrun --nproc-per-node 2 examples/train_monai.py
"""

import argparse
import os

import torch
import torch.distributed as dist
from ignite.engine import Events
from monai.engines import SupervisedTrainer
from monai.handlers import CheckpointSaver
from torch import nn
from torch.utils.data import DataLoader

import layerwise
from layerwise.integrations.monai import FullState


def main(epochs: int, measure_s: float, out: str | None) -> None:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    images = torch.randn(16, 1, 8, 8, 8)
    cases = [{"image": x, "label": (x > x.mean()).long()[0]} for x in images][rank::world]  # this rank's
    network = nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(), nn.Conv3d(8, 2, 1))
    loader = DataLoader(cases, 4 // world)
    network = layerwise.parallelize(  # was: DistributedDataParallel(network)
        network, next(iter(loader))["image"], options=layerwise.ParallelOptions(measure_s=measure_s)
    )
    optimizer = torch.optim.Adam(network.parameters(), 0.02)
    trainer = SupervisedTrainer(network.device, epochs, loader, network, optimizer, nn.CrossEntropyLoss())

    @trainer.on(Events.EPOCH_COMPLETED)
    def show(engine):
        loss = torch.tensor(engine.state.output[0]["loss"])
        if world > 1:
            dist.all_reduce(loss)
        if rank == 0:
            print(f"epoch {engine.state.epoch}: loss {loss.item() / world:.4f}")

    if out is not None:
        state = {"net": FullState(network), "optimizer": FullState(network, optimizer)}
        CheckpointSaver(out, state, save_final=True).attach(trainer)
    trainer.run()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument(
        "--measure-s", type=float, default=0.0, help="seconds to measure this machine; 30 for real work"
    )
    parser.add_argument("--out", metavar="FOLDER", help="for the full state")
    main(**vars(parser.parse_args()))
