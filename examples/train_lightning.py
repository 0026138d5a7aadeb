"""Lightning's trainer with strategy="layerwise". Needs: pip install layerwise[lightning]

python examples/train_lightning.py
torchrun --nproc-per-node 2 examples/train_lightning.py
"""

import argparse
import os

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import layerwise
from layerwise.integrations.lightning import LayerwiseStrategy


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        loss = self.trainer.callback_metrics["loss"].item()
        self.print(f"epoch {self.current_epoch}: loss {loss:.4f}")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(epochs: int, measure_s: float) -> None:
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    L.seed_everything(0, verbose=False)
    x = torch.randn(512, 64)
    loader = DataLoader(TensorDataset(x, x[:, :10].argmax(1)), 64 // ranks)
    options = layerwise.ParallelOptions(measure_s=measure_s)
    trainer = L.Trainer(
        devices=ranks,
        strategy=LayerwiseStrategy(options=options),  # or "layerwise"; was: "ddp"
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(), loader)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument(
        "--measure-s", type=float, default=0.0, help="seconds to measure this machine; 30 for real work"
    )
    main(**vars(parser.parse_args()))
