"""What the four ranks of a pool (tests/comm/pool.py) are called to do in groups of two, or as two replicas of two."""

import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from layerwise.api.fit import fit
from layerwise.api.machine import cache_file
from layerwise.api.parallelize import parallelize
from layerwise.api.save import save
from layerwise.api.world import join
from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from layerwise.machine import load as load_profile
from layerwise.measure import check
from layerwise.train.data import order
from tests.api.keywords import keywords
from tests.api.ranks import short_rounds
from tests.api.script import BATCH, SEED, data, network, sgd, step
from tests.traces import once

STEPS = (2, 3)  # of each group
SPLIT = ({"0": {"h": 2}, "5": {"c": 2}, "7": {"n": 1}}, {"0": {"n": 2}, "2": {"c": 2}, "5": {"k": 2}})
Trained = tuple[list[float], dict[str, Tensor]]


def net(group: int) -> nn.Module:
    """Another one in each group."""
    if group == 0:
        return network()
    torch.manual_seed(SEED)
    layers = nn.Conv2d(1, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 4, 3, stride=2), nn.Flatten()
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(36, 10)).double()


def steps(model: nn.Module, count: int, share: slice = slice(None), batch: int = BATCH) -> list[float]:
    """Trains; the losses."""
    optimizer, (x, y) = sgd(model), data(batch * count).tensors
    batches = zip(x.split(batch), y.split(batch), strict=True)
    return [step(model, x[share], y[share], optimizer) for x, y in batches]


def mesh() -> DeviceMesh:
    """2 × 2."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "domain"))


def part(model: nn.Module, ranks: object, samples: int = BATCH // 2, **how: Any) -> Any:
    """Parallel, as a user's script has it."""
    x = data().tensors[0][:samples]
    return parallelize(model, x, device_mesh=ranks, **keywords({"verbose": False, "profile": "cpu", **how}))


@once()
def own_models(comm: Comm, folder: str) -> Trained:
    """A model, a plan and a loop in each group; then one checkpoint of all, by torch's DCP, and a file of each."""
    group = comm.rank // 2
    model = part(net(group), mesh()["domain"], strategy=SPLIT[group])
    assert (model.comm.size, model.plan.gpus, model.comm.members.ranks) == (2, 2, (2 * group, 2 * group + 1))
    losses = steps(model, STEPS[group], model.share())
    trained = model.full_state_dict()
    part(network(), DeviceMesh("cpu", torch.arange(4)), 2, strategy={"7": {"n": 1}})  # on rank 0, as in group 0
    if group == 0:
        assert torch.equal(model.state_dict()["7.weight"].full_tensor(), trained["7.weight"])
    dcp.save({f"group {group}": model.state_dict()}, checkpoint_id=f"{folder}/dcp")
    save(model, f"{folder}/{group}.pt")
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    dcp.load({f"group {group}": model.state_dict()}, checkpoint_id=f"{folder}/dcp")
    loaded = model.full_state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in trained.items())
    return losses, trained


@once()
def some_ranks(comm: Comm) -> Trained | Tensor | None:
    """Ranks 0 and 2 answer, rank 3 trains by itself, and rank 1 does other things, for which nobody waits."""
    pair, single = dist.new_group([0, 2]), dist.new_group([3])
    if comm.rank == 1:
        time.sleep(1)
        return None
    if comm.rank == 3:
        model = part(network(), single, BATCH)
        return steps(model, 2), model.full_state_dict()
    model = part(network(), pair, strategy=SPLIT[0], inference=True)
    with torch.inference_mode():
        answers = [model(x[model.share()]) for x in data().tensors[0].split(BATCH)]
    return torch.stack(answers)


