"""nnUNetTrainerLayerwise: nnU-Net's training of one network over all ranks, whose patches are split among them."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from layerwise.api.arguments import DEFAULT
from layerwise.api.optimizers import planned
from layerwise.api.parallelize import Keywords, parallelize
from layerwise.api.world import join
from layerwise.comm.together import alone
from layerwise.errors import LayerwiseError
from layerwise.integrations.nnunet.batches import BatchesByTurns
from layerwise.integrations.nnunet.network import NetworkWithLoss
from layerwise.integrations.nnunet.reading import read_checkpoint
from layerwise.integrations.optimizer_state import full_state, load_full_state
from layerwise.run.parallel import of

NETWORK = "network."  # of its parameters' names in NetworkWithLoss
TIMEOUT_S = 1800.0  # as torch.distributed has it: a rank may load data, write a checkpoint or export cases for long


class nnUNetTrainerLayerwise(nnUNetTrainer):  # type: ignore[misc] # noqa: N801 (as nnU-Net's trainers are called)
    """nnU-Net's trainer for more GPUs than a batch has samples: all compute every sample, each its boxes of the layers.

        export nnUNet_extTrainer=$(python -m layerwise.integrations.nnunet)
        nnUNetv2_train 4 3d_fullres 0 -tr nnUNetTrainerLayerwise -num_gpus 8

    Losses and weights are those of nnUNetTrainer on one device with the same batches. Checkpoints have full weights
    under nnUNetTrainer's name, which nnU-Net reads without layerwise, and go on on any number of GPUs. The network and
    the optimizer are nnU-Net's own until training starts, and after it.

    Attributes:
        keywords: Of `layerwise.parallelize`, for a subclass to set.

    Raises:
        LayerwiseError: The loss is of the k largest, or not nnU-Net's default with an ignore
            label; as `layerwise.parallelize`.
    """

    keywords: ClassVar[Keywords] = {}
    network: Any
    optimizer: Any
    dataloader_train: Any
    dataloader_val: Any
    _plain: tuple[nn.Module, Optimizer] | None = None  # nnU-Net's, while the parallel ones train

    def __init__(
        self,
        plans: dict[str, Any],
        configuration: str,
        fold: int | str,
        dataset_json: dict[str, Any],
        device: torch.device = torch.device("cuda"),  # noqa: B008 (nnU-Net's)
    ) -> None:
        here = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device
        self._comm = join(here, timeout_s=TIMEOUT_S).comm
        super().__init__(plans, configuration, fold, dataset_json, device)
        self.is_ddp = False  # the batch, the loss and the metrics are one device's
        self.local_rank, self.device = self._comm.rank, self._comm.device
        self.grad_scaler = GradScaler(self.device.type, enabled=self.device.type == "cuda")
        if "autocast" in self.keywords or self.keywords.get("options", DEFAULT).io is not None:
            raise LayerwiseError("nnUNetTrainerLayerwise sets autocast and io itself: leave them out of `keywords`")

    def on_train_start(self) -> None:
        if not self.was_initialized:
            self.initialize()
        self._split()
        super().on_train_start()

    def _split(self) -> None:
        """Puts the parallel network and its optimizer in the places of nnU-Net's, with their values."""
        options = replace(self.keywords.get("options", DEFAULT), io="boxes", optimizer=planned(self.optimizer))
        if self.configuration_manager.batch_dice:  # a loss of all samples together
            options = replace(options, samples_together=True)
        keywords: Keywords = {
            **self.keywords,
            "autocast": torch.float16 if self.device.type == "cuda" else None,
            "options": options,
        }
        state = full_state(self.optimizer, self.network)
        self._plain = self.network, self.optimizer
        self.network = parallelize(self.with_loss(), self.example(), **keywords)
        of(self.network).steps_done = self.current_epoch * self.num_iterations_per_epoch
        self.optimizer, self.lr_scheduler = self.configure_optimizers()
        load_full_state(self.optimizer, state, self.network, partial=True, prefix=NETWORK)

    def _gathered(self) -> tuple[nn.Module, Optimizer]:
        """nnU-Net's network and optimizer, with the values of those that train; all ranks call it."""
        if self._plain is None:
            return self.network, self.optimizer
        network, optimizer = self._plain
        network.load_state_dict(
            {name.removeprefix(NETWORK): x for name, x in of(self.network).full_state_dict().items()}
        )
        load_full_state(optimizer, full_state(self.optimizer, self.network, prefix=NETWORK), network, partial=True)
        return network, optimizer

    def with_loss(self) -> NetworkWithLoss:
        """Returns the module that is split: of a copy, as `parallelize` changes it in place."""
        return NetworkWithLoss(copy.deepcopy(self.network), self.loss, self.label_manager)

    def example(self) -> tuple[Tensor, ...]:
        """A batch in nobody's memory: images, and targets of the outputs of deep supervision."""
        labels, patch = self.label_manager, self.configuration_manager.patch_size
        channels, dtype = 1, torch.int16
        if labels.has_regions:
            channels, dtype = len(labels.foreground_regions) + labels.has_ignore_label, torch.bool
        scales = self._get_deep_supervision_scales() or [[1] * len(patch)]
        weights = getattr(self.loss, "weight_factors", [1])  # 0 of the coarsest, whose target nothing reads
        used = [scale for scale, weight in zip(scales, weights, strict=True) if weight]
        shapes = [[round(n * s) for n, s in zip(patch, scale, strict=True)] for scale in used]
        return (
            torch.empty(self.batch_size, self.num_input_channels, *patch, device="meta"),
            *(torch.empty(self.batch_size, channels, *shape, dtype=dtype, device="meta") for shape in shapes),
        )

    def _do_i_compile(self) -> bool:
        return False  # layers are traced: `keywords` may say compile=

    def plot_network_architecture(self) -> None:
        """Does nothing: rank 0 alone cannot call the network."""

    def set_deep_supervision_enabled(self, enabled: bool) -> None:
        network: Any = self.network if self._plain is None else self._plain[0]
        network.decoder.deep_supervision = enabled

    def get_dataloaders(self) -> tuple[BatchesByTurns, ...]:
        alone(self._comm, self.do_split)  # writes the split, which others may read half written
        types = [x.dtype for x in self.example()]
        return tuple(BatchesByTurns(loader, self.network, types) for loader in super().get_dataloaders())

    def on_train_end(self) -> None:
        self.dataloader_train, self.dataloader_val = self.dataloader_train.loader, self.dataloader_val.loader
        super().on_train_end()  # saves, and ends the loaders' workers
        self.network, self.optimizer = self._gathered()
        self._plain = None

    def _call(self, batch: list[Tensor]) -> tuple[Tensor, ...]:
        with torch.autocast(self.device.type, enabled=self.device.type == "cuda"):
            outputs: tuple[Tensor, ...] = self.network(*batch)
        return outputs

    def train_step(self, batch: list[Tensor]) -> dict[str, Any]:
        self.optimizer.zero_grad(set_to_none=True)
        loss, *_ = self._call(batch)
        self.grad_scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.grad_scaler.unscale_(self.optimizer)
        of(self.network).clip_grad_norm_(12)
        self.grad_scaler.step(self.optimizer)
        self.grad_scaler.update()
        return {"loss": loss.detach().cpu().numpy()}

    def validation_step(self, batch: list[Tensor]) -> dict[str, Any]:
        loss, *counts = self._call(batch)
        labels = self.label_manager
        classes = labels.foreground_regions if labels.has_regions else labels.foreground_labels
        total = np.zeros((len(counts), len(classes)))
        for kind, (count, box) in enumerate(zip(counts, of(self.network).output_boxes()[1:], strict=True)):
            if box is not None and box.volume:  # this rank's samples and classes
                total[kind, box.lo[1] : box.hi[1]] = count.sum(0).cpu()
        tp, fp, fn = np.sum(self._comm.all_gather_object(total.tolist()), 0)
        return {"loss": loss.cpu().numpy(), "tp_hard": tp, "fp_hard": fp, "fn_hard": fn}

    def save_checkpoint(self, filename: str) -> None:
        """nnU-Net's, by all ranks together; rank 0 writes."""
        saved: Any = copy.copy(self)
        if not self.disable_checkpointing:
            saved.network, saved.optimizer = self._gathered()
        saved.grad_scaler = self.grad_scaler if self.grad_scaler.is_enabled() else None
        if type(self).build_network_architecture is nnUNetTrainer.build_network_architecture:
            saved.__class__ = nnUNetTrainer  # whose name is written: nnU-Net reads it without layerwise
        nnUNetTrainer.save_checkpoint(saved, filename)

    def load_checkpoint(self, filename_or_checkpoint: str) -> None:
        read_checkpoint(Path(filename_or_checkpoint))  # refuses a pickle that is more than tensors and numbers
        super().load_checkpoint(filename_or_checkpoint)

    def perform_actual_validation(self, save_probabilities: bool = False) -> None:
        """nnU-Net's: the ranks share out the cases, and each predicts its own by windows, with the plain network."""
        self.is_ddp = self._comm.size > 1
        try:
            with torch.no_grad():
                super().perform_actual_validation(save_probabilities)
        finally:
            self.is_ddp = False
