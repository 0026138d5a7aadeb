"""The same training four ways, on real images: all learn the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.usability.__main__ import WAYS, measured, saved
from tests.usability.images import images, keep
from tests.usability.launch import launch

RANKS = 2
WHOLE_BATCH = ("one_device", "model_parallel", "fit")  # are given the samples of all ranks
SAMPLES = {"digits": 1792, "mnist": 5000}
RUNS = {"digits": ("digits", 64), "mnist": ("mnist", 64), "one batch": ("digits", 1792)}  # data set, samples a step


def network(side: int) -> nn.Sequential:
    """The scripts'."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * side * side, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


Results = dict[str, dict[str, tuple[float, float]]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Loss and accuracy over all images, of the whole model that each script has saved, by run and script."""
    folder = tmp_path_factory.mktemp("usability")
    for name in SAMPLES:
        keep(name, folder)
    results: Results = {run: {} for run in RUNS}
    for way in ("one_device", *WAYS):
        ranks = 1 if way == "one_device" else RANKS
        parts = 1 if way in WHOLE_BATCH else RANKS
        files = {run: folder / f"{way}, {run}.pt" for run in RUNS}
        launch(way, ranks, [(data, str(n // parts), str(files[run])) for run, (data, n) in RUNS.items()], folder)
        for run, (data, _) in RUNS.items():
            results[run][way] = score(torch.load(files[run], weights_only=True), data)
    return results


def score(state: dict[str, Tensor], data: str) -> tuple[float, float]:
    """Loss and accuracy of a whole model's state dict."""
    x, y = images(data).tensors
    model = network(x.shape[-1] // 4)
    model.load_state_dict(state)
    with torch.no_grad():
        out = model(x)
    return nn.functional.cross_entropy(out, y).item(), (out.argmax(1) == y).float().mean().item()


@pytest.mark.parametrize("name", SAMPLES)
def test_all_ways_train_to_the_same_loss(name: str, trained: Results) -> None:
    """By hand, model parallelism sees the very same samples in a step; the others shuffle their own."""
    loss, accuracy = trained[name]["one_device"]
    assert accuracy > 0.9
    for way in WAYS:
        other, right = trained[name][way]
        assert other == pytest.approx(loss, rel=0.02 if way == "model_parallel" else 0.25), way
        assert right == pytest.approx(accuracy, abs=0.03), way


def test_all_ways_are_exact(trained: Results) -> None:
    """With all samples in one batch their order does not matter: the losses are equal."""
    loss, _ = trained["one batch"]["one_device"]
    for way in WAYS:
        assert trained["one batch"][way][0] == pytest.approx(loss, rel=1e-5), way


def test_one_call_is_the_least() -> None:
    found = measured()
    assert saved(found, "ddp", "effort") > 0.4
    assert saved(found, "ddp", "lines") > 0.4
    assert saved(found, "model_parallel", "lines") > 0.85
    assert saved(found, "model_parallel", "effort") > 0.97
