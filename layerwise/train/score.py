"""TaskObjective: the loss of a task's batches; Score: of held-out samples. Outputs never leave their rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor, nn

from layerwise.config import Config
from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.importers.load import load_network, planned_call
from layerwise.importers.torch.read.arguments import tensors
from layerwise.importers.with_loss import parted
from layerwise.run.execute.autograd import sum_of_losses
from layerwise.run.load import build_module
from layerwise.run.outputs import without_classes
from layerwise.run.parallel import ParallelModule, of
from layerwise.train.data import Data
from layerwise.train.sources import Batch, NumberedSamples, read
from layerwise.train.task import TrainingTask, task

# the module's arguments; the target, if the loss is still to be computed
Fed = tuple[tuple[Tensor, ...], Tensor | None]


def cross_entropy(out: Tensor, target: Tensor) -> Tensor:
    """Returns the mean over samples and positions, at least in float32; dimension 1 is the classes."""
    wide = out.float() if out.dtype in (torch.bfloat16, torch.float16) else out
    return nn.functional.cross_entropy(wide, target)


@dataclass(frozen=True, slots=True)
class TaskObjective:
    """The network's own loss, or the cross-entropy of its outputs, for some samples."""

    module: ParallelModule
    task: TrainingTask
    samples: NumberedSamples

    def __post_init__(self) -> None:
        """Raises LayerwiseError if a rank's box of the output lacks some classes, so that it has no loss."""
        if of(self.module).plan.io != "boxes" or self.task.has_loss:
            return
        shape = of(self.module).layer_graph.layers[-1].specs[0].shape
        if any(box is not None and box.shape[1] != shape[1] for box in of(self.module).rank_schedule.sinks[0]):
            raise LayerwiseError(
                f"the plan splits dimension 1 of the output, but the loss needs all {shape[1]} classes together: end "
                "the model in its loss (--loss ce), or search with --io free"
            )

    @property
    def summed(self) -> bool:
        """True if the model's own loss is one of PyTorch's that sums."""
        return self.task.loss is not None and self.task.loss.reduction == "sum"

    def read(self, numbers: Tensor) -> Fed:
        """Returns this rank's samples of the batch of these numbers, or its boxes of it, on its device."""
        module = self.module
        inputs_read, target = full_or_boxes(module, self.task, self.samples, numbers[of(module).share(len(numbers))])
        inputs, left = self.task.feed(inputs_read, target, of(module).runtime_options.dtype)
        return tuple(x.to(of(module).device) for x in inputs), None if left is None else left.to(of(module).device)

    def loss(self, local: Fed, batch: int) -> Tensor:
        """Returns the loss. Raises LayerwiseError if the network does not accept a batch of this size."""
        try:
            return self._loss(*local, batch)
        except LayerwiseError:
            raise
        except ValueError as error:  # raised by PyTorch when the model itself runs: batch norm of one value
            raise LayerwiseError(
                f"the model does not accept a batch of {batch}: {' '.join(str(error).split())}"
            ) from error

    def _loss(self, inputs: tuple[Tensor, ...], target: Tensor | None, batch: int) -> Tensor:
        outputs = tensors(self.module(*inputs, batch=batch))
        if target is None:
            return outputs[self.task.answer].mean()
        if of(self.module).plan.io == "boxes":
            return self._loss_of_boxes(outputs[0], target)
        return torch.stack([cross_entropy(out, target) for out in outputs]).sum()

    def _loss_of_boxes(self, out: Tensor, target: Tensor) -> Tensor:
        """Returns the mean over the positions of all ranks' boxes of the output, on every rank."""
        module = self.module
        total = prod(of(module).layer_graph.layers[-1].specs[0].shape)
        local = cross_entropy(out, target) * (out.numel() / total) if out.numel() else out.sum()
        # All ranks need one type, and those without a box do not know the loss's type for 16 bits.
        return sum_of_losses(local.to(torch.promote_types(of(module).dtype, torch.float32)), of(module).comm)


