"""What the ranks of a pool (tests/comm/pool.py) train with Hugging Face's tools; one process does it by itself."""

import contextlib
import io
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from layerwise.api.arguments import ParallelOptions
from layerwise.comm.base import Comm
from layerwise.integrations.accelerate import prepare
from layerwise.integrations.transformers import LayerwiseTrainer
from layerwise.run.parallel import ParallelModule

QUIET: dict[str, Any] = {"options": ParallelOptions(measure_s=0, verbose=False)}
BATCH = 4  # of all ranks together


def full(model: nn.Module) -> dict[str, Tensor]:
    state = model.full_state_dict() if isinstance(model, ParallelModule) else model.state_dict()
    return {name: x.detach().clone() for name, x in state.items()}


def loop(comm: Comm, strategy: Any, precision: str = "no", loading: str = "") -> tuple[list[float], dict[str, Tensor]]:
    """A loop of Accelerate's with accumulation, clipping and a scheduler. strategy: None for Accelerate alone.

    loading: A flag of DataLoaderConfiguration.
    """
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    config = DataLoaderConfiguration(**({loading: True} if loading else {}))
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, mixed_precision=precision, dataloader_config=config
    )
    feeds = 1 if loading == "split_batches" else comm.size  # loaders' batches in one of all processes
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).to(
        torch.float64 if precision == "no" else None
    )
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2 * feeds)  # Accelerate steps it so often
    x, y = torch.randn(32, 6, dtype=model[0].weight.dtype), torch.randint(4, (32,))
    loader = DataLoader(TensorDataset(x, y), BATCH // feeds)
    if strategy is None:
        made = accelerator.prepare(model, optimizer, loader, scheduler)
    else:
        made = prepare(accelerator, model, optimizer, loader, scheduler, **QUIET, strategy=strategy)
    model, optimizer, loader, scheduler = made
    assert strategy is None or model.plan.batch == BATCH
    losses = []
    for inputs, target in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(inputs), target)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses, full(model)


def train(comm: Comm, keywords: Any, folder: str, steps: int, resume: bool = False) -> Any:
    """The Trainer's losses and weights. keywords: of parallelize; None for the Trainer alone, on one device."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=32, n_embd=8, n_layer=1, n_head=2, n_positions=16, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).double()
    texts = []
    for length in range(16):  # padded ones count their own tokens
        ids = torch.randint(32, (12,))
        texts.append({"input_ids": ids, "labels": ids.masked_fill(torch.arange(12) >= 6 + length % 6, -100)})
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=BATCH // comm.size, max_steps=steps, learning_rate=0.01,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_steps=steps, report_to=[], disable_tqdm=True, use_cpu=True, max_grad_norm=0.5, eval_strategy="steps",
        eval_steps=steps, per_device_eval_batch_size=BATCH // comm.size, seed=1, save_only_model=False,
    )  # fmt: skip
    settings = {"train_dataset": texts, "eval_dataset": texts[:8]}
    with contextlib.redirect_stdout(io.StringIO()):
        if keywords is None:
            trainer = Trainer(model, arguments, **settings)
            trainer.model_accepts_loss_kwargs = False  # the model's own mean, not over tokens that have no target
        else:
            trainer = LayerwiseTrainer(model, arguments, **settings, keywords=QUIET | keywords)
        trainer.train(resume_from_checkpoint=resume or None)
    losses = [float(log["loss"]) for log in trainer.state.log_history if "loss" in log]
    evaluated = [float(log["eval_loss"]) for log in trainer.state.log_history if "eval_loss" in log]
    return losses, evaluated, full(trainer.model)
