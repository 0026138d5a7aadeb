"""Loaders of one device's script, made those of a rank: the same samples, losses, outputs and weights."""

import copy
from collections.abc import Iterable
from itertools import chain, cycle
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

import layerwise
from layerwise.comm.base import Comm
from layerwise.comm.solo import SoloComm
from layerwise.errors import LayerwiseError
from tests.api.keywords import keywords
from tests.api.loader_ranks import epoch, loop_over_loaders
from tests.api.script import BATCH, SEED, apart, data, network, sgd
from tests.api.test_fit import Stream
from tests.comm.pool import run_ranks
from tests.comm.thread import run_threads

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
    """Shuffled by rank 0's random state; the last batch of 5 is split 2 to 3; all outputs of an evaluation come."""
    seen, losses, outputs, state = plain(COUNT)
    ranks = run_ranks(2, "tests.api.loader_ranks:loop_over_loaders", COUNT, how)
    for i, numbers in enumerate(seen):
        parts = [rank[0][i] for rank in ranks]
        assert list(chain(*parts)) == numbers
        whole = sum(rank[1][i] * len(part) for rank, part in zip(ranks, parts, strict=True)) / len(numbers)
        assert whole == pytest.approx(losses[i], rel=1e-9)
    for _, _, found, whole, said in ranks:
        assert torch.allclose(found, outputs, rtol=1e-9, atol=1e-12)
        assert apart(whole, state) <= 1e-9
        assert said == ""


def test_one_rank_and_workers() -> None:
    seen, losses, outputs, state = plain(COUNT)
    for workers in (0, 2):
        mine, values, found, whole, _ = loop_over_loaders(SoloComm(), COUNT, {}, workers)
        assert (mine, values) == (seen, losses)
        assert torch.allclose(found, outputs, rtol=1e-12)
        assert apart(whole, state) <= 1e-12


def test_a_rest_too_small_for_the_ranks_joins_the_batch_before() -> None:
    first, second = run_ranks(2, "tests.api.loader_ranks:loop_over_loaders", 2 * BATCH + 1, {})
    assert [len(a) + len(b) for a, b in zip(first[0], second[0], strict=True)] == [BATCH, BATCH + 1] * 2
    assert sorted(chain(*first[0][:2], *second[0][:2])) == sorted(data(2 * BATCH + 1).tensors[0][:, 0, 0, 0].tolist())
    assert "the last 1 samples are too few for a batch: they join the one before" in first[4]
    assert second[4] == ""


def test_a_loop_that_is_left_early_leaves_no_trace() -> None:
    model = network().eval()
    x = data().tensors[0]
    with torch.no_grad():
        for rank, (first, own) in enumerate(run_ranks(2, "tests.api.loader_ranks:left_early")):
            assert torch.allclose(first, model(x[:BATCH]), rtol=1e-9, atol=1e-12)
            assert torch.allclose(own, model(x[rank * BATCH : (rank + 1) * BATCH]), rtol=1e-9, atol=1e-12)


def augmented(items: list[Any]) -> Any:
    torch.rand(1)
    return default_collate(items)


def test_what_is_drawn_without_parallelize_is_drawn_with_it() -> None:
    torch.manual_seed(0)
    layerwise.parallelize(network(), DataLoader(data(), BATCH, collate_fn=augmented), verbose=False)
    found = torch.rand(3)
    torch.manual_seed(0)
    network()
    assert torch.equal(found, torch.rand(3))


class Words(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> dict[str, str]:
        return {"text": "a"}


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


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataLoader(data(), 4, sampler=Counted()), "draws more than the 2 batches of its length"),
        (DataLoader(data(), 4, sampler=Counted([("a", 1)])), "draws other things than numbers"),
        (DataLoader(data(), batch_sampler=Uneven(range(24), 4, False)), "draws batches of 0 samples, too few"),
    ],
)
def test_unfit_samplers(loader: DataLoader, message: str) -> None:
    _, shared = layerwise.parallelize(network(), loader, verbose=False)
    with pytest.raises(LayerwiseError, match=message):
        next(iter(shared))


