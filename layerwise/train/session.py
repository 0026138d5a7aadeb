"""Session: one run of the command, from loading the plan's network to its result and the memory it took."""

from __future__ import annotations

import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Literal, NoReturn

import torch

from layerwise import checkpoint
from layerwise.comm.base import Comm, TrafficKind
from layerwise.comm.solo import SoloComm
from layerwise.comm.together import alone
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.importers.load import Network, load_network, planned_call
from layerwise.plan import Plan
from layerwise.run.load import build_module
from layerwise.run.options import RuntimeOptions, plan_digest
from layerwise.run.parallel import of
from layerwise.tensorfile import fingerprint, weights_file
from layerwise.trace import Trace
from layerwise.train.compare import Difference, FinalState, arithmetic, difference, final_state
from layerwise.train.data import load_data
from layerwise.train.loop import Settings, Step, Trainer, sampler
from layerwise.train.report import KINDS, Result
from layerwise.train.score import TaskObjective, evaluate, held_out_loss, predicting
from layerwise.version import __version__

PER_EPOCH = "steps an epoch"
OnNan = Literal["stop", "ignore"]


class Session:
    """One run. Every rank makes one with the same arguments, and calls the same methods in order: resume, train,
    finish.
    """

    def __init__(
        self,
        plan: Plan,
        comm: Comm,
        options: RuntimeOptions,
        settings: Settings,
        *,
        data: str,
        model: str | None = None,
        weights: str | None = None,
        compare: bool = False,
        folder: str | None = None,
        every: int | None = None,
        on_nan: OnNan = "stop",
        trace: str | None = None,
    ) -> None:
        self.plan, self.comm, self.options, self.settings = plan, comm, options, settings
        self.folder, self.first, self.steps = folder, 0, list[Step]()
        self.signals, self.every, self.saved, self.on_nan = checkpoint.SaveSignals(comm), every, -1, on_nan
        self.stopped = False  # whether SIGTERM has ended the training
        self._trace_to, self._weights, self._compare = trace, weights, compare
        values = "" if weights is None else fingerprint(weights)
        facts = {"plan": plan_digest(plan), "layerwise": __version__, "torch": torch.__version__}
        comm.handshake(facts | {"the content of --weights": values})
        network = load_network(*planned_call(plan.model, model, plan.batch, plan.provenance), options.dtype)
        graph = fuse(network.graph) if plan.fused else network.graph
        self.data = load_data(data, graph, options.seed)
        self.sampler = sampler(plan, self.data.train.count, settings.accumulate, options.seed)
        comm.handshake({"data": self.data.fingerprint()[:12]})
        task = self.data.task
        if plan.io == "boxes" and not task.has_loss and (len(task.predictions) > 1 or task.positions > 1):
            raise LayerwiseError(
                f"the plan has io 'boxes', so no rank has full outputs, but {plan.model} has neither its own loss nor "
                "a single output (samples, classes, ...): end the model in a loss, or search with --io free"
            )
        self.trainer = self._trainer(comm, network)
        self.module = self.trainer.module
        if trace is not None:
            of(self.module).trace = Trace(device=comm.device)
        self._single = alone(comm, lambda: self._trainer(SoloComm(comm.device), network)) if compare else None

    def _trainer(self, comm: Comm, network: Network) -> Trainer:
        """Returns a new trainer for this network, at the beginning of its training."""
        module = build_module(
            self.plan,
            network,
            comm,
            self.options,
            weights=None if self._weights is None else weights_file(self._weights),
        )
        objective = TaskObjective(module, self.data.task, self.data.train)
        optimizer = self.settings.build(module.parameters())
        return Trainer(module, objective, self.sampler, optimizer, self.settings.clip)

    def _facts(self) -> dict[str, str | int]:
        """Returns the facts that must be the same to resume a checkpoint."""
        return {
            "data": self.data.name,
            "samples a step": self.sampler.batch * self.sampler.accumulate,
            "seed": self.options.seed,
            "optimizer": self.settings.optimizer_text(),
        }

    def resume(self) -> Path | None:
        """Resumes the last checkpoint; returns None if there is none. Raises LayerwiseError if it is of another
        training.
        """
        assert self.folder is not None
        otherwise = ", or start anew with --weights from layerwise export"
        resumed = checkpoint.resume(self.folder, self.module, self.trainer.optimizer, self._facts(), otherwise)
        if resumed is None:
            return None
        path, progress = resumed
        if self._compare:
            single = self._single
            alone(self.comm, lambda: checkpoint.load(path, single.module, single.optimizer) if single else None)
        self.first, here = int(progress["steps"]), self.sampler.per_epoch
        each = progress.get(PER_EPOCH, here)
        if each != here and self.first >= min(each, here):
            raise LayerwiseError(
                f"checkpoint {str(path)!r} was trained with {each} steps an epoch, but here there are {here}, as the "
                "last samples of an epoch are too few for one of the plans: resume with the same number of "
                f"ranks{otherwise}"
            )
        return path

    def train(self, steps: int) -> Iterator[Step]:
        """Yields each step up to the `steps`-th once its loss is known; ends early if `stopped`."""
        with self.signals.taken(stop=self.folder is not None):
            for step in self.trainer.run(steps, self.first, self.after):
                if self.on_nan == "stop" and not isfinite(step.loss):
                    self._stop(step.number, f"the loss is {step.loss}")
                self.steps.append(step)
                yield step
                if step.number == self.trainer.done and self._asked(step.number):
                    return
            if self.steps:
                self._save(steps)
                self._asked(steps)

    def after(self, done: int) -> None:
        """Saves after this step, if it is time."""
        if self.every and done % self.every == 0:
            self._save(done)

    def _asked(self, done: int) -> bool:
        """Saves if a signal has asked for it, as its sender may end the job next. True: the training ends."""
        number = self.signals.received()
        if number is not None:
            self._save(done)
        self.stopped = self.stopped or number == signal.SIGTERM
        return self.stopped

    def _save(self, done: int) -> None:
        if self.folder is None or done == self.saved:
            return
        if self.on_nan != "ignore":
            finite = all(bool(shard.tensor.isfinite().all()) for shard in of(self.module).shards() if shard.trainable)
            if not all(self.comm.all_gather_object(finite)):
                self._stop(done, "a parameter is no finite number")
        self.saved, progress = done, {"steps": done, PER_EPOCH: self.sampler.per_epoch, **self._facts()}
        checkpoint.save(self.folder, self.module, self.trainer.optimizer, progress)

    @property
    def latest(self) -> Path | None:
        """Returns the newest checkpoint, or None."""
        return None if self.folder is None else checkpoint.latest(self.folder)

    def _stop(self, done: int, why: str) -> NoReturn:
        """Raises LayerwiseError, the same on all ranks."""
        last = f"the last checkpoint is {self.latest}" if self.latest is not None else "there is no checkpoint"
        raise LayerwiseError(f"after step {done} {why}: stopped; {last}; try a smaller --lr, or --on-nan ignore")

    def finish(self) -> Result:
        """Returns accuracy, bytes, comparison and trace: the same on every rank, except the comparison, which rank 0
        has.
        """
        resident = max(self.comm.all_gather_object(peak_resident_bytes()))  # before the comparison's memory
        trace, of(self.module).trace = of(self.module).trace, None
        if trace is not None and self._trace_to is not None:
            trace.write(self._trace_to, self.comm)
        sent = self._sent()
        planned = final_state(self.module, [step.loss for step in self.steps]) if self._compare else None
        compare = None if planned is None else alone(self.comm, lambda: self._difference(planned))
        predicted = of(self.module).predicted_bytes(self.sampler.accumulate)
        lost = held_out_loss(self.module, self.data)
        score = evaluate(*(predicting(self.module, self.data) or (self.module, self.data)))
        return Result(
            self.plan, self.steps, self.first, score, self.data.classes, sent, predicted, compare, lost, resident
        )

    def _sent(self) -> dict[TrafficKind, float] | None:
        """Returns the bytes of a full step, of all ranks together."""
        ranks = self.comm.all_gather_object(self.trainer.sent)
        full = self.trainer.full
        return {kind: sum(rank.get(kind, 0) for rank in ranks) / full for kind in KINDS} if full else None

    def _difference(self, planned: FinalState) -> Difference:
        """Takes the same steps on one device, on rank 0."""
        assert self._single is not None
        losses = [step.loss for step in self._single.run(self.first + len(self.steps), self.first)]
        module = self._single.module
        single = final_state(module, losses)
        trained = {name for s in of(module).shards() if s.trainable for name in (s.name, *s.aliases)}
        return difference(single, planned, trained)

    def data_text(self) -> str:
        """`digits: 1,438 samples to train on, 359 held out`."""
        held_out = self.data.held_out
        text = f"{self.data.name}: {self.data.train.count:,} samples to train on"
        text += "" if held_out is None else f", {held_out.count:,} held out"
        left = self.sampler.left_out
        return text + (f"; the last {left} of an epoch are dropped, as they are too few for the plan" if left else "")

    def training_text(self, steps: int) -> str:
        """`170 steps (2 epochs of 85), sgd, float32 on cpu`."""
        each, batches = self.sampler.per_epoch, self.sampler.accumulate
        size = f" of {batches} batches" if batches > 1 else ""
        return (
            f"{steps} steps{size} ({steps / each:.3g} epochs of {each}), {self.settings.optimizer}, "
            f"{arithmetic(self.options)} on {self.comm.device.type}"
        )

    def notes(self) -> list[str]:
        """Returns notes on what was written, and on what the user should know."""
        notes = []
        if self.folder is not None and self.steps:
            notes.append(f"checkpoint written to {self.latest}")
        if self._trace_to is not None:
            notes.append(f"trace written to {self._trace_to}: open it in ui.perfetto.dev")
        if not self.steps:
            notes.append(f"nothing to do: the checkpoint already has {self.first} steps")
        if any(not abs(step.loss) < float("inf") for step in self.steps):
            notes.append("the loss is no longer finite: try a smaller --lr")
        return notes


MORE_MEMORY = "search for more GPUs, a smaller batch or other --dims, or use --checkpoint-activations"
ON_CPU = "DefaultCPUAllocator"  # torch's error on a CPU is a RuntimeError that names this


def peak_resident_bytes() -> int:
    """Returns the peak host memory of this process so far, PyTorch included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@contextmanager
def enough_memory(
    plan: Plan, rank: int, remedy: str = MORE_MEMORY, kind: type[LayerwiseError] = LayerwiseError
) -> Iterator[None]:
    """A context that turns torch's out-of-memory errors into one of this kind, with what to do."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and ON_CPU not in str(error):
            raise
        predicted = plan.predicted.get("memory_bytes")
        need = "" if predicted is None else f" (the plan predicts {predicted / 1e9:.3g} GB, beside PyTorch itself)"
        first = str(error).partition("\n")[0]
        raise kind(f"rank {rank} ran out of memory{need}: {remedy}; {type(error).__name__}: {first}") from error
