"""fit: trains a model on all ranks, for those who have no loop of their own; the numbers are those of one device."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from layerwise import checkpoint as checkpoints
from layerwise.api.arguments import ParallelOptions, check_autocast
from layerwise.api.evaluation import Metric, check_loss, check_targets, evaluate
from layerwise.api.feed import Feed, feed
from layerwise.api.optimizers import OptimizerLike, SchedulerLike, build, planned
from layerwise.api.optimizers import check as check_optimizer
from layerwise.api.parallelize import DEFAULT, Further, parallelize, plan_or_strategy
from layerwise.api.source import Model
from layerwise.api.world import ranks_here
from layerwise.arguments import Count, Natural, NotNegative, checked
from layerwise.checkpoint.signals import handled
from layerwise.cli import console
from layerwise.comm.guard import noted
from layerwise.comm.start import default_device
from layerwise.errors import LayerwiseError
from layerwise.progress import progress_bar
from layerwise.run.parallel import ParallelModule, of, restore
from layerwise.train.data import StepSampler
from layerwise.train.loop import Trainer, least
from layerwise.train.sources import Batch

BATCH = 32  # samples of all ranks together, by default


@dataclass(frozen=True, slots=True)
class Epoch:
    """One pass over the data."""

    number: int  # from 1
    loss: float  # the mean over its samples
    seconds: float  # of the slowest rank, in this call
    samples: int  # likewise
    held_out: Mapping[str, float]  # loss and metrics over the held-out samples, by name

    def line(self, of: int) -> str:
        """`epoch 2/10  loss 0.312  held out: accuracy 0.91, loss 0.3  5,120 samples/s`."""
        results = ", ".join(f"{name} {value:.4g}" for name, value in self.held_out.items())
        rate = f"{self.samples / max(self.seconds, 1e-9):,.0f} samples/s"
        parts = [f"epoch {self.number}/{of}", f"loss {self.loss:.6g}", f"held out: {results}" if results else "", rate]
        return "  ".join(part for part in parts if part)


@dataclass(slots=True)
class Fitted:
    """The model, trained, its optimizer, and what each epoch came to (those of this call)."""

    module: nn.Module
    optimizer: Optimizer
    history: list[Epoch] = field(default_factory=list)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the full model's state dict, on the CPU; every rank calls this."""
        if isinstance(self.module, ParallelModule):
            return of(self.module).full_state_dict()
        return {name: value.detach().cpu().clone() for name, value in self.module.state_dict().items()}


