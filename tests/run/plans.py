"""Random plans of small networks, and what one device makes of the same steps."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
from layerwise.models import find
from torch import Tensor, nn

from layerwise.comm.base import Comm
from layerwise.comm.solo import SoloComm
from layerwise.config import Config, SearchSpace, States
from layerwise.cost.model import CostModel, CostOptions
from layerwise.cost.price import complete, sent_bytes
from layerwise.cost.terms import TRAFFIC
from layerwise.geometry import Box
from layerwise.graph.fuse import fuse
from layerwise.graph.layer_graph import LayerGraph
from layerwise.graph.mixed import mixed
from layerwise.importers.load import Network, network_of
from layerwise.machine import load as load_profile
from layerwise.partition.sharding import held_configurations
from layerwise.plan import Plan
from layerwise.run.base import PREDICTED
from layerwise.run.load import load
from layerwise.run.local_tensor import local_tensor
from layerwise.run.schedule.schedule import parameter_boxes, places
from layerwise.run.state.dtensors import placement
from layerwise.search.find import search
from layerwise.search.make_plan import make_plan

KINDS = tuple(PREDICTED)
STATES: tuple[States, ...] = ("replicated", "sharded", "gathered")

# Name, input shape, options, batch: reduced so that a step takes some 10 ms.
SMALL = {
    "lenet5": ((1, 32, 32), {}, 4),
    "alexnet": ((3, 64, 64), {"width": 0.05, "num_classes": 10}, 4),
    "vgg16": ((3, 32, 32), {"width": 0.05, "num_classes": 10}, 4),
    "resnet18": ((3, 33, 33), {"width": 0.1, "num_classes": 10}, 4),
    "unet2d": ((3, 32, 32), {"width": 0.05}, 4),
    "unet3d": ((1, 16, 16, 16), {"width": 0.1}, 2),
}
LARGER = {
    "mlp2": ((1024,), {}, 4),
    "mlp3": ((1024,), {}, 4),
    "mnist_cnn": ((1, 32, 32), {"width": 0.25}, 4),
    "cifar10_cnn": ((3, 32, 32), {"width": 0.25}, 4),
    "cosmoflow:58": ((4, 58, 58, 58), {"width": 0.25}, 2),
    "resnet50": ((3, 64, 64), {"width": 0.05, "num_classes": 10}, 4),
    "alexnet_grouped": ((3, 227, 227), {"width": 0.1, "num_classes": 10}, 4),
    "densenet121": ((3, 32, 32), {"width": 0.1, "num_classes": 10}, 4),
    "inception_v3": ((3, 107, 107), {"width": 0.05, "num_classes": 10}, 4),
    "mobilenet_v2": ((3, 96, 96), {"width": 0.1, "num_classes": 10}, 4),
}


@dataclass
class Case:
    """A network, data for some steps, and its fused graph."""

    network: Network
    graph: LayerGraph
    inputs: list[Tensor]
    targets: list[Tensor]
    lr: float = 1e-4


class Awkward(nn.Module):
    """Tied weights, dropout, stochastic depth as torchvision has it, batch norm, and a shape that does not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.drop = nn.Dropout(0.3)
        self.first = nn.Linear(6 * 7 * 5, 9)
        self.shared = nn.Linear(9, 9)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(torch.relu(self.norm(self.conv(x))))
        x = self.first(x.flatten(1))
        if self.training:
            x = x * torch.empty(len(x), 1, dtype=x.dtype).bernoulli_(0.7).div_(0.7)
        return self.shared(torch.relu(self.shared(x)))


@cache
def small(name: str, steps: int = 2) -> Case:
    """A built-in network at reduced size, or "awkward", with normal inputs and random classes. No run changes it."""
    torch.manual_seed(0)
    if name == "awkward":
        return case(Awkward(), (3, 7, 5), 6, steps)
    shape, options, batch = (SMALL | LARGER)[name]
    made = case(find(name).build(**options), shape, batch, steps, trusted=True)
    # Batch norm over few samples, some fifty times one after the other, multiplies rounding: in Inception-v3 gradients
    # that are equal to 3e-12 in the first step are to 2e-9 in the third, at a rate of 1e-4. So a tenth of that.
    return replace(made, lr=1e-5) if name in LARGER else made