def test_loops_within_loops() -> None:
    """Over the same loader, and evaluation within a step on a short batch that is split unevenly."""
    for same, outputs, wanted in run_ranks(2, "tests.api.loader_ranks:nested"):
        assert same
        assert torch.allclose(outputs, wanted, rtol=1e-9, atol=1e-12)


def test_evaluation_whatever_the_outputs() -> None:
    """Losses by the model itself, several rows a sample; and statistics that move, without gradients."""
    for found, wanted in run_ranks(2, "tests.api.loader_ranks:evaluated"):
        for a, b in zip(found, wanted, strict=True):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def test_a_whole_batch_with_too_small_a_rest() -> None:
    """Three ranks, two samples: every rank feeds all; a rest of one joins."""
    assert run_ranks(3, "tests.api.loader_ranks:few") == [([2, 2, 3], [3])] * 3


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataLoader(Stream()), "draws no batches of numbered samples"),
        (DataLoader(data(), None), "draws no batches of numbered samples"),
        (DataLoader(data(), 4, sampler=DistributedSampler(data(), 2, 0)), "give it the loader that one device would"),
        (DataLoader(TensorDataset(*data().tensors, torch.zeros(24)), 4), "neither .inputs, target. nor tensors"),
        (DataLoader(Words(), 2), "neither .inputs, target. nor tensors"),
        (DataLoader(data(0), 4), "has no samples"),
        (DataLoader(data(), batch_sampler=[[0, 1], [2, 3]]), "batch sampler has no batch_size"),
        (DataLoader(layerwise.split(data(), verbose=False), 4), "has a rank's share by layerwise.split"),
        (Halved(data(), 4), "a Halved with an __iter__ of its own"),
        (DataLoader(data(), 4, sampler=Endless()), "may have no end"),
    ],
)
def test_unfit_loaders(loader: DataLoader, message: str) -> None:
    with pytest.raises(LayerwiseError, match=message):
        layerwise.parallelize(network(), loader)


def test_wrong_arguments() -> None:
    loader = DataLoader(data(), batch_sampler=BatchSampler(SequentialSampler(data()), 4, drop_last=False))
    with pytest.raises(LayerwiseError, match="leave batch= out"):
        layerwise.parallelize(network(), loader, batch=8)
    with pytest.raises(LayerwiseError, match="takes further DataLoaders, not list"):
        layerwise.parallelize(network(), loader, [1])
    with pytest.raises(LayerwiseError, match="after the one to train on"):
        layerwise.parallelize(network(), data().tensors[0][:4], loader)
    model, again = layerwise.parallelize(network(), loader, verbose=False)
    assert (model.plan.batch, len(again), len(next(iter(again))[0])) == (4, 6, 4)
    assert again.batch_size is None
    assert layerwise.parallelize(network(), DataLoader(data(), 4), verbose=False)[1].batch_size == 4


def test_held_out_batches_of_fewer_samples_than_the_plan_cuts() -> None:
    """Of one sample, where batches of two on four ranks are cut in two: evaluated as one device does."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)).double()
    samples = TensorDataset(torch.randn(4, 6).double(), torch.zeros(4))
    strategy = {"0": {"n": 2, "c": 2}, "2": {"n": 2}}

    def evaluated(comm: Comm) -> torch.Tensor:
        loaders = DataLoader(samples, 2), DataLoader(samples, 1)
        how = keywords({"strategy": strategy}, comm=comm, verbose=False)
        made, _, held_out = layerwise.parallelize(copy.deepcopy(model), *loaders, **how)
        with torch.no_grad():
            return torch.cat([made.eval()(x) for x, _ in held_out])

    whole = model(samples.tensors[0])
    for found in run_threads(4, evaluated):
        assert torch.allclose(found, whole, rtol=1e-9, atol=1e-12)
