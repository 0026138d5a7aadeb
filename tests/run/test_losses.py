"""Losses inside a model, of PyTorch and written by hand: under any plan, split or not, the numbers are one device's."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerwise.comm.base import Comm
from layerwise.graph.fuse import fuse
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.load import Network, network_of
from layerwise.run.load import load
from tests.comm.thread import run_threads
from tests.run.plans import random_plan

EXTENT = 26  # 26 ** 3 voxels are enough to be reduced in parts


def soft_dice(y: Tensor, t: Tensor, w: Tensor) -> Tensor:
    """Of each class and sample, then of the batch; with a penalty. Written as MONAI and nnU-Net do."""
    p, axes = y.softmax(1), torch.arange(2, y.dim()).tolist()
    target = torch.zeros(y.shape, dtype=torch.bool).scatter_(1, t[:, None], 1).to(p.dtype)
    shared, both = (p * target).sum(axes), p.sum(axes) + target.sum(axes)
    batch = (p * target).sum((0, *axes)) / (p + target).sum((0, *axes))
    return 1 - ((2 * shared + 1e-5) / (both + 1e-5)).mean() - (w * batch).sum() + 0.1 * y.square().mean()


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "soft dice": soft_dice,
    "cross entropy": lambda y, t, w: F.cross_entropy(y, t),
    "weighted, some ignored": lambda y, t, w: F.cross_entropy(y, t, weight=w, ignore_index=1),
    "dice and cross entropy": lambda y, t, w: soft_dice(y, t, w) + 0.5 * F.cross_entropy(y, t, weight=w),
    "summed": lambda y, t, w: F.cross_entropy(y, t, reduction="sum"),
    "binary": lambda y, t, w: F.binary_cross_entropy_with_logits(
        y, t[:, None].expand_as(y).to(y.dtype) / 2, pos_weight=w[:, None, None, None]
    ),
    "deep supervision": lambda y, t, w: (
        F.mse_loss(y[:, 0], t.double()) + 0.5 * F.l1_loss(F.avg_pool3d(y, 2), 0 * F.avg_pool3d(y, 2))
    ),
}


class Segments(nn.Module):
    def __init__(self, loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv3d(1, 4, 3, padding=1), nn.InstanceNorm3d(4), nn.Conv3d(4, 3, 1)
        self.register_buffer("weight", torch.tensor([0.5, 2.0, 1.0]))
        self.loss = loss

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.loss(self.last(torch.relu(self.norm(self.first(x)))), t, self.weight)


@cache
def segments(name: str) -> tuple[nn.Module, tuple[Tensor, Tensor], Network, LayerGraph]:
    torch.manual_seed(0)
    model = Segments(LOSSES[name]).double()
    inputs = torch.randn(2, 1, *(EXTENT,) * 3).double(), torch.randint(0, 3, (2, *(EXTENT,) * 3))
    network = network_of(copy.deepcopy(model), inputs, 2, "test")
    return model, inputs, network, fuse(network.graph)


@pytest.mark.parametrize("io", ["sample", "free"])
@pytest.mark.parametrize("name", LOSSES)
def test_any_plan_equals_one_device(name: str, io: str) -> None:
    model, (x, t), network, graph = segments(name)
    single = copy.deepcopy(model)
    wanted = single(x, t)
    wanted.backward()
    torch.optim.SGD(single.parameters(), lr=0.1).step()
    plan = random_plan(graph, 2 if io == "sample" else 3, len(name), io)

    def run(comm: Comm) -> tuple[Tensor, dict[str, Tensor]]:
        module = load(plan, network, comm=comm, dtype=torch.float64)
        share = slice(comm.rank, comm.rank + 1) if io == "sample" else slice(None)
        loss = module(x[share], t[share])
        loss.backward()
        torch.optim.SGD(module.parameters(), lr=0.1).step()
        return loss.detach(), module.full_state_dict()

    ranks = run_threads(plan.gpus, run)
    losses = [loss for loss, _ in ranks]
    summed = name == "summed" and io == "sample"
    torch.testing.assert_close(sum(losses) / (1 if summed else len(losses)), wanted.detach(), rtol=1e-9, atol=1e-9)
    for _, state in ranks:
        for key, value in single.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["soft dice", "weighted, some ignored"])
def test_devices_reduce_what_they_have(name: str) -> None:
    """What is made of whole volumes can be split along them; the rest needs an eighth of the numbers."""
    graph = segments(name)[3]
    large = [layer for layer in graph.inner if max(spec.volume for spec in layer.specs) > EXTENT**3]
    assert large
    for layer in large:
        assert all(layer.space.max_degree(label) >= 13 for label in "dhw"), layer.name


class Reported(Segments):
    """A sum of two losses, and one of the two by itself."""

    def forward(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        y = self.last(torch.relu(self.norm(self.first(x))))
        entropy = F.cross_entropy(y, t)
        return soft_dice(y, t, self.weight) + 0.5 * entropy, entropy


@pytest.mark.parametrize("io", ["sample", "free", "boxes"])
@pytest.mark.parametrize("fused", [True, False])
def test_losses_that_are_scaled_and_added_by_layers_of_their_own(io: str, fused: bool) -> None:
    torch.manual_seed(0)
    model = Reported(soft_dice).double()
    x, t = torch.randn(2, 1, 6, 6, 6).double(), torch.randint(0, 3, (2, 6, 6, 6))
    network = network_of(copy.deepcopy(model), (x, t), 2, "test")
    graph = fuse(network.graph) if fused else network.graph
    wanted = model(x, t)
    wanted[0].backward()
    plan = replace(random_plan(graph, 2, 1, io), fused=fused)

    def run(comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
        module = load(plan, network, comm=comm, dtype=torch.float64)
        share = slice(comm.rank, comm.rank + 1) if io == "sample" else slice(None)
        inputs = (x[share], t[share])
        if io == "boxes":
            inputs = tuple(a[box.slices()] for a, box in zip((x, t), module.read_boxes().values(), strict=True))
        total, entropy = module(*inputs)
        total.backward()
        torch.optim.SGD(module.parameters(), lr=1.0).step()
        return total.detach(), entropy.detach(), module.full_state_dict()["last.weight"]

    ranks = run_threads(2, run)
    for slot in range(2):
        of_ranks = torch.stack([made[slot] for made in ranks])
        assert of_ranks.shape == (2,)
        torch.testing.assert_close(of_ranks.mean(), wanted[slot].detach(), rtol=1e-9, atol=1e-9)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    for *_, last in ranks:
        torch.testing.assert_close(last, model.last.weight.detach(), rtol=1e-9, atol=1e-9)
