"""Bytes predicted are bytes sent, where a run computes in the element types that the plan counts in."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from layerwise.comm.base import Comm
from layerwise.config import Config
from layerwise.graph.fuse import fuse
from layerwise.importers.load import Network, network_of
from layerwise.plan import Plan
from layerwise.run.base import PREDICTED
from layerwise.run.load import load
from tests.comm.thread import run_threads
from tests.run.plans import optimised_plan, priced, random_plan

KINDS = tuple(PREDICTED)
AGAIN = {"checkpoint_activations": True}


class Words(nn.Module):
    """Integers, an embedding (which k splits), layer norm, attention, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.norm, self.inner = nn.LayerNorm(8), nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        x = self.norm(self.embedding(words))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = torch.relu(self.inner(self.inner(x)))
        return nn.functional.linear(x, self.embedding.weight)


class Images(nn.Module):
    """Norms with and without weights, directly on the input and later."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.scaled = nn.BatchNorm2d(4, affine=False), nn.BatchNorm2d(4)
        self.grouped, self.instance = nn.GroupNorm(2, 4), nn.InstanceNorm2d(8, affine=True, track_running_stats=True)
        self.first, self.second, self.last = nn.Conv2d(12, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8 * 16, 6)
        self.after = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([torch.relu(self.plain(x)), self.scaled(x), self.grouped(x)], 1)
        x = self.instance(self.first(x))
        return self.last(torch.relu(self.after(self.second(x))).flatten(1))


class Frames(nn.Module):
    """A decoder of videos: causal in time, attention within a frame, channels shuffled into time and space."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.qkv, self.second = nn.Conv3d(2, 4, 3), nn.Conv2d(4, 12, 1), nn.Conv2d(4, 3, 3, padding=1)
        self.third, self.last = nn.Conv3d(3, 16, 1), nn.Conv3d(2, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(functional.pad(x, (1, 1, 1, 1, 2, 0), mode="replicate"))
        n, _, d, h, w = x.shape
        q, k, v = self.qkv(x.transpose(1, 2).flatten(0, 1)).flatten(2).transpose(1, 2).chunk(3, -1)
        y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        x = x + y.unflatten(2, (h, w)).unflatten(0, (n, d)).transpose(1, 2)
        y = functional.interpolate(x.transpose(1, 2).flatten(0, 1), scale_factor=2.0, mode="nearest-exact")
        x = self.third(self.second(y).unflatten(0, (n, d)).transpose(1, 2))
        x = x.reshape(n, 2, 2, 2, 2, d, 2 * h, 2 * w).permute(0, 1, 5, 2, 6, 3, 7, 4)
        x = x.flatten(6, 7).flatten(4, 5).flatten(2, 3)[:, :, 1:]
        return self.last(functional.pad(x, (1, 1, 1, 1, 2, 0)))


@cache
def network(name: str, dtype: torch.dtype) -> Network:
    torch.manual_seed(0)
    if name == "words":
        return network_of(Words().to(dtype), (torch.zeros(2, 6, dtype=torch.int64),), 4, name)
    return network_of(Images().to(dtype), (torch.zeros(2, 4, 6, 6, dtype=dtype),), 4, name)


def made(given: Network, ranks: int, seed: int, choose: Callable[..., Config] | None = None) -> Plan:
    return random_plan(fuse(given.graph), ranks, seed, "sample", choose)


def of_step(
    plan: Plan, given: Network, x: Tensor, **options: Any
) -> tuple[list[dict[str, float | None]], dict[str, int]]:
    """What each rank predicts of a step's bytes, and what all send in it."""

    def run(comm: Comm) -> tuple[dict[str, float | None], Counter[str]]:
        module = load(plan, given, comm=comm, **options)
        before = comm.sent.copy()
        module(x[module.share()]).float().mean().backward()
        return module.predicted_bytes(), comm.sent - before

    predicted, sent = zip(*run_threads(plan.gpus, run), strict=True)
    return list(predicted), {kind: sum(each[kind] for each in sent) for kind in KINDS}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("words", torch.float32), ("images", torch.float32), ("images", torch.bfloat16), ("words", torch.float64)],
)
def test_predicted_are_sent(name: str, dtype: torch.dtype) -> None:
    given = network(name, dtype)
    x = torch.randint(12, (4, 6)) if name == "words" else torch.randn(4, 4, 6, 6, dtype=dtype)
    for seed in range(2):
        predicted, sent = of_step(made(given, 2 + 2 * seed, seed), given, x, dtype=dtype)
        assert all(told == sent for told in predicted)


