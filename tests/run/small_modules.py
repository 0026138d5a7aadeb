"""Small modules on ranks that are threads, cut alike; and whether their numbers are one device's."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.importers.load import Network, network_of
from layerwise.plan import Plan, parse_strategy
from layerwise.run.load import load
from layerwise.run.parallel import ParallelModule
from tests.comm.thread import run_threads
from tests.run.plans import difference

SAMPLES = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def plan_of(network: Network, ranks: int, degrees: Mapping[str, int] | None = None) -> Plan:
    """All layers cut alike: by samples, where `degrees` says nothing else. {}: on rank 0 alone."""
    graph = fuse(network.graph)
    wanted = {"n": ranks} if degrees is None else degrees
    cuts = {
        layer.name: {d.label: wanted[d.label] for d in layer.space.dims if d.label in wanted} for layer in graph.inner
    }
    strategy = parse_strategy(cuts, graph, ranks)
    return Plan("test", graph.digest, graph.batch, ranks, ranks, "sample", True, strategy)


def traced(module: nn.Module, example: Tensor = SAMPLES[0]) -> Network:
    return network_of(module, (example,), len(example), "test")


def on_ranks(
    network: Network, act: Callable[[ParallelModule], object], ranks: int, plan: Plan | None = None
) -> list[Any]:
    found = plan or plan_of(network, ranks)
    return run_threads(ranks, lambda comm: act(load(found, network, comm=comm, dtype=torch.float64)), timeout_s=60)


def refused(
    network: Network, act: Callable[[ParallelModule], object], ranks: int = 2, plan: Plan | None = None
) -> list[str]:
    """What each rank says."""

    def rank(module: ParallelModule) -> str:
        with pytest.raises(LayerwiseError) as raised:
            act(module)
        return str(raised.value)

    return on_ranks(network, rank, ranks, plan)


def loss(out: Tensor) -> Tensor:
    return out.square().sum(1).mean()


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def equal(found: Mapping[str, Tensor | None], single: Mapping[str, Tensor | None]) -> None:
    assert found.keys() == single.keys()
    for name, value in single.items():
        here = found[name]
        assert (here is None) == (value is None), name
        if here is not None and value is not None:
            assert difference(here, value) <= 1e-9, name


def layered(network: Network) -> Network:
    """The same, to be run layer by layer whatever the plan."""
    return replace(network, module=None)


@cache
def layered_mlp() -> tuple[nn.Module, Network]:
    return mlp()[0], layered(mlp()[1])


@cache
def mlp() -> tuple[nn.Module, Network]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    return module, traced(module)