@checked
@handled(noted, signal.SIGUSR1)  # outside of the steps there is nothing to save
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
        checkpoint: A folder that all ranks share. It is written after every epoch, and where SIGUSR1 or SIGTERM asks
            for it; SIGTERM then ends the program with `checkpoint.STOPPED`.
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
    train = feed(data, "data", workers)
    evaluation = None if held_out is None else feed(held_out, "held_out", workers)
    if evaluation is not None and evaluation.count < 1:
        raise LayerwiseError("held_out has no samples: leave it out, or give some")
    for source in (train, evaluation):
        if source is not None and source.target is not None:
            check_targets(loss, source.target, source.name)
    plain = isinstance(model, nn.Module) and not any(p.is_meta for p in model.parameters())
    settings = replace(options, optimizer=planned(optimizer))
    module = _module(model, train, batch, settings, {"autocast": autocast, **keywords})
    built = build(optimizer, module)
    schedule = scheduler if scheduler is None or isinstance(scheduler, LRScheduler) else scheduler(built)
    objective = UserObjective(module, train, loss, autocast)
    trainer = Trainer(module, objective, _sampler(train, module, options.seed), built, clip_norm)
    each, done, saved = trainer.sampler.per_epoch, 0, -1
    facts: dict[str, str | int] = {"samples": train.count, "batch": of(module).plan.batch, "seed": options.seed}
    facts["steps an epoch"] = each
    if checkpoint is not None and resume:
        resumed = checkpoints.resume(checkpoint, module, built, facts)
        done = 0 if resumed is None else int(resumed[1]["steps"])
        if resumed is not None and schedule is not None:
            schedule.load_state_dict(resumed[1]["scheduler"])

    def save(steps: int) -> None:
        nonlocal saved
        if checkpoint is not None and steps != saved:
            saved, state = steps, {} if schedule is None else {"scheduler": schedule.state_dict()}
            checkpoints.save(checkpoint, module, built, {**facts, "steps": steps, **state})

    def end_if_asked(steps: int) -> None:
        """Saves if a signal has asked for it. Raises SystemExit if that is SIGTERM."""
        number = signals.received()
        if number is not None:
            save(steps)
        if number == signal.SIGTERM:
            sys.exit(checkpoints.STOPPED)

    fitted, printing = Fitted(module, built), of(module).comm.rank == 0 and options.verbose
    with checkpoints.SaveSignals(of(module).comm).taken(stop=checkpoint is not None) as signals:
        while done < epochs * each:
            first, done = done, (done // each + 1) * each
            loss_of, seconds, samples = _epoch(trainer, first, done, end_if_asked, quiet=not printing)
            if schedule is not None:
                schedule.step()
            results: dict[str, float] = {}
            if evaluation is not None:
                with objective.arithmetic():
                    results = evaluate(module, evaluation, loss, metrics or {}, partial(end_if_asked, done))
            epoch = Epoch(done // each, loss_of, seconds, samples, results)
            fitted.history.append(epoch)
            if printing:
                console().print(epoch.line(epochs), soft_wrap=True)
            save(done)
            end_if_asked(done)
    if plain:
        restore(module)
    return fitted


def _epoch(
    trainer: Trainer[Batch], first: int, end: int, after: Callable[[int], None], *, quiet: bool
) -> tuple[float, float, int]:
    """Takes steps `first` to `end`. Returns their loss, the seconds of the slowest rank, and their samples.

    after: called with the steps that are done, where all ranks have met.
    """
    began, loss, samples = time.perf_counter(), 0.0, 0
    with progress_bar("training", quiet=quiet) as bar:
        for step in trainer.run(end, first):
            loss, samples = loss + step.loss * step.samples, samples + step.samples
            if bar is not None:
                bar(step.number - first, end - first)
            if step.number == trainer.done < end:  # after the last the scheduler steps before anything is saved
                after(step.number)
    everyone: list[float] = of(trainer.module).comm.all_gather_object(time.perf_counter() - began)
    return loss / samples, max(everyone), samples


def _module(
    model: Model,
    train: Feed,
    batch: int | None,
    options: ParallelOptions,
    keywords: Mapping[str, Any],
) -> ParallelModule:
    ranks = ranks_here() if options.comm is None else options.comm.size
    if train.count < ranks:
        raise LayerwiseError(f"the data set has {train.count} samples, too few for {ranks} ranks: start fewer")
    if batch is None:
        plan, _ = plan_or_strategy(keywords.get("strategy"))
        batch = min(BATCH, train.count) if plan is None else None
    else:
        batch = min(batch, train.count)
    ((examples, _),) = train.batches([range(min(2, train.count))])
    # The data is loaded to the CPU; where there are GPUs, this rank's computes.
    device = default_device(int(os.environ.get("LOCAL_RANK", "0")))
    inputs = tuple(x.to(device) for x in examples)
    return parallelize(model, inputs, batch=batch, options=options, **keywords)


def _sampler(train: Feed, module: ParallelModule, seed: int) -> StepSampler:
    """Returns the sampler. A last batch of less than half joins the one before: so all ranks have a part of it."""
    size = of(module).plan.batch
    return StepSampler(train.count, size, seed=seed, join=max(-(-size // 2), least(of(module).plan)))


@dataclass(frozen=True, slots=True)
class UserObjective:
    """A user's loss of outputs and targets, a mean over samples."""

    module: ParallelModule
    train: Feed
    function: Metric
    autocast: torch.dtype | None = None
    summed: bool = False

    def read(self, batches: Sequence[Tensor]) -> Iterator[Batch]:
        """Yields this rank's samples of each batch."""
        local = [numbers[of(self.module).share(len(numbers))].tolist() for numbers in batches]
        for inputs, target in self.train.batches(local):
            check_targets(self.function, target, self.train.name)
            yield inputs, target.to(of(self.module).device)

    def loss(self, local: Batch, batch: int) -> Tensor:
        """Returns the function's value."""
        inputs, target = local
        with self.arithmetic():
            value = self.function(self.module(*inputs, batch=batch), target)
        if not isinstance(value, Tensor):
            raise LayerwiseError(f"loss gave a {type(value).__name__}; it must give a tensor, the mean over samples")
        return value

    def arithmetic(self) -> AbstractContextManager[object]:
        """Returns the context that model and loss are computed in: autocast's, or none."""
        return nullcontext() if self.autocast is None else torch.autocast(of(self.module).device.type, self.autocast)
