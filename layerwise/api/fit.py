"""fit: trains a model on all ranks, for those who have no loop of their own; the numbers are those of one device."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from layerwise import checkpoint as checkpoints
from layerwise.api.arguments import DEFAULT, ParallelOptions, check_autocast
from layerwise.api.evaluation import Metric, evaluate
from layerwise.api.feed import check_loss, feed, shuffled
from layerwise.api.optimizers import OptimizerLike, SchedulerLike, build, planned
from layerwise.api.optimizers import check as check_optimizer
from layerwise.api.parallelize import Further, parallelize, plan_or_strategy
from layerwise.api.source import Model
from layerwise.api.world import ranks_here
from layerwise.arguments import Count, Natural, NotNegative, checked
from layerwise.cli import console
from layerwise.comm.start import default_device
from layerwise.errors import LayerwiseError
from layerwise.progress import progress_bar
from layerwise.run.parallel import of, restore
from layerwise.train.loop import least

BATCH = 32  # samples of all ranks together, by default


@dataclass(frozen=True, slots=True)
class Epoch:
    """One pass over the data."""

    number: int  # from 1
    loss: float  # the mean over its samples
    seconds: float  # of the slowest rank
    held_out: Mapping[str, float]  # loss and metrics over the held-out samples, by name


@dataclass(frozen=True, slots=True)
class Fitted:
    """The model, trained, its optimizer, and what each epoch of this call came to."""

    module: nn.Module
    optimizer: Optimizer
    history: list[Epoch] = field(default_factory=list)


@checked
def fit(
    model: Model,
    data: object,
    loss: Metric,
    optimizer: OptimizerLike,
    *,
    epochs: Count = 1,
    batch: Count | None = None,
    held_out: object = None,
    metrics: Mapping[str, Metric] | None = None,
    workers: Natural = 0,
    scheduler: SchedulerLike | None = None,
    clip_norm: NotNegative | None = None,
    autocast: torch.dtype | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    resume: bool = False,
    options: ParallelOptions = DEFAULT,
    **keywords: Unpack[Further],
) -> Fitted:
    """Trains `model` for `epochs` passes over `data`, on the ranks that torchrun started, or on one device.

        fitted = layerwise.fit(model, (x, y), nn.CrossEntropyLoss(), "adam", epochs=5, held_out=(x_test, y_test))

    The samples are shuffled by `options.seed` and the epoch alone, so losses and weights do not depend on the number of
    ranks. No sample is left out: a rest of less than half a batch joins the last batch. At the end an nn.Module is
    plain again and has the trained values. A model of the meta device and one of a file stay parallel.

    Args:
        model: What `parallelize` takes; it makes the model parallel by itself.
        data: (inputs, targets) tensors, or a map-style Dataset of (input, target); all ranks give the same.
        loss: A function of outputs and targets that is a mean over samples. One with class weights or ignored targets
            is refused, because its value would depend on the number of ranks.
        optimizer: "sgd", "momentum", "adam" or "adamw"; a function of the parameters; or an optimizer of the model's
            parameters, which is given the parallel module's in their place.
        epochs: The passes over the data.
        batch: The samples of all ranks together. None: 32.
        held_out: Data to evaluate on after every epoch.
        metrics: Functions of outputs and targets that are means over samples, by name. Accuracy is there by itself
            where the outputs are scores of classes.
        workers: The processes that load samples; 0: this one does.
        scheduler: The optimizer's scheduler, or a function of the optimizer. It steps once an epoch.
        clip_norm: The largest norm that all gradients together may have.
        autocast: torch.bfloat16 for mixed precision, in which model and loss are computed.
        checkpoint: A folder that all ranks share. It is written after every epoch.
        resume: Whether to go on from the checkpoint, which may be another number of ranks'.
        options: Those of `parallelize`; the optimizer is known.
        keywords: The other arguments of `parallelize`: strategy, memory_limit, compile and device_mesh.

    Returns:
        The model, trained, its optimizer, and the result of each epoch.

    Raises:
        LayerwiseError: Data, loss or optimizer do not fit, or what `parallelize` raises.

    Examples:
        >>> import layerwise
        >>> x, quiet = torch.randn(64, 4), layerwise.ParallelOptions(verbose=False)
        >>> fitted = layerwise.fit(nn.Linear(4, 1), (x, x.sum(1, keepdim=True)), nn.MSELoss(), "sgd", options=quiet)
        >>> len(fitted.history)
        1
    """
    check_loss(loss)
    check_optimizer(optimizer, scheduler)
    check_autocast(autocast)
    if autocast == torch.float16:
        raise LayerwiseError(
            "fit scales no losses, as float16 needs: take autocast=torch.bfloat16, or a loop of your own"
        )
    if options.io == "boxes":
        raise LayerwiseError("fit feeds whole samples: leave out io=, or write the loop with BoxLoader")
    if resume and checkpoint is None:
        raise LayerwiseError("resume=True needs checkpoint=FOLDER")
    if checkpoint is not None and not resume and (saved := checkpoints.latest(checkpoint)) is not None:
        raise LayerwiseError(f"there is a checkpoint already, {saved}: go on from it with resume=True, or name another")
    train = feed(data, "data", loss, workers)
    evaluation = None if held_out is None else feed(held_out, "held_out", loss, workers)
    if evaluation is not None and not len(evaluation.dataset):
        raise LayerwiseError("held_out has no samples: leave it out, or give some")
    count, ranks = len(train.dataset), ranks_here() if options.comm is None else options.comm.size
    if count < ranks:
        raise LayerwiseError(f"the data set has {count} samples, too few for {ranks} ranks: start fewer")
    if batch is not None or plan_or_strategy(keywords.get("strategy"))[0] is None:
        batch = min(batch or BATCH, count)
    plain = isinstance(model, nn.Module) and not any(p.is_meta for p in model.parameters())
    # The data is loaded to the CPU; where there are GPUs, this rank's computes.
    device = default_device(int(os.environ.get("LOCAL_RANK", "0")))
    example = tuple(x.to(device) for x in train.example())
    settings = replace(options, optimizer=planned(optimizer))
    module = parallelize(model, example, batch=batch, autocast=autocast, options=settings, **keywords)
    comm, plan, device = of(module).comm, of(module).plan, of(module).device
    built = build(optimizer, module)
    schedule = scheduler if scheduler is None or isinstance(scheduler, LRScheduler) else scheduler(built)
    arithmetic = nullcontext() if autocast is None else torch.autocast(device.type, autocast)
    # A last batch of less than half joins the one before: so all ranks have a part of it.
    epoch_of = partial(shuffled, count, plan.batch, max(-(-plan.batch // 2), least(plan)), options.seed)
    facts = {"samples": count, "batch": plan.batch, "seed": options.seed, "steps an epoch": (each := len(epoch_of(0)))}
    resumed = checkpoints.resume(checkpoint, module, built, facts) if resume and checkpoint is not None else None
    done = 0
    if resumed is not None:
        path, progress = resumed
        done, within = divmod(int(progress["steps"]), each)
        if within or ("scheduler" in progress) != (schedule is not None):
            what = "within an epoch" if within else f"with{'out' * (schedule is not None)} a scheduler"
            raise LayerwiseError(f"checkpoint {path} was saved {what}, from which fit cannot go on: train anew")
        if schedule is not None:
            schedule.load_state_dict(progress["scheduler"])
    fitted, printing = Fitted(module, built), comm.rank == 0 and options.verbose
    for epoch in range(done, epochs):
        batches, began, total = epoch_of(epoch), time.perf_counter(), torch.zeros((), dtype=torch.float64)
        module.train()
        with progress_bar("training", quiet=not printing) as bar:
            for step, (inputs, target) in enumerate(train.batches(module, batches)):
                built.zero_grad()
                with arithmetic:
                    value = loss(module(*inputs, batch=len(batches[step])), target)
                if not isinstance(value, Tensor):
                    raise LayerwiseError(
                        f"loss gave a {type(value).__name__}; it must give a tensor, the mean over samples"
                    )
                value.backward()  # type: ignore[no-untyped-call]
                if clip_norm is not None:
                    of(module).clip_grad_norm_(clip_norm)
                built.step()
                total = total + value.detach().double() * len(target)
                if bar is not None:
                    bar(step + 1, len(batches))
        sums, seconds = zip(*comm.all_gather_object((float(total), time.perf_counter() - began)), strict=True)
        if schedule is not None:
            schedule.step()
        results: dict[str, float] = {}
        if evaluation is not None:
            with arithmetic:
                results = evaluate(module, evaluation, {**(metrics or {}), "loss": loss})
        mean = (sums[0] if plan.io != "sample" else sum(sums)) / count
        fitted.history.append(Epoch(epoch + 1, mean, max(seconds), results))
        if printing:
            found = ", ".join(f"{name} {value:.4g}" for name, value in results.items())
            found = f"held out: {found}  " if found else ""
            rate = f"{count / max(*seconds, 1e-9):,.0f} samples/s"
            console().print(f"epoch {epoch + 1}/{epochs}  loss {mean:.6g}  {found}{rate}", soft_wrap=True)
        if checkpoint is not None:
            state = {} if schedule is None else {"scheduler": schedule.state_dict()}
            checkpoints.save(checkpoint, module, built, {**facts, "steps": (epoch + 1) * each, **state})
    if plain:
        restore(module)
    return fitted
