"""A loader of one device's script, split: the same samples, losses and weights; one that is not split evaluates."""

from collections.abc import Iterable
from itertools import chain, cycle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler, TensorDataset, default_collate

import layerwise
from layerwise.comm.solo import SoloComm
from layerwise.errors import LayerwiseError
from tests.api.loader_ranks import epoch, loop_over_loaders
from tests.api.script import BATCH, SEED, apart, data, network, sgd
from tests.api.test_fit import Stream
from tests.comm.pool import run_ranks

pytestmark = pytest.mark.usefixtures("models_traced_once")

COUNT = 2 * BATCH + 5


def plain(count: int) -> tuple[list, list[float], torch.Tensor, dict[str, torch.Tensor]]:
    """The same script without layerwise."""
    model = network()
    loader = DataLoader(data(count), BATCH, shuffle=True)
    torch.manual_seed(SEED)
    optimizer, seen, losses = sgd(model), [], []
    for _ in range(2):
        epoch(model, loader, optimizer, seen, losses)
    model.eval()
    with torch.no_grad():
        outputs = model(data(BATCH + 3).tensors[0])
    return seen, losses, outputs, model.state_dict()


@pytest.mark.parametrize("how", [{"strategy": "data"}, {"strategy": {"5": {"c": 2}, "7": {"k": 2}}}], ids=["data", "k"])
def test_the_samples_of_each_step_are_one_devices(how: dict) -> None:
    """Shuffled by rank 0's random state; the last batch of 5 is split 2 to 3; a held-out loader is not split."""
    seen, losses, outputs, state = plain(COUNT)
    ranks = run_ranks(2, "tests.api.loader_ranks:loop_over_loaders", COUNT, how)
    for i, numbers in enumerate(seen):
        parts = [rank[0][i] for rank in ranks]
        assert list(chain(*parts)) == numbers
        whole = sum(rank[1][i] * len(part) for rank, part in zip(ranks, parts, strict=True)) / len(numbers)
        assert whole == pytest.approx(losses[i], rel=1e-9)
    for _, _, found, whole in ranks:
        assert torch.allclose(found, outputs, rtol=1e-9, atol=1e-12)
        assert apart(whole, state) <= 1e-9


def test_one_rank_and_workers() -> None:
    seen, losses, outputs, state = plain(COUNT)
    for workers in (0, 2):
        mine, values, found, whole = loop_over_loaders(SoloComm(), COUNT, {}, workers)
        assert (mine, values) == (seen, losses)
        assert torch.allclose(found, outputs, rtol=1e-12)
        assert apart(whole, state) <= 1e-12


def test_a_whole_batch_on_every_rank() -> None:
    """Three ranks, two samples: every rank feeds all of them, split or not."""
    assert run_ranks(3, "tests.api.loader_ranks:few") == [([2, 2, 2], [2, 2, 2])] * 3


class Halved(DataLoader):
    def __iter__(self) -> Any:
        return ((x / 2, y) for x, y in super().__iter__())


class Endless(Sampler):
    def __init__(self, of: Iterable[Any] = range(8)) -> None:
        self.of = of

    def __iter__(self) -> Any:
        return cycle(self.of)


class Counted(Endless):
    def __len__(self) -> int:
        return 8


class Uneven(BatchSampler):
    def __iter__(self) -> Any:
        return iter([[0, 1], [], [2, 3]])


@pytest.fixture(scope="module")
def model() -> Any:
    return layerwise.parallelize(network(), data().tensors[0][:4])


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataLoader(data(), 4, sampler=Counted()), "draws more than the 2 batches of its length"),
        (DataLoader(data(), 4, sampler=Counted([("a", 1)])), "draws other things than numbers"),
        (DataLoader(data(), batch_sampler=Uneven(range(24), 4, False)), "has 0 samples, too few for the plan's cuts"),
    ],
)
def test_unfit_samplers(model: Any, loader: DataLoader, message: str) -> None:
    shared = layerwise.split(loader, model)
    with pytest.raises(LayerwiseError, match=message):
        next(iter(shared))


def test_a_rest_too_small_for_the_ranks_is_refused_before_the_first_step() -> None:
    for told in run_ranks(2, "tests.api.loader_ranks:rest_of_one"):
        assert "a batch of the loader has 1 samples, too few for the plan's cuts, which need 2" in told
        assert "drop_last=True" in told


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataLoader(Stream()), "draws no batches of numbered samples"),
        (DataLoader(data(), None), "draws no batches of numbered samples"),
        (DataLoader(data(), 4, sampler=DistributedSampler(data(), 2, 0)), "has a DistributedSampler"),
        (Halved(data(), 4), "a Halved with an __iter__ of its own"),
        (DataLoader(data(), 4, sampler=Endless()), "may have no end"),
    ],
)
def test_unfit_loaders(model: Any, loader: DataLoader, message: str) -> None:
    with pytest.raises(LayerwiseError, match=message):
        layerwise.split(loader, model)


def test_wrong_arguments(model: Any) -> None:
    loader = DataLoader(data(), 4)
    with pytest.raises(LayerwiseError, match="has a rank's share already"):
        layerwise.split(layerwise.split(loader, model), model)
    with pytest.raises(LayerwiseError, match=r"loader is .*it must be a DataLoader"):
        layerwise.split(data(), model)
    with pytest.raises(LayerwiseError, match="model is of type Linear; it must be what parallelize returned"):
        layerwise.split(loader, nn.Linear(4, 2))
    with pytest.raises(LayerwiseError, match="leave batch= out"):
        layerwise.parallelize(network(), loader, batch=8)
    with pytest.raises(TypeError):
        layerwise.parallelize(network(), loader, loader)  # type: ignore[call-arg]


def augmented(items: list[Any]) -> Any:
    torch.rand(1)
    return default_collate(items)


def test_what_is_drawn_without_parallelize_is_drawn_with_it() -> None:
    torch.manual_seed(0)
    made = layerwise.parallelize(network(), DataLoader(data(), BATCH, collate_fn=augmented))
    assert made.plan.batch == BATCH
    found = torch.rand(3)
    torch.manual_seed(0)
    network()
    assert torch.equal(found, torch.rand(3))


class Words(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> dict[str, str]:
        return {"text": "a"}


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataLoader(TensorDataset(*data().tensors, torch.zeros(24)), 4), "neither .inputs, target. nor tensors"),
        (DataLoader(Words(), 2), "neither .inputs, target. nor tensors"),
        (DataLoader(data(0), 4), "has no samples"),
        (DataLoader(data(), batch_sampler=[[0, 1], [2, 3]]), "its batch sampler no batch_size"),
    ],
)
def test_loaders_without_an_example(loader: DataLoader, message: str) -> None:
    with pytest.raises(LayerwiseError, match=message):
        layerwise.parallelize(network(), loader)