def case(module: nn.Module, shape: tuple[int, ...], batch: int, steps: int = 2, *, trusted: bool = False) -> Case:
    """A module with data; its output is (n, classes, ...). trusted: as built-in networks are, at any batch."""
    module = module.double()
    network = network_of(module, (torch.randn(2, *shape).double(),), batch, "test", trusted=trusted)
    graph = fuse(network.graph)
    (out,) = graph.layers[-1].specs
    inputs = [torch.randn(batch, *shape).double() for _ in range(steps)]
    targets = [torch.randint(0, out.shape[1], (batch, *out.shape[2:])) for _ in range(steps)]
    return Case(network, graph, inputs, targets)


# Of graphs by their digests, and of each its plans: several tests take the same one, and ranks that are threads do.
_PLANS: dict[str, list[tuple[LayerGraph, dict[tuple[int, int, str], Plan]]]] = {}


def random_plan(graph: LayerGraph, ranks: int, seed: int, io: str, choose: Callable[..., object] | None = None) -> Plan:
    """Any configuration of any layer, k included, contiguous or strided, on all ranks or fewer, in some order."""
    if choose is not None:
        return _drawn(graph, ranks, seed, io, choose)
    alike = _PLANS.setdefault(graph.digest, [])
    made = next((plans for other, plans in alike if other is graph or other == graph), None)
    if made is None:
        made = {}
        alike.append((graph, made))
    if (ranks, seed, io) not in made:
        made[ranks, seed, io] = _drawn(graph, ranks, seed, io, None)
    plan = made[ranks, seed, io]
    return replace(plan, predicted=dict(plan.predicted))  # which a test may write to


def _drawn(graph: LayerGraph, ranks: int, seed: int, io: str, choose: Callable[..., object] | None) -> Plan:
    rng = random.Random(seed)
    unequal = random.Random(f"weights {seed}")
    weights = [tuple(unequal.choices((1, 2, 5), k=ranks)) for _ in range(2)] if choose is None and seed % 2 else []
    dims = ("n", "c", "d", "h", "w", "l", "s", "k")
    space = SearchSpace(ranks, dims=dims, spread=True, weights=tuple(weights))
    pick = choose or rng.choice
    strategy = {layer.name: pick(held_configurations(layer, space)) for layer in graph.inner}
    if choose is None:
        draw = random.Random(f"states {seed}")  # none in some plans
        states = draw.choice([STATES[:1], STATES])
        strategy = {name: replace(config, states=draw.choice(states)) for name, config in strategy.items()}
    shares = weights[0] if weights else ()
    plan = priced(Plan("test", graph.digest, graph.batch, ranks, ranks, io, True, strategy, shares=shares), graph)
    orders = (rng.sample(range(ranks), ranks) for _ in range(6))
    shuffled = (replace(plan, device_order=tuple(order)) for order in orders)
    return next((one for one in shuffled if shared_out(graph, one)), plan)


def priced(plan: Plan, graph: LayerGraph) -> Plan:
    """With the bytes that it sends."""
    devices = load_profile("cpu").device_graph(gpus=plan.gpus, gpus_per_node=plan.gpus)
    return replace(
        plan, predicted=predicted_bytes(CostModel(graph, devices, CostOptions(io=plan.io), plan.shares), plan.strategy)
    )


def priced_mixed(plan: Plan, graph: LayerGraph, autocast: str | None) -> Plan:
    """As a search in mixed precision has it."""
    types = {"mixed_precision": {"autocast": autocast, "device": "cpu"}}
    return replace(priced(plan, mixed(graph, autocast, "cpu")), provenance={**plan.provenance, **types})


def predicted_bytes(model: CostModel, strategy: Mapping[str, Config]) -> dict[str, float]:
    """What `price` says is sent, without the seconds, which take it several times as long."""
    whole = complete(model, strategy)
    sent = [sent_bytes(model, layer, whole)[0] for layer in model.graph.layers]
    return {f"{kind}_bytes": sum(each[kind] for each in sent) for kind in TRAFFIC}


def recomputed(plan: Plan, graph: LayerGraph, seed: int, share: float = 0.6) -> Plan:
    """The same with some of its layers recomputed, at random."""
    rng = random.Random(seed)
    strategy = {
        name: replace(config, recompute=graph.differentiates(graph[name]) and rng.random() < share)
        for name, config in plan.strategy.items()
    }
    return priced(replace(plan, strategy=strategy), graph)


def shared_out(graph: LayerGraph, plan: Plan) -> bool:
    """Whether DTensors can have the parameters' boxes, with the plan's order of devices."""
    shapes = {name: p.shape for layer in graph.layers for name, p in layer.own_parameters()}
    boxes, order = parameter_boxes(graph, places(graph, plan)), plan.device_order
    every = {"": (Box((), ()),) * len(order), **boxes}
    return all(placement(each, shapes.get(name, ()), order) is not None for name, each in every.items())


