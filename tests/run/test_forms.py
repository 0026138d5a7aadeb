"""Inputs of any form, and outputs that compare samples: nested, optional, without samples; plans give one device's."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from layerwise.graph.fuse import fuse
from layerwise.importers.load import Network, network_of
from layerwise.run.data_parallel.module import DataRun
from layerwise.run.layered import LayeredRun
from layerwise.run.local_tensor import local_tensor
from layerwise.run.parallel import ParallelModule, of
from tests.run.plans import difference, random_plan
from tests.run.small_modules import on_ranks, plan_of, refused

X, Y = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
HALF = torch.tensor(0.5, dtype=torch.float64)


class Net(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.function = nn.Linear(6, 8), nn.Linear(8, 8), function

    def forward(self, *inputs: Any) -> Tensor:
        return self.function(self, *inputs)


def compared(m: Net, x: Tensor, y: Tensor) -> Tensor:
    """As CLIP does."""
    return F.normalize(m.down(m.up(x)), dim=-1) @ F.normalize(m.up(y), dim=-1).T


FORMS: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...]]] = {
    "all samples compared": (compared, (X, Y)),
    "dict, list, None, number": (
        lambda m, d, z, t: m.down(m.up(d["p"]) + m.up(d["q"][0]) * t), ({"p": X, "q": [Y]}, None, 0.3)
    ),
    "a timestep first": (lambda m, t, x: m.down(m.up(x) * t.sin()), (HALF.reshape(1), X)),
    "a temperature": (lambda m, x, t: m.down(m.up(x) / t), (X, HALF)),
    "one that is not used": (lambda m, x, y: m.down(m.up(x).tanh()), (X, Y)),
}  # fmt: skip


@cache
def made(name: str) -> tuple[Network, Net, tuple[Any, ...]]:
    torch.manual_seed(0)
    function, inputs = FORMS[name]
    module = Net(function).double()
    return network_of(module, inputs, 4, "test"), module, inputs


def share_of(inputs: Any, part: slice, *, whole: bool = False) -> Any:
    """All of Y, which is the same for all samples where these are compared with it."""
    return pytree.tree_map_only(Tensor, lambda x: x[part] if x.dim() == 2 and not (whole and x is Y) else x, inputs)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("kind", ["samples", "random"])
def test_one_devices_numbers(name: str, kind: str) -> None:
    network, module, inputs = made(name)
    plan = plan_of(network, 2) if kind == "samples" else random_plan(fuse(network.graph), 2, 1, "sample")
    module.zero_grad()
    wanted = module(*inputs)
    wanted.square().sum(1).mean().backward()
    single = {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}

    def rank(found: ParallelModule) -> Tensor:
        out = found(*share_of(inputs, found.share(), whole=name == "all samples compared"))
        out.square().sum(1).mean().backward()
        boxes = {shard.name: shard.box for shard in found.shards()}
        parts = {
            n: (boxes[n], local_tensor(p.grad).clone())
            for n, p in found.named_parameters()
            if p.grad is not None and n in boxes
        }
        for n, (box, gradient) in parts.items():
            wanted_here = single[n]
            assert wanted_here is not None
            assert difference(gradient, wanted_here[box.slices()]) <= 1e-9, n
        return out.detach()

    outputs = on_ranks(network, rank, 2, plan)
    assert difference(torch.cat(outputs), wanted) <= 1e-9


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.up(x) * scale


@pytest.mark.parametrize("degrees", [None, {"c": 2}], ids=["data", "split"])
def test_what_is_the_same_for_all_samples_must_be_so_on_all_ranks(degrees: dict[str, int] | None) -> None:
    torch.manual_seed(0)
    scale = torch.randn(8, dtype=torch.float64)
    network = network_of(module := Scaled().double(), (X, scale), 4, "test")
    plan, kind = plan_of(network, 2, degrees), LayeredRun if degrees else DataRun

    def rank(found: ParallelModule, given: Tensor) -> Tensor:
        assert type(of(found)) is kind
        return found(X[found.share()], given).detach()

    outputs = on_ranks(network, lambda found: rank(found, scale), 2, plan)
    assert difference(torch.cat(outputs), module(X, scale)) <= 1e-9
    for said in refused(network, lambda found: rank(found, scale + found.share().start), plan=plan):
        assert said.startswith("an input that all samples share, such as the texts of classes, has different")


def test_rows_of_what_all_samples_are_compared_with_are_refused() -> None:
    """As a loader gives each rank its rows of it."""
    network, _, inputs = made("all samples compared")
    for said in refused(network, lambda m: m(*share_of(inputs, m.share())), plan=plan_of(network, 2)):
        assert said.startswith("an input that all samples share, such as the texts of classes, has different")


def test_another_number_is_refused() -> None:
    network, _, (given, _, _) = made("dict, list, None, number")
    plan = plan_of(network, 2, {"c": 2})
    said = refused(network, lambda m: m(*share_of((given, None, 0.7), m.share())), plan=plan)
    assert all(text.startswith("the model is called with 0.7, but was made parallel for 0.3") for text in said)
