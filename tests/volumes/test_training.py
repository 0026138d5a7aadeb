"""`layerwise.run` on volumes: crops of a brain by boxes, the loss taken box by box, and other ranks that go on."""

import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from layerwise.models import find

from layerwise import checkpoint
from layerwise.comm.base import Comm
from layerwise.comm.solo import SoloComm
from layerwise.errors import LayerwiseError
from layerwise.examples import brain as brain_data
from layerwise.geometry import Box
from layerwise.graph.fuse import fuse
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.load import Network, network_of
from layerwise.importers.with_loss import with_loss
from layerwise.plan import Plan
from layerwise.run.load import load
from layerwise.run.parallel import ParallelModule
from layerwise.train import score
from layerwise.train.data import Data, load_data
from layerwise.train.loop import Settings, Trainer, sampler
from layerwise.train.report import KINDS, Result
from layerwise.train.score import Score, TaskObjective, evaluate, held_out_loss, predicting
from tests.comm.thread import run_threads
from tests.run.plans import Case, case, random_plan

pytestmark = pytest.mark.usefixtures("models_traced_once")


@pytest.fixture
def brain(monkeypatch: pytest.MonkeyPatch) -> tuple[Case, Data]:
    """A small one, and a U-Net for crops of 16 voxels a side."""
    rng = np.random.default_rng(0)
    volume = rng.normal(size=(1, 48, 20, 17)).astype(np.float32)
    classes = (volume[0] > 0).astype(np.int64) + (volume[0] > 1)
    monkeypatch.setattr(brain_data, "read_brain", lambda: (volume, classes))
    monkeypatch.setattr(brain_data, "HELD_OUT", 3)
    given = small_unet()
    return given, load_data("mni152", given.graph)


@cache
def small_unet() -> Case:
    torch.manual_seed(0)
    return case(find("unet3d").build(width=0.05), (1, 16, 16, 16), 2, steps=1)


def cut_somewhere(given: Case, ranks: int, seed: int) -> Plan:
    """Anything but channels, so that each rank has all classes of its box."""
    rng = random.Random(seed)
    return random_plan(
        given.graph, ranks, seed, "boxes", lambda configs: rng.choice([c for c in configs if c["c"] * c["k"] == 1])
    )


def test_a_box_is_that_of_the_crop(brain: tuple[Case, Data]) -> None:
    _, data = brain
    numbers = torch.tensor([3, 200])
    (image,), classes = data.train.batch(numbers)
    assert torch.equal(classes, (image[:, 0] > 0).long() + (image[:, 0] > 1))
    assert not torch.equal(image[0], image[1])
    of_image, of_classes = Box((1, 0, 2, 0, 5), (2, 1, 9, 16, 12)), Box((0, 3, 4, 0), (2, 5, 5, 16))
    assert isinstance(data.train, brain_data.Crops)
    (part,), classes_of_it = data.train.boxes(numbers, of_image, of_classes)
    assert torch.equal(part, image[of_image.slices()])
    assert torch.equal(classes_of_it, classes[of_classes.slices()])


def test_boxes_train_as_one_device_and_others_go_on(brain: tuple[Case, Data], tmp_path: Path) -> None:
    """Two ranks begin, three go on; the loss is taken of each box, and so is the score of what is held out."""
    given, data = brain

    def run(comm: Comm, first: int, steps: int, seed: int) -> tuple[list[float], Score]:
        plan = cut_somewhere(given, comm.size, seed)
        module = load(plan, given.network, comm=comm, dtype=torch.float64)
        optimizer = Settings("adam").build(module.parameters())
        if first:
            checkpoint.load(tmp_path, module, optimizer)
        objective = TaskObjective(module, data.task, data.train)
        trainer = Trainer(module, objective, sampler(plan, data.train.count), optimizer)
        losses = [step.loss for step in trainer.run(steps, first)]
        if comm.size == 2:
            checkpoint.save(tmp_path, module, optimizer, {})
        made = evaluate(module, data)
        assert made is not None
        if comm.size == 1:
            assert_counted(made, module, data)
        return losses, made

    losses, alone = run(SoloComm(), 0, 3, 0)
    begun = run_threads(2, lambda comm: run(comm, 0, 2, 1))
    ended = run_threads(3, lambda comm: run(comm, 2, 3, 2))
    for (before, _), (after, theirs) in zip(begun, ended[:2], strict=True):
        assert [*before, *after] == pytest.approx(losses, rel=1e-9)
        assert theirs.dice == alone.dice
        assert theirs.accuracy == alone.accuracy
    assert 0 < alone.accuracy < 1


