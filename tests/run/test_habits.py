"""Habits of users of DistributedDataParallel: each either gives one device's numbers, or is refused with a reason."""

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from layerwise.importers.load import Network, network_of
from layerwise.run.load import load
from layerwise.run.parallel import ParallelModule
from tests.comm.thread import run_threads
from tests.run.small_modules import (
    SAMPLES,
    equal,
    gradients,
    layered,
    layered_mlp,
    loss,
    mlp,
    on_ranks,
    plan_of,
    refused,
    traced,
)

# ------------------------------------------------------------------------------------------------------ gradients


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("synchronised", [(1, 0, 1), (0, 0, 1), (1, 1, 1), (0, 1, 1), (1, 0, 0, 1), (0, 1, 0, 1)])
def test_gradients_add_up_whichever_are_synchronised(synchronised: Sequence[int], ranks: int) -> None:
    module, network = mlp()
    single = copy.deepcopy(module)
    for i in range(len(synchronised)):
        loss(single(SAMPLES[i % 3])).backward()

    def rank(made: ParallelModule) -> dict[str, Tensor | None]:
        for i, now in enumerate(synchronised):
            x = SAMPLES[i % 3][made.share()]
            if now:
                loss(made(x)).backward()
            else:
                with made.no_sync():
                    loss(made(x)).backward()
        return gradients(made)

    for found in on_ranks(network, rank, ranks):
        equal(found, gradients(single))


# ------------------------------------------------------------------------------------------------------ inputs


def test_ranks_that_feed_other_numbers_of_samples_than_the_layers_need_are_refused() -> None:
    _, network = layered_mlp()
    told = refused(network, lambda made: made(SAMPLES[0][: 5 if made.comm.rank else 3]))
    assert len(set(told)) == 1
    assert told[0].startswith("the ranks fed 3, 5 samples, but their shares of a batch of 8 are 4, 4: feed")


@pytest.mark.parametrize(("first", "second"), [(3, 5), (1, 1), (3, 3), (7, 7)])
def test_ranks_feed_any_numbers_of_samples_where_none_travel(first: int, second: int) -> None:
    module, network = mlp()
    single, x = copy.deepcopy(module), SAMPLES.flatten(0, 1)[: first + second]
    loss(single(x)).backward()

    def rank(made: ParallelModule) -> dict[str, Tensor | None]:
        loss(made(x[first:] if made.comm.rank else x[:first])).backward()
        return gradients(made)

    for found in on_ranks(network, rank, 2):
        equal(found, gradients(single))


@pytest.mark.parametrize("network", [mlp()[1], layered_mlp()[1]], ids=["data", "split"])
def test_join_is_refused_with_what_to_do(network: Network) -> None:
    """As Join asks each of its modules for it."""
    for text in refused(network, lambda made: made.join_hook()):
        assert text.startswith(
            "torch.distributed.algorithms.Join is not supported, as all ranks take part in every batch:"
        )


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_input_of_another_element_type_is_refused(ranks: int) -> None:
    """As PyTorch's linear layer refuses it."""
    _, network = layered_mlp()

    def rank(made: ParallelModule) -> None:
        x = SAMPLES[0][made.share()]
        for dtype in ("float32", "bfloat16", "int64"):
            said = f"^input 'input' is {dtype}, but the model was made parallel for float64:"
            with pytest.raises(LayerwiseError, match=said):
                made(x.to(getattr(torch, dtype)))
        with pytest.raises(LayerwiseError, match="is of type ndarray: pass a tensor"):
            made(x.numpy())

    on_ranks(network, rank, ranks)


class Ids(nn.Module):
    """Ids that are looked up, a mask that is computed with, a loss's own targets."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 4), nn.Linear(4, 5)

    def forward(self, ids: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.table(ids) * mask[:, None]), target)


def test_whole_numbers_of_another_type_are_taken_as_pytorch_takes_them() -> None:
    torch.manual_seed(0)
    module, numbers = Ids().double(), torch.arange(8) % 5
    network = layered(network_of(module, (numbers, numbers, numbers), 8, "test"))
    single = module(numbers, numbers, numbers)
    assert torch.equal(single, module(numbers.int(), numbers, numbers))

    i32, i64 = torch.int32, torch.int64

    def rank(made: ParallelModule) -> list[float]:
        def step(*types: torch.dtype) -> float:
            out: Tensor = made(*(numbers[made.share()].to(dtype) for dtype in types))
            return out.item()

        for types in ((i64, i32, i64), (i64, torch.bool, i64), (i64, i64, i32), (torch.float64, i64, i64)):
            with pytest.raises(LayerwiseError, match=r"made parallel for int64: pass x\.to\(torch\.int64\)"):
                step(*types)
        return [step(i64, i64, i64), step(i32, i64, i64)]

    for losses in zip(*on_ranks(network, rank, 2), strict=True):
        assert abs(sum(losses) / 2 - single.item()) <= 1e-12


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_batch_norm_of_one_value_a_channel_names_its_layer(ranks: int) -> None:
    network = layered(traced(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).double(), SAMPLES[0][:2]))

    def rank(comm: Comm) -> str:
        plan = plan_of(network, ranks)
        module = load(plan, network, comm=comm, dtype=torch.float64, local_batch_norm=True)
        x = SAMPLES[0][:1]
        assert module.eval()(x, batch=ranks).shape == (1, 6)
        with pytest.raises(LayerwiseError) as raised:
            module.train()(x, batch=ranks)
        return str(raised.value)

    for text in run_threads(ranks, rank, timeout_s=20):
        assert text.startswith("layer '0': Expected more than 1 value per channel")  # fused with the linear layer


# ------------------------------------------------------------------------------------------------------ state


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.register_buffer("mask", torch.tensor([1, 0, 2**60 + 1, 1, 0, 7]))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)) * (self.mask > 0) * self.mask.clamp(max=9)


@pytest.mark.parametrize("degrees", [{}, {"n": 2}, {"c": 3}], ids=str)
def test_the_state_is_whole_and_stays_as_it_was(degrees: dict[str, int]) -> None:
    module = Masked().double()
    network = traced(module)

    def rank(made: ParallelModule) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        before = made.full_state_dict()
        kept = {name: value.clone() for name, value in before.items()}
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        loss(made(SAMPLES[0][made.share()])).backward()
        optimizer.step()
        return before, kept, made.full_state_dict()

    for before, kept, after in on_ranks(network, rank, 3, plan_of(network, 3, degrees)):
        for name, value in module.state_dict().items():
            assert before[name].dtype == after[name].dtype == value.dtype
            assert torch.equal(before[name], value), name
            assert torch.equal(kept[name], value), name
        moved = {name for name in after if not torch.equal(after[name], before[name])}
        assert moved == set(after) - {"mask"}
        assert after["norm.num_batches_tracked"] == 1
