"""fit: trains a model on all ranks, for those who have no loop of their own; the numbers are those of one device."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from layerwise import checkpoint as checkpoints
from layerwise.api.arguments import at_least_1, check_autocast
from layerwise.api.data.evaluation import Metric, evaluate
from layerwise.api.data.feed import Feed, feed
from layerwise.api.data.split import seat
from layerwise.api.loop import losses
from layerwise.api.loop.guards import written_back
from layerwise.api.loop.optimizers import Scheduling, Wanted, build, planned
from layerwise.api.loop.optimizers import check as check_optimizer
from layerwise.api.parallelize import parallelize
from layerwise.api.planning.source import Model
from layerwise.cli import console, progress_bar
from layerwise.comm.start import default_device
from layerwise.errors import LayerwiseError
from layerwise.plan import nearest
from layerwise.run.parallel import ParallelModule
from layerwise.train.data import order
from layerwise.train.loop import least

BATCH = 32  # samples of all ranks together, by default


@dataclass(frozen=True, slots=True)
class Epoch:
    """One pass over the data."""

    number: int  # from 1
    loss: float  # the mean over its samples
    seconds: float  # of the slowest rank
    samples: int
    held_out: Mapping[str, float]  # loss and metrics over the held-out samples, by name

    def line(self, of: int) -> str:
        """`epoch 2/10  loss 0.312  held out: accuracy 0.91, loss 0.3  5,120 samples/s`."""
        results = ", ".join(f"{name} {value:.4g}" for name, value in self.held_out.items())
        rate = f"{self.samples / max(self.seconds, 1e-9):,.0f} samples/s"
        parts = [f"epoch {self.number}/{of}", f"loss {self.loss:.6g}", f"held out: {results}" if results else "", rate]
        return "  ".join(part for part in parts if part)


@dataclass(slots=True)
class Fitted:
    """The parallel module, trained, its optimizer, and what each epoch came to (those of this call)."""

    module: ParallelModule
    optimizer: Optimizer
    history: list[Epoch] = field(default_factory=list)

    def state_dict(self) -> dict[str, Tensor]:
        """The whole model's; every rank calls this."""
        return self.module.full_state_dict()


def fit(
    model: Model | ParallelModule,
    data: object,
    loss: Metric,
    optimizer: Wanted,
    *,
    epochs: int = 1,
    batch: int | None = None,
    held_out: object = None,
    metrics: Mapping[str, Metric] | None = None,
    shuffle: bool | None = None,
    scheduler: Scheduling | None = None,
    clip_norm: float | None = None,
    autocast: torch.dtype | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    resume: bool = False,
    seed: int = 0,
    progress: bool = True,
    **how: Any,
) -> Fitted:
    """Trains `model` for `epochs` passes over `data`, on the ranks that torchrun started, or on one device.

        fitted = layerwise.fit(model, (x, y), nn.CrossEntropyLoss(), "adam", epochs=5, held_out=(x_test, y_test))

    data, held_out: (inputs, targets) tensors, a map-style Dataset of (input, target), or a DataLoader (its data set,
    batch size, shuffling, workers and collate function are used); all ranks give the same. loss: of outputs and
    targets, for losses that are a mean over samples: class weights, and targets that the loss ignores, are refused.
    optimizer: "sgd", "momentum", "adam", "adamw"; a function of the parameters; or one over the model's parameters,
    which then has the parallel module's in their place. scheduler: the optimizer's, or a function of it; it steps once
    an epoch. batch: samples of all ranks together (default: the loader's, else 32). metrics: means over samples, by
    name; with accuracy where outputs are scores of classes, they come after every epoch. autocast: torch.bfloat16 for
    mixed precision, which is planned, and in which model and loss are computed. checkpoint: a folder that all
    ranks share, written after every epoch; resume goes on from it, also on another number of ranks. how: as
    `parallelize` takes it.

    The order of the samples depends on `seed` and the epoch alone, so losses and weights do not depend on the number
    of ranks. No sample is left out: what remains joins the last batch where it is less than half a batch. At the end
    a model that is an nn.Module with values has the trained ones. LayerwiseError for data that does not fit.
    """
    losses.check(loss)
    at_least_1("epochs", epochs)
    check_optimizer(optimizer, scheduler)
    _check_keywords(model, how)
    check_autocast(autocast)
    if autocast == torch.float16:
        raise LayerwiseError(
            "fit scales no losses, as float16 needs: take autocast=torch.bfloat16, or a loop of your own"
        )
    if resume and checkpoint is None:
        raise LayerwiseError("resume=True needs checkpoint=FOLDER")
    train = feed(data, "data")
    held = None if held_out is None else feed(held_out, "held_out")
    if held is not None and held.count < 1:
        raise LayerwiseError("held_out has no samples: leave it out, or give some")
    for one in (train, held):
        if one is not None and one.target is not None:
            losses.check_targets(loss, one.target, one.name)
    module = _module(model, train, batch, planned(optimizer), seed, autocast, how)
    made = build(optimizer, model, module)
    schedule = scheduler if scheduler is None or isinstance(scheduler, LRScheduler) else scheduler(made)
    fitted, said = Fitted(module, made), module.comm.rank == 0 and progress
    facts = {"samples": train.count, "batch": module.plan.batch, "seed": seed}
    resumed = checkpoints.resume(checkpoint, module, made, facts) if resume and checkpoint is not None else None
    done = 0 if resumed is None else int(resumed[1]["epochs"])
    if resumed is not None and schedule is not None:
        schedule.load_state_dict(resumed[1]["scheduler"])
    for number in range(done, epochs):
        cuts = cut(train, module, seed, number, train.shuffle is not False if shuffle is None else shuffle)
        value, seconds = _epoch(module, made, train, cuts, loss, clip_norm, autocast, quiet=not said)
        if schedule is not None:
            schedule.step()
        with _within(module, autocast):
            results = {} if held is None else evaluate(module, held, loss, metrics or {})
        epoch = Epoch(number + 1, value, seconds, sum(map(len, cuts)), results)
        fitted.history.append(epoch)
        if said:
            console().print(epoch.line(epochs), soft_wrap=True)
        if checkpoint is not None:
            state = {} if schedule is None else {"scheduler": schedule.state_dict()}
            checkpoints.save(checkpoint, module, made, {"epochs": number + 1, **facts, **state})
    if isinstance(model, nn.Module) and model is not module and not any(p.is_meta for p in model.parameters()):
        model.load_state_dict(fitted.state_dict())
        written_back(model)
    return fitted