@pytest.mark.parametrize("options", [{"dtype": torch.float64}, {"autocast": torch.bfloat16}, AGAIN])
def test_nothing_is_predicted_of_other_types_and_of_layers_recomputed_beside_the_plan(options: dict[str, Any]) -> None:
    given = network("images", torch.float32)
    plan = made(given, 2, 0)
    ranks = run_threads(2, lambda comm: load(plan, given, comm=comm, **options).predicted_bytes())
    assert ranks == [dict.fromkeys(KINDS)] * 2


def test_a_step_of_two_batches_sums_once() -> None:
    given = network("images", torch.float32)
    plan = made(given, 2, 0)
    plan = replace(plan, strategy={name: replace(c, states="replicated") for name, c in plan.strategy.items()})
    plan = priced(plan, fuse(given.graph))

    def run(comm: Comm) -> tuple[dict[str, float | None], dict[str, int]]:
        module = load(plan, given, comm=comm)
        before, x = comm.sent.copy(), torch.randn(4, 4, 6, 6)
        with module.no_sync():
            module(x[module.share()]).mean().backward()
        module(x[module.share()]).mean().backward()
        sent = comm.sent - before
        return module.predicted_bytes(2), {kind: sent[kind] for kind in KINDS}

    (predicted, one), (_, two) = run_threads(2, run)
    assert predicted == {kind: one[kind] + two[kind] for kind in KINDS}
    assert predicted["sync"] == plan.predicted["sync_bytes"] > 0


def test_nothing_is_predicted_of_other_statistics() -> None:
    given = network("images", torch.float32)
    plan = made(given, 2, 0)

    def predicted(comm: Comm, local: bool) -> float | None:
        return load(plan, given, comm=comm, local_batch_norm=local).predicted_bytes()["statistics"]

    assert run_threads(2, lambda comm: predicted(comm, True)) == [None, None]
    assert None not in run_threads(2, lambda comm: predicted(comm, False))


def test_local_batch_norm_as_the_plan_was_searched() -> None:
    given = network("images", torch.float32)
    plan = made(given, 2, 0, lambda configs: next((c for c in configs if c == Config((("n", 2),))), configs[0]))
    plan = replace(plan, provenance={"cost_options": {"local_batch_norm": True}})

    def statistics(comm: Comm, **options: bool) -> int:
        module = load(plan, given, comm=comm, **options)
        module(torch.randn(4, 4, 6, 6)[module.share()]).mean().backward()
        return comm.sent["statistics"]

    planned = run_threads(2, statistics)
    assert planned == run_threads(2, lambda comm: statistics(comm, local_batch_norm=True))
    assert planned[0] < run_threads(2, lambda comm: statistics(comm, local_batch_norm=False))[0]


def test_plans_of_mixed_precision_say_what_is_sent() -> None:
    """Searched with bf16 they count 16 bits for what has 16: run so, what they say is sent; run in float32, more."""
    given = network("images", torch.float32)
    plan = optimised_plan(fuse(given.graph), 4, "bf16")
    assert plan.provenance["mixed_precision"] == {"autocast": "bfloat16", "device": "cpu"}
    assert plan.predicted["transfer_bytes"] > 0

    for options in ({"autocast": torch.bfloat16}, {}):
        predicted, sent = of_step(plan, given, torch.randn(4, 4, 6, 6), **options)
        assert all(told == (sent if options else dict.fromkeys(KINDS)) for told in predicted)
