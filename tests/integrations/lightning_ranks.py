"""What the ranks of a pool (tests/comm/pool.py) train with Lightning; a single process does the same by itself."""

import contextlib
import io
import os
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from layerwise.api.arguments import ParallelOptions
from layerwise.comm.base import Comm
from layerwise.integrations.lightning import LayerwiseStrategy

SAMPLES, BATCH = 48, 8  # of all ranks together
QUIET: dict[str, Any] = {"options": ParallelOptions(measure_s=0, verbose=False)}
SPLIT: dict[str, Any] = QUIET | {"strategy": {"0": {"c": 2}, "3": {"k": 2}}}


class Classifier(L.LightningModule):
    """A network, a parameter outside of it, and what a step does besides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
        self.scale = nn.Parameter(torch.zeros(()))
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]) * self.scale.exp(), batch[1])
        self.log("loss", loss, sync_dist=True)
        self.seen.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


class Smooth(Classifier):
    """Without a batch norm, whose statistics averages of weights would need anew."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1] = nn.Identity()
        self.double()  # as Lightning does it too late for a copy of a callback's


class Gan(L.LightningModule):
    """Two networks, two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.made = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.judge = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        x, _ = batch
        self.toggle_optimizer(first)
        loss = F.softplus(-self.judge(self.made(x))).mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        loss = (F.softplus(-self.judge(x)) + F.softplus(self.judge(self.made(x).detach()))).mean()
        second.zero_grad()
        self.manual_backward(loss)
        second.step()
        self.untoggle_optimizer(second)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.made.parameters(), 0.01), torch.optim.SGD(self.judge.parameters(), 0.1)


def loader(ranks: int) -> DataLoader[Any]:
    """A rank's samples in their order; Lightning's own sampler would shuffle them."""
    drawn = torch.Generator().manual_seed(1)
    x, y = torch.randn(SAMPLES, 6, generator=drawn), torch.randint(4, (SAMPLES,), generator=drawn)
    data, rank = TensorDataset(x, y), dist.get_rank() if ranks > 1 else 0
    return DataLoader(data, BATCH // ranks, sampler=DistributedSampler(data, ranks, rank, shuffle=False))


def trainer(ranks: int, strategy: Any, **settings: Any) -> L.Trainer:
    off = ("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger")
    return L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        **(dict.fromkeys(off, False) | {"max_epochs": 2} | settings),
    )


def run(comm: Comm, strategy: Any, case: str, folder: str = "") -> Any:
    """A case, with `strategy` the keywords of LayerwiseStrategy, or "auto" for Lightning's own on one device."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()), mock.patch.dict(os.environ):
        warnings.simplefilter("ignore")
        made = LayerwiseStrategy(**strategy) if isinstance(strategy, dict) else strategy
        try:
            return globals()[f"run_{case}"](comm.size, made, folder)
        finally:
            if comm.size == 1 and dist.is_initialized():
                dist.destroy_process_group()  # of one rank, which Lightning has made


def full(module: L.LightningModule, fit: L.Trainer) -> dict[str, Tensor]:
    state = fit.strategy.lightning_module_state_dict().items()
    return {name: (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone() for name, x in state}


def run_all(ranks: int, strategy: Any, folder: str) -> Any:
    """Fit with validation, accumulation and clipping, then the other loops."""
    module = Classifier()
    fit = trainer(ranks, strategy, precision="64-true", accumulate_grad_batches=2, gradient_clip_val=0.1)
    fit.fit(module, loader(ranks), loader(ranks))
    numbers = {name: float(value) for name, value in fit.callback_metrics.items()}
    state, steps = full(module, fit), len(module.seen)
    (tested,) = fit.test(module, loader(ranks), verbose=False)
    predicted = torch.cat(fit.predict(module, loader(ranks)))
    return numbers, state, tested["val_loss"], predicted, steps


def run_save(ranks: int, strategy: Any, folder: str) -> None:
    """Three of four epochs, and a checkpoint."""
    fit = trainer(ranks, strategy, precision="64-true", max_epochs=3)
    fit.fit(Classifier(), loader(ranks))
    fit.save_checkpoint(Path(folder) / "three.ckpt")


def run_resume(ranks: int, strategy: Any, folder: str) -> Any:
    """All four, from the checkpoint if there is one."""
    module, there = Classifier(), Path(folder) / "three.ckpt"
    fit = trainer(ranks, strategy, precision="64-true", max_epochs=4)
    fit.fit(module, loader(ranks), ckpt_path=there if folder else None)
    return full(module, fit)


def run_gan(ranks: int, strategy: Any, folder: str) -> Any:
    module = Gan()
    fit = trainer(ranks, strategy, precision="64-true")
    fit.fit(module, loader(ranks))
    return full(module, fit)


def run_mixed(ranks: int, strategy: Any, half: str) -> Any:
    module = Classifier()
    module.scale.requires_grad_(False)  # GradScaler takes it in no optimizer with DTensors
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if half == "16-mixed" else None
    fit = trainer(ranks, strategy, plugins=MixedPrecision(half, "cpu", scaler), gradient_clip_val=0.5)
    fit.fit(module, loader(ranks))
    return full(module, fit)


def run_averaged(ranks: int, strategy: Any, kind: str) -> Any:
    """The weights at the end, which Lightning's callback makes the averages."""
    module = Smooth()
    callbacks: list[L.Callback] = []
    if kind == "SWA":
        callbacks = [StochasticWeightAveraging(1e-3, swa_epoch_start=1)]
    elif kind == "EMA":
        callbacks = [WeightAveraging(use_buffers=False, avg_fn=lambda mean, now, _: mean.lerp(now, 0.25))]
    fit = trainer(ranks, strategy, precision="64-true", max_epochs=4, callbacks=callbacks)
    fit.fit(module, loader(ranks))
    return full(module, fit)