def _within(module: ParallelModule, autocast: torch.dtype | None) -> AbstractContextManager[object]:
    return nullcontext() if autocast is None else torch.autocast(module.device.type, autocast)


def _module(
    model: Model | ParallelModule,
    train: Feed,
    batch: int | None,
    optimizer: str,
    seed: int,
    autocast: torch.dtype | None,
    how: Mapping[str, Any],
) -> ParallelModule:
    if isinstance(model, ParallelModule):
        if batch not in (None, model.plan.batch):
            raise LayerwiseError(
                f"the model is planned for batches of {model.plan.batch}, not {batch}: leave batch= out"
            )
        return model
    ranks = how["comm"].size if how.get("comm") is not None else seat()[1]
    if train.count < ranks:
        raise LayerwiseError(f"the data set has {train.count} samples, too few for {ranks} ranks: start fewer")
    if batch is not None:
        at_least_1("batch", batch)
    whole = batch if batch is not None else (train.batch or BATCH) * (ranks if train.per_rank else 1)
    ((examples, _),) = train.batches([range(min(2, train.count))])
    # The data is loaded to the CPU; where there are GPUs, this rank's computes.
    device = default_device(int(os.environ.get("LOCAL_RANK", "0")))
    inputs, whole = tuple(x.to(device) for x in examples), min(whole, train.count)
    return parallelize(model, inputs, batch=whole, optimizer=optimizer, seed=seed, autocast=autocast, **how)


def _check_keywords(model: object, how: Mapping[str, Any]) -> None:
    """LayerwiseError for what parallelize does not take, and for all of it where the model is parallel already."""
    known = set(signature(parallelize).parameters) - {"model", "example_inputs", "held_out"}
    for name in how:
        if name in known and isinstance(model, ParallelModule):
            raise LayerwiseError(
                f"{name}= says how to make a model parallel, but this one is already: give {name}= to the call of "
                "parallelize that made it"
            )
        if name not in known:
            raise LayerwiseError(
                f"fit has no argument {name!r}{nearest(name, known)}, and parallelize has none of that name, either"
            )


def cut(train: Feed, module: ParallelModule, seed: int, epoch: int, shuffle: bool) -> list[Tensor]:
    """The samples of every batch of an epoch.

    A last batch of less than half a batch joins the one before: so all ranks have a part of it, whatever their number.
    """
    count, size = train.count, module.plan.batch
    numbers = order(count, seed, epoch) if shuffle else torch.arange(count)
    batches = [numbers[first : first + size] for first in range(0, count, size)]
    left = count % size
    if left and train.drop_last:
        return batches[:-1]
    if left and left < max(size / 2, least(module.plan)) and len(batches) > 1:
        batches[-2:] = [torch.cat(batches[-2:])]
    return batches


def _epoch(
    module: ParallelModule,
    optimizer: Optimizer,
    train: Feed,
    cuts: list[Tensor],
    loss: Metric,
    clip_norm: float | None,
    autocast: torch.dtype | None,
    *,
    quiet: bool,
) -> tuple[float, float]:
    """The mean loss over all samples, and the seconds of the slowest rank."""
    module.train()
    mine = [numbers[module.share(len(numbers))].tolist() for numbers in cuts]
    started, total = time.perf_counter(), torch.zeros((), dtype=torch.float64)
    with progress_bar("training", quiet=quiet) as bar:
        for i, (numbers, (inputs, target)) in enumerate(zip(cuts, train.batches(mine), strict=True)):
            optimizer.zero_grad()
            losses.check_targets(loss, target, train.name)
            with _within(module, autocast):
                value = loss(module(*inputs, batch=len(numbers)), target.to(module.device))
            value.backward()  # type: ignore[no-untyped-call]
            if clip_norm is not None:
                module.clip_grad_norm_(clip_norm)
            optimizer.step()
            total += value.detach().double().cpu() * len(mine[i])
            if bar is not None:
                bar(i + 1, len(cuts))
    everyone = module.comm.all_gather_object([float(total), time.perf_counter() - started])
    sums = everyone[:1] if module.io == "free" else everyone
    return sum(t for t, _ in sums) / sum(map(len, cuts)), max(s for _, s in everyone)