@once()
def replicas(comm: Comm, how: dict[str, Any]) -> tuple[Trained, dict[str, str]]:
    """A 2-D mesh; also each layer's configuration. With a batch of two every rank feeds both."""
    few = how.get("batch")
    model = part(network(SEED + comm.rank), mesh(), few or BATCH // 4, **how)
    assert (model.comm.size, model.plan.io) == (4, "free" if few else "sample")
    losses = steps(model, 2, slice(None) if few else model.share(), few or BATCH)
    return (losses, model.full_state_dict()), {name: str(config) for name, config in model.plan.strategy.items()}


@once()
def fitted(comm: Comm) -> dict[str, Tensor]:
    """`fit` in each group."""
    model = network()
    optimizer, loss = sgd(model), nn.CrossEntropyLoss()
    how = keywords({"verbose": False, "profile": "cpu", "strategy": SPLIT[0]})
    samples, back = data(2 * BATCH), order(2 * BATCH, 0, 0).argsort()
    fit(
        model,
        tuple(x[back] for x in samples.tensors),
        loss,
        optimizer,
        batch=BATCH,
        device_mesh=mesh()["domain"],
        **how,
    )
    return model.state_dict()


def measured(comm: Comm) -> tuple[str, list[dict[str, Any]]]:
    """Each group measures its links and layers, at the same time, twice; the file, and what it says after each."""
    ranks, found = mesh()["domain"], []
    check.LATENCY = check.BANDWIDTH = 1e6  # links measured in so short a time are as noisy as they like
    file = cache_file(join(comm.device, ranks))
    for _ in range(2):
        with short_rounds():
            model = part(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double(), ranks, profile=None, measure_s=0.1)
        profile = load_profile(file)
        assert profile.links is not None
        assert model.plan.provenance["profile"] == profile.name
        (times,) = profile.layers
        found.append({"links": profile.links.as_json(), "dtype": times.conditions.dtype, "cells": times.count})
        model.comm.barrier()  # before rank 0 writes again
    return str(file), found


@once()
def refusals(comm: Comm) -> dict[str, str]:
    """The sentences."""
    cube = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("a", "b", "c"))
    other = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][1 - comm.rank // 2]
    flat, plan = mesh()["domain"], None
    plan = part(network(), flat, strategy="data").plan
    whole = DeviceMesh("cpu", torch.arange(4))
    tries: dict[str, Any] = {
        "3-D": lambda: part(network(), cube),
        "not in it": lambda: part(network(), other),
        "too many": lambda: part(network(), DeviceMesh("cpu", torch.tensor([0, 9]), _init_backend=False)),
        "no mesh": lambda: part(network(), "domain"),
        "a plan of another size": lambda: part(network(), whole, strategy=plan),
        "a plan for more": lambda: part(network(), flat, strategy=part(network(), whole, 2, strategy="data").plan),
        "a plan across replicas": lambda: part(
            network(), mesh(), 2, strategy=part(network(), whole, 2, strategy="model").plan
        ),
        "by hand across replicas": lambda: part(network(), mesh(), 2, strategy={"0": {"h": 4}}),
        "too few samples": lambda: part(network(), mesh(), 1, batch=1),
        "a group and a comm": lambda: part(network(), flat, comm=comm),
        "other arguments": lambda: part(network(), flat, 4 if comm.rank != 3 else 3),
        "DDP": lambda: nn.parallel.DistributedDataParallel(part(network(), flat, strategy="data")),
    }
    said = {}
    for name, act in tries.items():
        try:
            act()
        except LayerwiseError as error:
            said[name] = str(error)
    return said


class Parts(nn.Module):
    """A stem and a head of the user's, and an encoder between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.stem, self.head = nn.Conv2d(1, 4, 3, padding=1).double(), nn.Linear(12, 10).double()
        layers = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        self.encoder: Any = nn.Sequential(*layers, nn.Linear(64, 12)).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(self.stem(x)).tanh())
        return out


@once()
def encoder(comm: Comm, strategy: Any) -> Trained:
    """The encoder is split over all ranks; the rest is replicated by DistributedDataParallel."""
    model: Any = Parts()
    example = torch.zeros(BATCH // comm.size, 4, 8, 8, dtype=torch.float64)
    how = keywords({"verbose": False, "profile": "cpu", "strategy": strategy})
    model.encoder = inner = parallelize(model.encoder, example, device_mesh=mesh(), **how)
    tensors = (*inner.named_parameters(), *inner.named_buffers())
    model._ddp_params_and_buffers_to_ignore = [f"encoder.{name}" for name, _ in tensors]
    losses = steps(nn.parallel.DistributedDataParallel(model), 2, inner.share())
    rest = {f"{part}.{name}": p for part in ("stem", "head") for name, p in getattr(model, part).state_dict().items()}
    return losses, rest | {f"encoder.{name}": value for name, value in inner.full_state_dict().items()}
