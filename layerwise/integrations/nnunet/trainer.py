"""nnUNetTrainerLayerwise: nnU-Net's training of one network over all ranks, whose patches are split among them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import torch
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from torch import Tensor, nn
from torch.amp import GradScaler

from layerwise.api.parallelize import Keywords, parallelize
from layerwise.api.world import join
from layerwise.checkpoint.save_and_load import owned
from layerwise.comm.together import alone
from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.integrations.nnunet.folder import read_checkpoint
from layerwise.integrations.optimizer_state import NAMES, full_state, load_full_state
from layerwise.run.parallel import ParallelModule

NETWORK = "network."  # of its parameters' names in NetworkWithLoss
TIMEOUT_S = 1800.0  # as torch.distributed has it: a rank may load data, write a checkpoint or export cases for long


class NetworkWithLoss(nn.Module):
    """A network that returns its loss, and of each class the true positive, false positive and false negative voxels.

    Args:
        network: With or without deep supervision.
        loss: nnU-Net's, of the network's outputs and their targets.
        regions: Channels are regions, which may overlap; else classes, of which the first is background.
    """

    def __init__(self, network: nn.Module, loss: nn.Module, *, regions: bool) -> None:
        super().__init__()
        self.network, self.loss, self._regions = network, loss, regions

    def forward(self, image: Tensor, *targets: Tensor) -> tuple[Tensor, ...]:
        outputs = self.network(image)
        deep = isinstance(outputs, list | tuple)
        loss = self.loss(outputs, targets) if deep else self.loss(outputs, *targets)
        logits, target = outputs[0] if deep else outputs, targets[0]
        with torch.no_grad():
            if self._regions:
                predicted, wanted = logits.sigmoid() > 0.5, target
            else:
                classes = torch.arange(1, logits.shape[1], device=logits.device).view(-1, *[1] * (logits.ndim - 2))
                predicted, wanted = logits.argmax(1, keepdim=True) == classes, target == classes
            voxels = (0, *range(2, logits.ndim))
            kinds = predicted & wanted, predicted & ~wanted, ~predicted & wanted
            return loss, *(kind.sum(voxels) for kind in kinds)


class BatchesByTurns:
    """An iterator of batches that the ranks load and augment by turns, of which each is sent its boxes.

    So the workers of all ranks together do one device's work, and draw random numbers as they like.

    Attributes:
        loader: nnU-Net's, of whole batches.
    """

    def __init__(self, loader: Iterator[dict[str, Any]], model: ParallelModule, types: list[torch.dtype]) -> None:
        """types: of the model's inputs."""
        self.loader, self._comm, self._types, self._turn = loader, model.comm, types, 0
        boxes = self._comm.all_gather_object([[box.lo, box.hi] for box in model.read_boxes().values()])
        self._boxes = [[Box(tuple(lo), tuple(hi)) for lo, hi in of_rank] for of_rank in boxes]

    def __iter__(self) -> Iterator[list[Tensor]]:
        return self

    def __next__(self) -> list[Tensor]:
        comm, sender = self._comm, self._turn
        self._turn = (sender + 1) % comm.size
        boxes = self._boxes[comm.rank]
        sizes = [box.volume * dtype.itemsize for box, dtype in zip(boxes, self._types, strict=True)]
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=comm.device)
        sends, receives = list[tuple[int, Tensor]](), [(sender, received)]
        if comm.rank == sender:
            batch = next(self.loader)
            targets = batch["target"] if isinstance(batch["target"], list) else [batch["target"]]
            packed = [_packed([batch["data"], *targets], of_rank).to(comm.device) for of_rank in self._boxes]
            received = packed[sender]
            sends, receives = [(rank, message) for rank, message in enumerate(packed) if rank != sender], []
        comm.exchange(sends, receives, "io", "boxes of a batch").wait()
        parts = zip(torch.split(received, sizes), self._types, boxes, strict=True)
        return [part.view(dtype).view(box.shape) for part, dtype, box in parts]


