"""Score: what a trained network makes of what was held out. No output leaves the rank that has it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from layerwise.config import Config
from layerwise.importers.load import load_planned
from layerwise.importers.torch.read.structure import tensors
from layerwise.importers.with_loss import parted
from layerwise.run.load import build_module
from layerwise.run.outputs import without_classes
from layerwise.run.parallel import ParallelModule
from layerwise.train.data import Data
from layerwise.train.objective import TaskObjective, cross_entropy, filled_batches, full_or_boxes, target_box
from layerwise.train.task import TrainingTask, task


@dataclass(frozen=True, slots=True)
class Score:
    """Samples, or positions of them, by class: (classes,) each."""

    correct: Tensor  # that are of the class, and predicted to be
    actual: Tensor  # that are of the class
    predicted: Tensor  # that are predicted to be

    @property
    def accuracy(self) -> float:
        """The part of all that is predicted right."""
        return int(self.correct.sum()) / int(self.actual.sum())

    @property
    def dice(self) -> tuple[float | None, ...]:
        """The Dice score of each class over all that was held out; None of one that neither is there nor predicted."""
        both = (self.actual + self.predicted).tolist()
        return tuple(2 * correct / of if of else None for correct, of in zip(self.correct.tolist(), both, strict=True))


def evaluate(module: ParallelModule, data: Data) -> Score | None:
    """The score of held-out samples; None where there are none, or the model returns its loss and no prediction.

    The last batch is filled up to the plan's size with samples that do not count. Every rank calls this.
    """
    training_task, held_out = data.task, data.held_out
    if held_out is None or training_task.has_loss:
        return None
    counts = torch.zeros(3, training_task.classes, dtype=torch.float64, device=module.device)
    loss, training = module.loss, module.training
    gathered = module.io == "free" and loss is None  # then every rank has all of it
    module.loss = None
    module.eval()
    try:
        for numbers, real in filled_batches(module, held_out.count):
            inputs_read, target = full_or_boxes(module, training_task, held_out, numbers)
            target[~real[_target_samples(module)]] = -1
            inputs, left = training_task.feed(inputs_read, target, module.options.dtype)
            assert left is not None
            with torch.no_grad():
                out = tensors(module(*(x.to(module.device) for x in inputs)))[0]
            if not gathered or module.comm.rank == 0:
                counts += _counted(out, _local_target(module, left).to(module.device), training_task)
    finally:
        module.loss = loss
        module.train(training)
    if module.comm.size > 1:
        module.comm.all_reduce(counts, tuple(range(module.comm.size)), "io", "held-out counts").wait()
    return Score(*counts.cpu().long().unbind())


def held_out_loss(module: ParallelModule, data: Data) -> float | None:
    """The mean of the model's own loss over held-out batches; None where it has none, or no batch is held out."""
    training_task, held_out, size = data.task, data.held_out, module.plan.batch
    if held_out is None or not training_task.has_loss or held_out.count < size:
        return None
    objective, training, count = TaskObjective(module, training_task, held_out), module.training, held_out.count // size
    batches = [torch.arange(i * size, (i + 1) * size) for i in range(count)]
    module.eval()
    try:
        with torch.no_grad():
            loss = sum(float(objective.loss(local, size)) for local in objective.read(batches))
    finally:
        module.train(training)
    share = module.share(size)
    weight = 1.0 if objective.summed or module.io != "sample" else (share.stop - share.start) / size
    everyone: list[float] = module.comm.all_gather_object(loss * weight)
    total = everyone[0] if module.io != "sample" else sum(everyone)
    return total / count


def predicting(module: ParallelModule, data: Data) -> tuple[ParallelModule, Data] | None:
    """A network that has its loss by name (`unet3d:64+dice`) without it, as it is trained and split; and its data.

    None where the network is another. Every rank calls this.
    """
    plan, (model, loss) = module.plan, parted(module.plan.model)
    if loss is None:
        return None
    network = load_planned(model, None, plan.batch, plan.provenance.get("input_shape"))
    graph = plan.layers(network.graph.rebatch(plan.batch))
    strategy = {layer.name: plan.strategy[layer.name] for layer in graph.inner}
    for name in graph.layers[-1].inputs:
        strategy[name] = _of_all_classes(strategy[name])
    without = replace(plan, model=model, digest=graph.digest, strategy=strategy, predicted={}, predicted_layers={})
    loss_here = cross_entropy if plan.io != "sample" else None  # with which outputs stay where they are
    predictor = build_module(without, network, module.comm, replace(module.options, compile=None), loss=loss_here)
    predictor.load_state_dict(module.full_state_dict())
    return predictor, replace(data, task=task(graph))


def _of_all_classes(config: Config) -> Config:
    """A prediction's class follows from all of them."""
    return replace(config, degrees=tuple((label, d) for label, d in config.degrees if label not in ("c", "k")))


def _target_samples(module: ParallelModule) -> slice:
    """The samples, of those that this rank shares in, that its target is of."""
    return target_box(module).slices()[0] if module.io == "boxes" else slice(None)


def _local_target(module: ParallelModule, target: Tensor) -> Tensor:
    """The target of this rank's part of the output."""
    if module.io != "free":
        return target
    box = module.output_boxes()[0]
    return target[:0] if box is None else target[without_classes(box).slices()]


def _counted(out: Tensor, target: Tensor, training_task: TrainingTask) -> Tensor:
    """(3, classes): right, wanted and found ones. A target of -1 does not count."""
    if not target.numel():
        return torch.zeros(3, training_task.classes, dtype=torch.float64, device=out.device)
    counts = target >= 0
    predicted, target = out.argmax(1)[counts], target[counts]
    each = (target[predicted == target], target, predicted)
    return torch.stack([torch.bincount(labels, minlength=training_task.classes) for labels in each]).double()
