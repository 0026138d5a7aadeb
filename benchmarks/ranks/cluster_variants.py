"""The ways to train a network that benchmarks.cluster compares: a plan, and what PyTorch has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common.networks import NETWORKS, Network
from layerwise.comm.base import Comm
from layerwise.plan import Plan
from layerwise.run.load import load

LOSS = nn.functional.cross_entropy


class Variant(ABC):
    """A way to train the network: `step` does one, on every rank that takes part."""

    ranks: tuple[int, ...]
    x: Tensor  # this rank's share
    y: Tensor
    sent: float = 0.0  # bytes that all ranks together hand over in a step

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)

    def step(self) -> float:
        """Returns the loss."""
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    @abstractmethod
    def loss(self) -> Tensor:
        """Forward."""


class Torch(Variant):
    """A plain module, or one that PyTorch wraps, on this rank's share of the batch."""

    def __init__(self, module: nn.Module, network: Network, batch: int, ranks: tuple[int, ...]) -> None:
        super().__init__(module)
        self.ranks = ranks
        place = ranks.index(dist.get_rank()) if dist.get_rank() in ranks else 0
        share = slice(place * batch // len(ranks), (place + 1) * batch // len(ranks))
        self.x, self.y = (t[share] for t in network.data(batch))

    def loss(self) -> Tensor:
        return LOSS(self.module(self.x), self.y)


class Ours(Variant):
    """A plan."""

    def __init__(self, network: Network, plan: Plan, comm: Comm) -> None:
        torch.manual_seed(0)
        self.plan = plan
        module = load(
            plan,
            network.build(),
            comm=comm,
            local_batch_norm=bool(plan.provenance["cost_options"]["local_batch_norm"]),
            example_inputs=(torch.empty(2, *network.input_shape),),
        )
        super().__init__(module)
        self.ranks = tuple(range(plan.gpus))
        share = module.share(plan.batch)
        self.x, self.y = (t[share] for t in network.data(plan.batch))

    def loss(self) -> Tensor:
        return LOSS(self.module(self.x), self.y)


def parameter_bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def sharded(module: nn.Module, mesh: DeviceMesh, *, again: bool) -> nn.Module:
    """FSDP2: a unit each for every linear layer and the convolutions, of a U-Net for each of its stages.

    again: gathered for the backward pass, too.
    """
    stages = [module[0]] if isinstance(module, nn.Sequential) else list(module.children())
    for part in [part for part in module.modules() if isinstance(part, nn.Linear)] + stages:
        if any(True for _ in part.parameters()):
            fully_shard(part, mesh=mesh, reshard_after_forward=again)
    return fully_shard(module, mesh=mesh, reshard_after_forward=again)


def build(name: str, made: Mapping[str, Plan], variant: str, comm: Comm) -> Variant:
    """The variant of that name, on this rank. Every rank builds the same ones in the same order."""
    network, world = NETWORKS[name], dist.get_world_size()
    batch, everyone = network.global_batch(world), tuple(range(world))
    torch.manual_seed(0)
    if variant in made:
        return Ours(network, made[variant], comm)
    module = network.build()
    if variant == "alone":  # one rank's share of the work, no communication, all ranks at once
        return Torch(module, network, max(1, batch // world) * world, everyone)
    if variant == "one rank":
        return Torch(module, network, batch, (0,))
    few = everyone[: min(world, batch)]
    size = parameter_bytes(module)
    if variant in ("FSDP2", "FSDP2 once"):
        again = variant == "FSDP2"
        mesh = DeviceMesh("cpu", list(few))  # every rank makes it, also one that has no samples
        if dist.get_rank() in few:
            module = sharded(module, mesh, again=again)
        result = Torch(module, network, batch, few)
        result.sent = (2 + again) * (len(few) - 1) * size  # all-gathers, a reduce-scatter
        return result
    group = dist.new_group(few) if len(few) < world else None
    if dist.get_rank() in few:
        module = DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=True)
        if variant == "DDP fp16":
            module.register_comm_hook(group, fp16_compress_hook)
    result = Torch(module, network, batch, few)
    result.sent = 2 * (len(few) - 1) * size / (2 if variant == "DDP fp16" else 1)
    return result
