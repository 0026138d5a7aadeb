"""Lightning with strategy="layerwise" on two ranks, against Lightning's own on one device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from layerwise.comm.solo import SoloComm
from layerwise.errors import LayerwiseError
from tests.comm.pool import run_ranks

L = pytest.importorskip("lightning", reason="Lightning is not installed")

from tests.integrations import lightning_ranks as cases  # noqa: E402 (needs Lightning)

RUN = "tests.integrations.lightning_ranks:run"


def alone(case: str, strategy: Any = "auto", folder: str = "") -> Any:
    return cases.run(SoloComm(), strategy, case, folder)


def apart(one: Any, other: Any) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


@pytest.mark.parametrize("strategy", [cases.SPLIT, cases.QUIET | {"strategy": "data"}], ids=["split", "data"])
def test_two_ranks_have_the_numbers_of_one_device(strategy: Any) -> None:
    numbers, state, tested, predicted, steps = alone("all")
    ranks = run_ranks(2, RUN, strategy, "all")
    for rank, (ours, weights, test, answers, ours_steps) in enumerate(ranks):
        assert ours == pytest.approx(numbers, rel=1e-9)
        assert apart(weights, state) <= 1e-9
        assert test == pytest.approx(tested, rel=1e-9)
        torch.testing.assert_close(answers, predicted[rank::2], rtol=1e-9, atol=1e-9)
        assert ours_steps == steps  # the batch that is tried leaves no trace


def test_one_device_has_the_numbers_of_one_device() -> None:
    numbers, state, *_ = alone("all")
    ours, weights, *_ = alone("all", cases.QUIET)
    assert ours == pytest.approx(numbers, rel=1e-9)
    assert apart(weights, state) <= 1e-9


def test_a_checkpoint_is_resumed_on_another_number_of_devices(tmp_path: Path) -> None:
    wanted = alone("resume")
    two, one = str(tmp_path / "two"), str(tmp_path / "one")
    run_ranks(2, RUN, cases.SPLIT, "save", two)
    assert apart(alone("resume", cases.QUIET, two), wanted) <= 1e-9
    assert apart(alone("resume", "auto", two), wanted) <= 1e-6  # Lightning by itself restores in float32
    alone("save", cases.QUIET, one)
    for weights in run_ranks(2, RUN, cases.SPLIT, "resume", one):
        assert apart(weights, wanted) <= 1e-9


def test_several_optimizers_by_hand() -> None:
    wanted = alone("gan")
    for weights in run_ranks(2, RUN, cases.QUIET | {"strategy": {"0": {"c": 2}, "2": {"k": 2}}}, "gan"):
        assert apart(weights, wanted) <= 1e-9


class ByHand(cases.Classifier):
    """A manual step in the idioms of Lightning's documentation."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        self.rates.append(optimizer.param_groups[0]["lr"])

        def closure() -> torch.Tensor:
            loss = super(ByHand, self).training_step(batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.5, "norm")
            return loss

        with optimizer.toggle_model(), self.toggled_optimizer(optimizer):
            self.log_dict({"twice": 2 * optimizer.step(closure).detach()})
        schedule.step()
        assert isinstance(optimizer, torch.optim.AdamW)
        assert isinstance(self.optimizers(use_pl_optimizer=False), torch.optim.AdamW)


def test_a_step_by_hand_is_tried_as_lightning_runs_it() -> None:
    ours, plain = ByHand(), ByHand()
    for module, strategy in ((ours, cases.LayerwiseStrategy(**cases.QUIET)), (plain, "auto")):
        cases.trainer(1, strategy, max_epochs=1).fit(module, cases.loader(1))
    assert (ours.rates, ours.seen) == (plain.rates, plain.seen)


@pytest.mark.parametrize("kind", ["EMA", pytest.param("SWA", marks=pytest.mark.slow)])
def test_averages_of_weights_are_one_devices(kind: str) -> None:
    wanted = alone("averaged", folder=kind)
    assert apart(wanted, alone("averaged", folder="none")) > 1e-3  # or nothing would have been averaged
    for weights in run_ranks(2, RUN, cases.SPLIT, "averaged", kind):
        assert apart(weights, wanted) <= 1e-9


@pytest.mark.parametrize("half", ["bf16-mixed", pytest.param("16-mixed", marks=pytest.mark.slow)])
def test_mixed_precision(half: str) -> None:
    wanted = alone("mixed", folder=half)
    for weights in run_ranks(2, RUN, cases.SPLIT, "mixed", half):
        assert apart(weights, wanted) <= 0.05


class Tied(cases.Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(6, 8)
        self.other.weight = self.net[0].weight

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + self.other(batch[0]).mean()


class Late(cases.Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.later = nn.Linear(6, 8)


class Broken(cases.Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch)


@pytest.mark.parametrize(
    ("module", "settings", "words"),
    [
        (Tied, {}, "modules share a parameter, .* and 'net.0.weight'"),
        (Late, {}, "module 'later' is trained, and the first step does not call it"),
        (Broken, {}, "could not be tried before training"),
        (cases.Classifier, {"plugins": "fsdp"}, "FSDPPrecision changes the layers"),
    ],
)
def test_what_does_not_go_together_is_one_sentence(module: Any, settings: Any, words: str) -> None:
    if settings:
        from lightning.pytorch.plugins.precision import FSDPPrecision

        settings = {"plugins": FSDPPrecision("32-true")}
    fit = cases.trainer(1, cases.LayerwiseStrategy(**cases.QUIET), **settings)
    with pytest.raises(LayerwiseError, match=words):
        fit.fit(module(), cases.loader(1))


def test_the_strategy_has_a_name() -> None:
    assert isinstance(cases.trainer(1, "layerwise").strategy, cases.LayerwiseStrategy)
    with pytest.raises(LayerwiseError, match="takes no io="):
        cases.LayerwiseStrategy(options=cases.ParallelOptions(io="boxes"))
