"""prepare: Accelerate's training loops over a model that layerwise splits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, send_to_device
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from layerwise.api.arguments import DEFAULT
from layerwise.api.optimizers import build
from layerwise.api.parallelize import Keywords, parallelize
from layerwise.api.race import random_state_kept
from layerwise.api.source import ExampleInputs
from layerwise.errors import LayerwiseError
from layerwise.run.parallel import ParallelModule, of

PLAIN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
AUTOCAST = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    *others: Any,
    example: ExampleInputs | None = None,
    **keywords: Unpack[Keywords],
) -> tuple[Any, ...]:
    """Returns what `accelerator.prepare(model, *others)` returns, with the model's layers split.

        model, optimizer, loader, scheduler = prepare(accelerator, model, optimizer, loader, scheduler)

    The rest of the loop stays: `accumulate`, `backward`, `clip_grad_norm_`, mixed precision. Weights are saved by
    `layerwise.save` or `model.save_pretrained`, which every rank calls.

    Args:
        accelerator: Of plain data parallelism.
        model: As for `layerwise.parallelize`.
        others: Optimizers that have not stepped yet, loaders, schedulers.
        example: What one rank calls the model with. None: the first batch of the first loader, a dict of arguments by
            name, or a tuple whose first element is the input.
        keywords: Those of `layerwise.parallelize`.

    Raises:
        LayerwiseError: The accelerator splits the model in another way; or as `layerwise.parallelize`.
    """
    if example is None:
        loader = next((one for one in others if isinstance(one, DataLoader)), None)
        if loader is None:
            raise LayerwiseError("give prepare a DataLoader, or example=, what one rank calls the model with")
        batch = first_batch(loader, accelerator)
        example = dict(batch) if isinstance(batch, Mapping) else batch[0] if isinstance(batch, tuple | list) else batch
    if accelerator.device_placement:  # the model goes where its example is
        example = send_to_device(example, accelerator.device)
    made = prepare_model(accelerator, model, example, **keywords)
    for one in others:
        if isinstance(one, Optimizer):
            if one.state:
                raise LayerwiseError("the optimizer has stepped before prepare: make a new one")
            build(one, made)
    return (made, *(accelerator.prepare(one) for one in others))


def prepare_model(
    accelerator: Accelerator, model: nn.Module, example: ExampleInputs, **keywords: Unpack[Keywords]
) -> ParallelModule:
    """Returns the parallel module, which the accelerator takes for one that it has prepared."""
    if accelerator.distributed_type not in PLAIN:
        kind = accelerator.distributed_type.value
        raise LayerwiseError(
            f"Accelerate is set up for {kind}, which splits the model in its own way: leave that out, as layerwise "
            "splits it"
        )
    if accelerator.mixed_precision not in AUTOCAST:
        raise LayerwiseError(f"mixed precision {accelerator.mixed_precision!r} is not planned: give 'bf16' or 'fp16'")
    if keywords.get("options", DEFAULT).io is not None or "autocast" in keywords:
        raise LayerwiseError(
            "Accelerate feeds each rank its own samples, and says itself what is mixed: leave out autocast= and "
            "ParallelOptions' io"
        )
    keywords["autocast"] = AUTOCAST[accelerator.mixed_precision]
    with random_state_kept(accelerator.device):
        made = parallelize(model, example, **keywords)
    if of(made).plan.shares:
        raise LayerwiseError(
            "Accelerate feeds every rank equally many samples, but unequal devices have unequal shares: plan "
            "for equal ones with ParallelOptions(profile=...), the profile of the slowest"
        )
    if of(made).comm.size != accelerator.num_processes:
        raise LayerwiseError(
            f"there are {made.comm.size} ranks, and Accelerate has {accelerator.num_processes}: without GPUs it needs "
            "Accelerator(cpu=True)"
        )
    # evaluation_mode leaves DistributedDataParallel out; what it marks is not wrapped by a later `prepare`.
    accelerator.prepare_model(made, device_placement=False, evaluation_mode=True)
    return made


def first_batch(loader: DataLoader[Any], accelerator: Accelerator) -> Any:
    """Returns a batch such as the loader's on one process, without reading the loader, prepared or not."""
    sampler, processes = getattr(loader, "batch_sampler", None), accelerator.num_processes
    size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None) or 1
    of_all = getattr(loader, "total_batch_size", size if accelerator.split_batches else size * processes)
    with random_state_kept(accelerator.device):
        return next(iter(DataLoader(loader.dataset, max(1, of_all // processes), collate_fn=loader.collate_fn)))
