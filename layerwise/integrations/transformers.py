"""LayerwiseTrainer: Hugging Face's Trainer over a model that layerwise splits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import Trainer

from layerwise.api.parallelize import Keywords
from layerwise.errors import LayerwiseError
from layerwise.integrations.accelerate import first_batch, prepare_model
from layerwise.integrations.optimizer_state import full_state, load_full_state
from layerwise.run.layered import LayeredRun
from layerwise.run.parallel import ParallelModule, of

ARGUMENTS_FILE = "training_args.bin"


class LayerwiseTrainer(Trainer):  # type: ignore[misc] # mypy does not read transformers
    """A Trainer that splits the model's layers before it trains.

        trainer = LayerwiseTrainer(model, args, train_dataset=texts)     # was: Trainer(...), under torchrun

    Checkpoints have full weights, which `from_pretrained` reads, and the full optimizer state, so they can be resumed
    on another number of ranks. With gradient accumulation every batch counts alike, however many tokens it has.

    Args:
        args: The Trainer's own.
        keywords: Of `layerwise.parallelize`.
        named: The Trainer's own.

    Raises:
        LayerwiseError: The Trainer is to split the model in another way, too.
    """

    model: Any
    optimizer: Any

    def __init__(self, *args: Any, keywords: Keywords | None = None, **named: Any) -> None:
        super().__init__(*args, **named)
        other = {"DeepSpeed": self.is_deepspeed_enabled, "FSDP": self.is_fsdp_enabled}
        if chosen := [name for name, there in other.items() if there]:
            raise LayerwiseError(
                f"TrainingArguments ask for {chosen[0]}, which splits the model in its own way: leave that out, as "
                "LayerwiseTrainer splits it"
            )
        if self.args.n_gpu > 1:
            raise LayerwiseError(f"one process would use {self.args.n_gpu} GPUs: start one a GPU, with torchrun")
        self._keywords: Keywords = keywords or {}
        self.model_accepts_loss_kwargs = False  # the loss inside the model counts the targets of all ranks itself

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        if not isinstance(self.model, ParallelModule):
            example = dict(self._prepare_inputs(first_batch(train_dataloader, self.accelerator)))
            self.model = self.model_wrapped = prepare_model(self.accelerator, self.model, example, **self._keywords)
            of(self.model).steps_done = self.state.global_step * self.args.gradient_accumulation_steps
        return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    def get_optimizer_cls_and_kwargs(self, args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:
        """As the Trainer's, with the groups of one device: its own would be split by mesh, and not go on elsewhere."""
        kind, keywords = super().get_optimizer_cls_and_kwargs(args, model)
        plain = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
        if plain and isinstance(model, ParallelModule) and not keywords.keys() & {"params", "model", "optimizer_dict"}:
            decayed = set(self.get_decay_parameter_names(model))
            trained = [(name in decayed, p) for name, p in model.named_parameters() if p.requires_grad]
            keywords["params"] = [
                {
                    "params": [p for of_group, p in trained if of_group == decays],
                    "weight_decay": args.weight_decay * decays,
                }
                for decays in (True, False)
            ]
        return kind, keywords

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Writes the full model; all ranks call it."""
        if not isinstance(self.model, ParallelModule):
            super()._save(output_dir, state_dict)
            return
        folder = Path(output_dir or self.args.output_dir)
        if self.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
        model: Any = self.model
        split = isinstance(of(self.model), LayeredRun)  # of which all ranks write
        if self.args.should_save or split:
            model.save_pretrained(folder)
        if self.args.should_save:
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            torch.save(self.args, folder / ARGUMENTS_FILE)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = full_state(self._torch_optimizer, self.model)
        with self._optimizer_instead(SimpleNamespace(state_dict=lambda: state)):
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        optimizer = self._torch_optimizer
        loader = SimpleNamespace(load_state_dict=lambda state: load_full_state(optimizer, state, self.model))
        with self._optimizer_instead(loader):
            super()._load_optimizer_and_scheduler(checkpoint)

    @contextmanager
    def _optimizer_instead(self, instead: Any) -> Iterator[None]:
        """Within it, the Trainer reads or gives an optimizer's state through `instead`."""
        before, self.optimizer = self.optimizer, instead
        try:
            yield
        finally:
            self.optimizer = before

    @property
    def _torch_optimizer(self) -> Any:
        return getattr(self.optimizer, "optimizer", self.optimizer)