@contextmanager
def evaluating(module: ParallelModule) -> Iterator[None]:
    """Returns a context in which all of the module is in evaluation mode, without gradients."""
    training, modes = module.training, [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(training)  # the model's own method may do more than set modes
        for m, mode in modes:
            m.training = mode


def full_or_boxes(module: ParallelModule, task: TrainingTask, samples: NumberedSamples, numbers: Tensor) -> Batch:
    """Reads what this rank needs of the samples that it shares in (`ParallelModule.share`): all of it, or its boxes."""
    if of(module).plan.io != "boxes":
        return samples.batch(numbers)
    boxes = list(of(module).read_boxes().values())
    if task.target is not None:
        boxes.append(boxes.pop(task.slot))
    else:
        boxes.append(target_box(module))
    return read(samples, numbers, *boxes)


def target_box(module: ParallelModule) -> Box:
    """Returns this rank's box of a target of classes, by its box of the output; empty if it has none."""
    (box,) = of(module).output_boxes()
    return without_classes(box or Box.full((0,) * len(of(module).layer_graph.layers[-1].specs[0].shape)))


@dataclass(frozen=True, slots=True)
class Score:
    """Counts of samples, or of their positions, by class: (classes,) each."""

    correct: Tensor  # of the class, and predicted as it
    actual: Tensor  # of the class
    predicted: Tensor  # predicted as the class

    @property
    def accuracy(self) -> float:
        """Returns the fraction that is predicted right."""
        return int(self.correct.sum()) / int(self.actual.sum())

    @property
    def dice(self) -> tuple[float | None, ...]:
        """Returns each class's Dice score over all held-out samples; None if it neither occurs nor is predicted."""
        both = (self.actual + self.predicted).tolist()
        return tuple(2 * correct / of if of else None for correct, of in zip(self.correct.tolist(), both, strict=True))


def evaluate(module: ParallelModule, data: Data) -> Score | None:
    """Returns the score of held-out samples; None if there are none, or the model returns only its loss.

    The last batch is padded to the plan's size with samples that do not count. Every rank must call this.
    """
    training_task, held_out = data.task, data.held_out
    if held_out is None or training_task.has_loss:
        return None
    counts = torch.zeros(3, training_task.classes, dtype=torch.float64, device=of(module).device)
    gathered = of(module).plan.io == "free"  # every rank then has the full output
    with evaluating(module):
        for first in range(0, held_out.count, of(module).plan.batch):
            numbers = torch.arange(first, first + of(module).plan.batch)[of(module).share()]
            real = numbers < held_out.count
            inputs_read, target = full_or_boxes(module, training_task, held_out, torch.where(real, numbers, 0))
            target[~real[_target_samples(module)]] = -1
            inputs, left = training_task.feed(inputs_read, target, of(module).runtime_options.dtype)
            assert left is not None
            out = tensors(module(*(x.to(of(module).device) for x in inputs)))[0]
            if not gathered or of(module).comm.rank == 0:
                counts += _counted(out, left.to(of(module).device), training_task)
    if of(module).comm.size > 1:
        of(module).comm.all_reduce(counts, tuple(range(of(module).comm.size)), "io", "held-out counts").wait()
    return Score(*counts.cpu().long().unbind())


def held_out_loss(module: ParallelModule, data: Data) -> float | None:
    """Returns the mean of the model's own loss over held-out batches; None without such a loss or batch."""
    training_task, held_out, size = data.task, data.held_out, of(module).plan.batch
    if held_out is None or not training_task.has_loss or held_out.count < size:
        return None
    objective, count = TaskObjective(module, training_task, held_out), held_out.count // size
    batches = [torch.arange(i * size, (i + 1) * size) for i in range(count)]
    with evaluating(module):
        loss = sum(float(objective.loss(objective.read(numbers), size)) for numbers in batches)
    share = of(module).share(size)
    weight = 1.0 if objective.summed or of(module).plan.io != "sample" else (share.stop - share.start) / size
    everyone: list[float] = of(module).comm.all_gather_object(loss * weight)
    total = everyone[0] if of(module).plan.io != "sample" else sum(everyone)
    return total / count


def predicting(module: ParallelModule, data: Data) -> tuple[ParallelModule, Data] | None:
    """Returns a network with a named loss (`unet3d:64+dice`) without that loss, as it is trained and split, and its
    data.

    Returns None for other networks. Every rank must call this.
    """
    plan, (model, loss) = of(module).plan, parted(of(module).plan.model)
    if loss is None:
        return None
    network = load_network(*planned_call(model, None, plan.batch, plan.provenance))
    graph = plan.layers(network.graph.rebatch(plan.batch))
    strategy = {layer.name: plan.strategy[layer.name] for layer in graph.inner}
    for name in graph.layers[-1].inputs:
        strategy[name] = _of_all_classes(strategy[name])
    without = replace(plan, model=model, digest=graph.digest, strategy=strategy, predicted={}, predicted_layers={})
    if plan.io == "free":
        without = replace(without, io="boxes")  # outputs then stay where they are
    predictor = build_module(without, network, of(module).comm, replace(of(module).runtime_options, compile=None))
    predictor.load_state_dict(of(module).full_state_dict())
    return predictor, replace(data, task=task(graph))


def _of_all_classes(config: Config) -> Config:
    """Returns the config with classes unsplit, as a predicted class depends on all of them."""
    return replace(config, degrees=tuple((label, d) for label, d in config.degrees if label not in ("c", "k")))


def _target_samples(module: ParallelModule) -> slice:
    """Returns, among the samples that this rank shares in, those of its target."""
    return target_box(module).slices()[0] if of(module).plan.io == "boxes" else slice(None)


def _counted(out: Tensor, target: Tensor, training_task: TrainingTask) -> Tensor:
    """Returns (3, classes): counts of right, actual and predicted ones. A target of -1 does not count."""
    if not target.numel():
        return torch.zeros(3, training_task.classes, dtype=torch.float64, device=out.device)
    counts = target >= 0
    predicted, target = out.argmax(1)[counts], target[counts]
    each = (target[predicted == target], target, predicted)
    return torch.stack([torch.bincount(labels, minlength=training_task.classes) for labels in each]).double()