def assert_counted(told: Score, trained: ParallelModule, data: Data) -> None:
    """Accuracy and the Dice of each class, by PyTorch, of all that is held out at once."""
    whole = find("unet3d").build(width=0.05).double().eval()
    whole.load_state_dict(trained.full_state_dict())
    assert data.held_out is not None
    (image,), classes = data.held_out.batch(torch.arange(data.held_out.count))
    with torch.no_grad():
        found = whole(image.double()).argmax(1)
    assert told.accuracy == pytest.approx(float((found == classes).double().mean()))
    pairs = [(found == i, classes == i) for i in range(3)]
    assert told.dice == pytest.approx(
        [2 * int((mine & its).sum()) / int(mine.sum() + its.sum()) for mine, its in pairs]
    )


def test_the_dice_of_a_class_that_is_nowhere_is_none() -> None:
    told = Score(*torch.tensor([[1, 0, 0], [2, 0, 1], [2, 0, 1]]))
    assert told.dice == (0.5, None, 0.0)
    result = Result(None, [], 0, told, ("air", "bone"), None, dict.fromkeys(KINDS), None)  # type: ignore[arg-type]
    assert result.dice == {"air": 0.5, "bone": None}


def test_crops_larger_than_the_brain_are_refused(brain: tuple[Case, Data]) -> None:
    higher = network_of(find("unet3d").build(width=0.05), (torch.empty(2, 1, 16, 24, 16),), 2, "test", trusted=True)
    with pytest.raises(LayerwiseError, match=r"32 x 20 x 17 voxels to train on, and the model takes more: x \(n=2"):
        load_data("mni152", higher.graph)


def test_a_loss_needs_all_classes(brain: tuple[Case, Data]) -> None:
    given, data = brain
    plan = random_plan(given.graph, 2, 0, "boxes", lambda configs: max(configs, key=lambda c: c["c"]))

    def run(comm: Comm) -> None:
        TaskObjective(load(plan, given.network, comm=comm, dtype=torch.float64), data.task, data.train)

    with pytest.raises(LayerwiseError, match="splits dimension 1 of the output, but the loss needs all 3"):
        run_threads(2, run)


@cache
def scored_unet(loss: str) -> tuple[Network, LayerGraph]:
    torch.manual_seed(0)
    model = find("unet3d").build(width=0.05).double()
    x = (torch.randn(2, 1, 16, 16, 16).double(),)
    network, target = with_loss(model, x, "unet3d", loss)
    made = network_of(network, (*x, target), 2, "scored", trusted=True)
    return made, fuse(made.graph)


@pytest.mark.parametrize(("io", "loss"), [("sample", "dice"), ("boxes", "dice+ce")])
def test_a_dice_loss_trains_as_one_device(
    brain: tuple[Case, Data], loss: str, io: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`unet3d+dice`: also where the loss is of the whole batch; the Dice of what is held out, too."""
    monkeypatch.setattr(score, "load_network", lambda own, *_: {"unet3d:16": brain[0].network}[own])
    network, graph = scored_unet(loss)
    assert "network" not in "".join(network.keys)
    data = load_data("mni152", graph)
    assert (data.task.has_loss, data.task.classes, data.task.target_sample) == (True, 3, (16, 16, 16))

    def run(comm: Comm) -> tuple[list[float], float | None, Score]:
        plan = replace(random_plan(graph, comm.size, 3, io), model=f"unet3d:16+{loss}")
        module = load(plan, network, comm=comm, dtype=torch.float64)
        settings = Settings("sgd", accumulate=2)
        steps = sampler(plan, data.train.count, settings.accumulate)
        objective = TaskObjective(module, data.task, data.train)
        trainer = Trainer(module, objective, steps, settings.build(module.parameters()))
        losses = [step.loss for step in trainer.run(2)]
        assert evaluate(module, data) is None
        told = evaluate(*predicted(module, data))
        assert told is not None
        if comm.size == 1:
            assert_counted(told, module, data)
        return losses, held_out_loss(module, data), told

    def predicted(module: ParallelModule, data: Data) -> tuple[ParallelModule, Data]:
        made = predicting(module, data)
        assert made is not None
        return made

    losses, held_out, alone = run(SoloComm())
    assert held_out is not None
    assert len(set(losses)) == 2
    for mine, value, theirs in run_threads(2, run):
        assert mine == pytest.approx(losses, rel=1e-9)
        assert value == pytest.approx(held_out, rel=1e-9)
        assert theirs.dice == alone.dice
