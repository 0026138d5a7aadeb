"""Accelerate's loops and Hugging Face's Trainer on two ranks, against the same on one device without layerwise."""

from pathlib import Path
from typing import Any

import pytest
import torch

from layerwise.comm.solo import SoloComm
from layerwise.errors import LayerwiseError
from tests.comm.pool import run_ranks

accelerate = pytest.importorskip("accelerate", reason="Accelerate is not installed")
hf = pytest.importorskip("transformers", reason="transformers is not installed")

from layerwise.api.parallelize import parallelize  # noqa: E402
from layerwise.integrations import accelerate as prepared  # noqa: E402
from tests.integrations import hugging_face_ranks as cases  # noqa: E402 (needs both)

RANKS = "tests.integrations.hugging_face_ranks:"
SPLITS = [{"0": {"c": 2}, "2": {"k": 2}}, "data"]
MLP = {"transformer.h.0.mlp.c_fc": {"c": 2}, "transformer.h.0.mlp.c_proj": {"k": 2}}


def apart(one: Any, other: Any) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("loading", ["", "split_batches", "dispatch_batches"])
@pytest.mark.parametrize("strategy", SPLITS, ids=str)
def test_a_loop_of_accelerates_has_the_numbers_of_one_device(strategy: Any, loading: str) -> None:
    losses, weights = cases.loop(SoloComm(), None)
    for ours, state in run_ranks(2, f"{RANKS}loop", strategy, "no", loading):
        assert ours == pytest.approx(losses, rel=1e-9)
        assert apart(state, weights) <= 1e-9
    ours, state = cases.loop(SoloComm(), "data")
    assert apart(state, weights) <= 1e-9


def test_the_model_goes_where_the_accelerators_device_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with Accelerate's own prepare: its loaders put the batches there. "meta" stands for a GPU."""
    examples: list[torch.Tensor] = []

    def noted(model: torch.nn.Module, example: torch.Tensor, **keywords: Any) -> Any:
        examples.append(example)
        return parallelize(model, torch.ones(example.shape), **keywords)

    monkeypatch.setattr(prepared, "parallelize", noted)
    for places in (True, False):
        accelerator = cases.Accelerator(cpu=True, device_placement=places)
        monkeypatch.setattr(accelerator.state, "device", torch.device("meta"))
        cases.prepare(accelerator, torch.nn.Linear(4, 2), example=torch.ones(2, 4), **cases.QUIET)
    assert [example.device.type for example in examples] == ["meta", "cpu"]


def test_mixed_precision_of_accelerates() -> None:
    _, weights = cases.loop(SoloComm(), None, "bf16")
    for _, state in run_ranks(2, f"{RANKS}loop", SPLITS[0], "bf16"):
        assert apart(state, weights) <= 0.05


def test_the_trainer_has_the_numbers_of_one_device_and_resumes_on_another_number(tmp_path: Path) -> None:
    plain = str(tmp_path / "plain")
    losses, evaluated, weights = cases.train(SoloComm(), None, plain, 4)
    later = cases.train(SoloComm(), None, plain, 6, True)[2]
    for name, strategy in (("split", MLP), ("data", "data")):
        two, two_ranks = str(tmp_path / name), {"strategy": strategy}
        (first, _), *_ = [rank[:2] for rank in run_ranks(2, f"{RANKS}train", two_ranks, two, 2)]
        assert first == pytest.approx(losses[:2], abs=1e-4)  # the Trainer rounds
        ours, ours_evaluated, state = cases.train(SoloComm(), {}, two, 4, True)
        assert ours == pytest.approx(losses, abs=1e-4)
        assert ours_evaluated[-1] == pytest.approx(evaluated[-1], abs=1e-4)
        assert apart(state, weights) <= 1e-9
        for *_, state in run_ranks(2, f"{RANKS}train", two_ranks, two, 6, True):
            assert apart(state, later) <= 1e-9
        model = hf.GPT2LMHeadModel.from_pretrained(f"{two}/checkpoint-6", dtype=torch.float64)
        assert apart(cases.full(model), later) <= 1e-9


def test_a_trainer_that_splits_in_another_way_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        hf.Trainer,
        "__init__",
        lambda self, *_, **__: vars(self).update(is_deepspeed_enabled=True, is_fsdp_enabled=False),
    )
    with pytest.raises(LayerwiseError, match="ask for DeepSpeed, which splits the model in its own way"):
        cases.LayerwiseTrainer()


def test_an_accelerator_that_splits_in_another_way_is_refused() -> None:
    accelerator = cases.Accelerator(cpu=True)
    model = torch.nn.Linear(4, 2)
    used = torch.optim.Adam(model.parameters())
    used.state[model.weight] = {"step": torch.ones(())}
    with pytest.raises(LayerwiseError, match="has stepped before prepare"):
        cases.prepare(accelerator, model, used, example=torch.ones(2, 4), **cases.QUIET)
    with pytest.raises(LayerwiseError, match="give prepare a DataLoader, or example="):
        cases.prepare(accelerator, torch.nn.Linear(4, 2), **cases.QUIET)
    accelerator.state.distributed_type = accelerate.utils.DistributedType.FSDP
    with pytest.raises(LayerwiseError, match="set up for FSDP"):
        cases.prepare(accelerator, torch.nn.Linear(4, 2), example=torch.ones(2, 4), **cases.QUIET)