SLOW = 100.0  # times as slow as the profile: reduced networks then have about the compute : communication of whole ones


def optimised_plan(graph: LayerGraph, ranks: int, dtype: str = "float32") -> Plan:
    """The fastest that the search finds for a cluster of nodes of two slow processors, gain it ever so little.

    They compute in bf16 as fast as in float32.
    """
    cpu = load_profile("cpu")
    processor = replace(
        cpu.processor,
        peak_flops={name: cpu.processor.peak("float32") / SLOW for name in ("float32", "bf16")},
        memory_bandwidth_bytes_per_s=cpu.processor.memory_bandwidth_bytes_per_s / SLOW,
    )
    levels = tuple(replace(level, latency_s=level.latency_s / 10) for level in cpu.levels)
    devices = replace(cpu, processor=processor, levels=levels).device_graph(gpus=ranks, gpus_per_node=2)
    model = CostModel(graph, devices, CostOptions(io="sample" if graph.batch >= ranks else "free", dtype=dtype))
    space = SearchSpace(ranks, spread=True)
    result = search(model, space)
    return make_plan("test", "slow cpu", model, space, replace(result, best=result.fastest), fused=True)


@dataclass
class Trained:
    """A rank's losses by step (its share of the mean), bytes of the last step, the whole state, its gradients."""

    losses: list[float]
    sent: dict[str, int]
    state: dict[str, Tensor]
    gradients: dict[str, tuple[object, Tensor]]


def train(given: Case, plan: Plan, comm: Comm, **options: object) -> Trained:
    """Some steps of SGD with momentum, in float64 where nothing else is said."""
    free = plan.io == "free"
    options = {"dtype": torch.float64, **options}
    module = load(plan, given.network, comm=comm, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=given.lr, momentum=0.9)
    losses, sent = [], {}
    for x, y in zip(given.inputs, given.targets, strict=True):
        optimizer.zero_grad()
        before = dict(comm.sent)
        if free:
            loss = F.cross_entropy(module(x), y)
            losses.append(loss.item())
        else:
            share = module.share()
            loss = F.cross_entropy(module(x[share]), y[share])
            losses.append(loss.item() * (share.stop - share.start) / len(x))
        loss.backward()
        sent = {kind: comm.sent[kind] - before.get(kind, 0) for kind in KINDS}
        optimizer.step()
    boxes = {shard.name: shard.box for shard in module.shards()}
    gradients = {
        name: (boxes[name], local_tensor(p.grad).clone())
        for name, p in module.named_parameters()
        if p.grad is not None and name in boxes
    }
    return Trained(losses, sent, module.full_state_dict(), gradients)


def plain(module: nn.Module, given: Case, **options: float) -> list[float]:
    """Trains a module by PyTorch alone in the same steps; returns the losses."""
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=given.lr, momentum=0.9, **options), []
    for x, y in zip(given.inputs, given.targets, strict=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(module(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@cache
def trained_alone(name: str) -> tuple[Case, Trained]:
    """A network of `small`, and what one device makes of its steps."""
    given = small(name)
    return given, train(given, random_plan(given.graph, 1, 0, "sample"), SoloComm())


def difference(a: Tensor, b: Tensor) -> float:
    """Largest relative to the largest element; what is zero but for rounding counts as 1e-3."""
    if not a.numel():
        return 0.0
    return float(
        (a.detach().double() - b.detach().double()).abs().max() / b.detach().double().abs().max().clamp(min=1e-3)
    )


def check_equal(ranks: list[Trained], single: Trained, plan: Plan, tolerance: float = 1e-9) -> None:
    """Losses, gradients, parameters and buffers are one device's; bytes sent are those predicted."""
    for step, loss in enumerate(single.losses):
        told = [rank.losses[step] for rank in ranks]
        assert abs((told[0] if plan.io == "free" else sum(told)) - loss) <= tolerance * abs(loss)
    for rank in ranks:
        assert rank.state.keys() == single.state.keys()
        for name, value in single.state.items():
            assert difference(rank.state[name], value) <= tolerance, name
        for name, (box, gradient) in rank.gradients.items():
            assert difference(gradient, single.gradients[name][1][box.slices()]) <= tolerance, name
    for kind in KINDS:
        assert sum(rank.sent[kind] for rank in ranks) == round(plan.predicted[PREDICTED[kind]]), kind