class nnUNetTrainerLayerwise(nnUNetTrainer):  # type: ignore[misc] # noqa: N801 (as nnU-Net's trainers are called)
    """nnU-Net's trainer for more GPUs than a batch has samples: all compute every sample, each its boxes of the layers.

        export nnUNet_extTrainer=$(python -m layerwise.integrations.nnunet)
        nnUNetv2_train 4 3d_fullres 0 -tr nnUNetTrainerLayerwise -num_gpus 8

    Losses and weights are those of nnUNetTrainer on one device with the same batches. Checkpoints have full weights
    under nnUNetTrainer's name, which nnU-Net reads without layerwise, and go on on any number of GPUs.

    Attributes:
        keywords: Of `layerwise.parallelize`, for a subclass to set.

    Raises:
        LayerwiseError: The data set has an ignore label, or its loss is of the k largest; as `layerwise.parallelize`.
    """

    keywords: ClassVar[Keywords] = {}
    network: Any
    optimizer: Any
    dataloader_train: Any
    dataloader_val: Any

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

    def initialize(self) -> None:
        if fixed := sorted({"io", "autocast"} & self.keywords.keys()):
            raise LayerwiseError(
                f"nnUNetTrainerLayerwise sets {' and '.join(fixed)} itself: leave it out of `keywords`"
            )
        if self.label_manager.has_ignore_label:
            raise LayerwiseError(
                "the data set has an ignore label, of which nnU-Net's loss asks in every batch whether all voxels have "
                "it: torch.export cannot follow that, so train with another trainer"
            )
        super().initialize()
        self._plain, names = self.network, {p: name for name, p in self.network.named_parameters()}
        self._groups = [[names[p] for p in group["params"]] for group in self.optimizer.param_groups]
        keywords: Keywords = {
            "optimizer": "momentum",
            **self.keywords,
            "io": "boxes",
            "autocast": torch.float16 if self.device.type == "cuda" else None,
        }
        with_loss = NetworkWithLoss(self._plain, self.loss, regions=self.label_manager.has_regions)
        self.network = parallelize(with_loss, self._example(), **keywords)
        self.optimizer, self.lr_scheduler = self.configure_optimizers()

    def _example(self) -> tuple[Tensor, ...]:
        """A batch in nobody's memory: images, and targets of the outputs of deep supervision."""
        regions, patch = self.label_manager.has_regions, self.configuration_manager.patch_size
        channels, dtype = (len(self.label_manager.foreground_regions), torch.bool) if regions else (1, torch.int16)
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
        self._plain.decoder.deep_supervision = enabled

    def get_dataloaders(self) -> tuple[BatchesByTurns, ...]:
        alone(self._comm, self.do_split)  # writes the split, which others may read half written
        types = [x.dtype for x in self._example()]
        return tuple(BatchesByTurns(loader, self.network, types) for loader in super().get_dataloaders())

    def on_train_end(self) -> None:
        self.dataloader_train, self.dataloader_val = self.dataloader_train.loader, self.dataloader_val.loader
        super().on_train_end()  # which ends their workers

    def _call(self, batch: list[Tensor]) -> tuple[Tensor, ...]:
        with torch.autocast(self.device.type, enabled=self.device.type == "cuda"):
            outputs: tuple[Tensor, ...] = self.network(*batch)
        return outputs

    def train_step(self, batch: list[Tensor]) -> dict[str, Any]:
        self.optimizer.zero_grad(set_to_none=True)
        loss, *_ = self._call(batch)
        self.grad_scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.grad_scaler.unscale_(self.optimizer)
        self.network.clip_grad_norm_(12)
        self.grad_scaler.step(self.optimizer)
        self.grad_scaler.update()
        return {"loss": loss.detach().cpu().numpy()}

    def validation_step(self, batch: list[Tensor]) -> dict[str, Any]:
        named = zip(("loss", "tp_hard", "fp_hard", "fn_hard"), self._call(batch), strict=True)
        return {name: value.cpu().numpy() for name, value in named}

    def save_checkpoint(self, filename: str) -> None:
        if self.disable_checkpointing:
            super().save_checkpoint(filename)  # which says so
            return
        weights, optimizer_state = self._weights(), self._optimizer_state()
        theirs = type(self).build_network_architecture is nnUNetTrainer.build_network_architecture
        if self.local_rank == 0:
            checkpoint = {
                "network_weights": weights,
                "optimizer_state": optimizer_state,
                "grad_scaler_state": self.grad_scaler.state_dict() or None,
                "logging": self.logger.get_checkpoint(),
                "_best_ema": self._best_ema,
                "current_epoch": self.current_epoch + 1,
                "init_args": self.my_init_kwargs,
                "trainer_name": "nnUNetTrainer" if theirs else type(self).__name__,
                "inference_allowed_mirroring_axes": self.inference_allowed_mirroring_axes,
            }
            torch.save(checkpoint, filename)

    def load_checkpoint(self, filename_or_checkpoint: str) -> None:
        if not self.was_initialized:
            self.initialize()
        checkpoint = read_checkpoint(Path(filename_or_checkpoint))
        self.my_init_kwargs, self._best_ema = checkpoint["init_args"], checkpoint["_best_ema"]
        self.current_epoch = checkpoint["current_epoch"]
        if (axes := "inference_allowed_mirroring_axes") in checkpoint:
            setattr(self, axes, checkpoint[axes])
        self.logger.load_checkpoint(checkpoint["logging"])
        weights = checkpoint["network_weights"].items()
        self.network.load_state_dict({NETWORK + name.removeprefix("module."): x for name, x in weights})
        self.network.steps = self.current_epoch * self.num_iterations_per_epoch
        self._load_optimizer_state(checkpoint["optimizer_state"])
        if checkpoint["grad_scaler_state"]:
            self.grad_scaler.load_state_dict(checkpoint["grad_scaler_state"])

    def perform_actual_validation(self, save_probabilities: bool = False) -> None:
        """nnU-Net's: the ranks share out the cases, and each predicts its own by windows, with the plain network."""
        self._plain.load_state_dict(self._weights())
        parallel, self.network, self.is_ddp = self.network, self._plain, self._comm.size > 1
        try:
            with torch.no_grad():
                super().perform_actual_validation(save_probabilities)
        finally:
            self.network, self.is_ddp = parallel, False

    def _weights(self) -> dict[str, Tensor]:
        """The network's state dict, as it is on one device; all ranks call it."""
        return {name.removeprefix(NETWORK): x for name, x in self.network.full_state_dict().items()}

    def _optimizer_state(self) -> dict[str, Any]:
        """The optimizer's state dict, as it is on one device; all ranks call it."""
        state = full_state(self.optimizer, self._names())
        names = [name for group in state["param_groups"] for name in group.pop(NAMES)]
        states = {name: state["state"][i] for i, name in enumerate(names) if i in state["state"]}
        numbers = count()
        for group, every in zip(state["param_groups"], self._groups, strict=True):
            group["params"] = [next(numbers) for _ in every]  # the parallel network lacks those that no loss reaches
        every = [name for group in self._groups for name in group]
        state["state"] = {i: states[name] for i, name in enumerate(every) if name in states}
        return state

    def _load_optimizer_state(self, state: dict[str, Any]) -> None:
        names = self._names()
        trained = set(names.values())
        for group, every in zip(state["param_groups"], self._groups, strict=True):
            there = {i: name for i, name in zip(group["params"], every, strict=True) if name in trained}
            group["params"], group[NAMES] = list(there), list(there.values())
        load_full_state(self.optimizer, state, names, owned(self.network))

    def _names(self) -> dict[nn.Parameter, str]:
        return {p: name.removeprefix(NETWORK) for name, p in self.network.named_parameters()}


def _packed(tensors: list[Tensor], boxes: list[Box]) -> Tensor:
    """The bytes of the tensors' boxes, one after another; tensors that have none are left out."""
    parts = [x[box.slices()].contiguous() for x, box in zip(tensors, boxes, strict=False)]
    return torch.cat([part.view(-1).view(torch.uint8) for part in parts])
