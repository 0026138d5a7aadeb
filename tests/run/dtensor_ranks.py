"""Called in the ranks of test_dtensors: a loop of PyTorch's own on a split plan."""

import copy
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from layerwise.comm.base import Comm
from layerwise.config import NOT_DEGREES
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.importers.load import Network, network_of
from layerwise.plan import Plan, parse_strategy
from layerwise.run.load import load
from layerwise.run.local_tensor import local_tensor
from layerwise.run.parallel import ParallelModule
from tests.traces import by_rank_0

Cuts = list[dict[str, Any]]
Model = nn.Module
X = torch.randn(4, 8, 3, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

SHARDED, GATHERED = {"states": "sharded"}, {"states": "gathered"}
# By number of ranks: configurations of the four layers with parameters (two convolutions, two linear layers).
PLANS: dict[str, tuple[int, Cuts]] = {
    "filters": (2, [{"c": 2}, {"n": 2}, {"c": 2}, {"k": 2}]),
    "channels": (2, [{"n": 2}, {"k": 2}, {"k": 2}, {"c": 2}]),
    "mixed": (4, [{"c": 4}, {"n": 2, "c": 2}, {"c": 2, "k": 2}, {"n": 4}]),
    "spatial": (4, [{"h": 2, "c": 2}, {"c": 2, "k": 2}, {"k": 4}, {"c": 4}]),
    "states": (4, [{"n": 4} | SHARDED, {"n": 2, "c": 2} | GATHERED, {"c": 2} | SHARDED, {"n": 4} | GATHERED]),
    "fewer": (4, [{"c": 4}, {"n": 2}, {"c": 2, "placement": "strided"}, {}]),  # layers on 2 of 4 ranks, and on one
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)  # a bias before a batch norm: its gradient is rounding
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 4, 3, padding=1)
        self.hidden = nn.Linear(4 * 36, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.norm(self.first(x)).relu()).relu()
        return self.head(self.hidden(x.flatten(1)).relu())


@cache
def original() -> Net:
    torch.manual_seed(0)
    return Net().double()


@cache
def net() -> tuple[Net, Network]:
    module = original()
    return module, network_of(module, (X[0],), 8, "test")


def plan(ranks: int, cuts: Cuts) -> Plan:
    _, network = net()
    graph = fuse(network.graph)
    wanted = dict(zip(("first", "second", "hidden", "head"), cuts, strict=True))
    strategy = {}
    for layer in graph.inner:
        degrees = wanted.get(layer.name.split("/")[-1], wanted.get(layer.name, {"n": ranks}))
        rooms = {d.label for d in layer.space.dims}
        strategy[layer.name] = {k: v for k, v in degrees.items() if k in rooms or k in NOT_DEGREES}
    return Plan("test", graph.digest, graph.batch, ranks, ranks, "sample", True, parse_strategy(strategy, graph, ranks))


def made(comm: Comm, cuts: Cuts) -> ParallelModule:
    torch.set_num_threads(1)
    with by_rank_0(comm):
        _, network = net()
    return load(plan(comm.size, cuts), network, comm=comm, dtype=torch.float64)


def loss(out: Tensor) -> Tensor:
    return out.square().sum(1).mean()


def share(model: Model) -> slice:
    return model.share() if isinstance(model, ParallelModule) else slice(None)


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, 0.05, momentum=0.9, weight_decay=0.01),
    "momentum": lambda ps: torch.optim.SGD(ps, 0.05, momentum=0.9, nesterov=True),
    "sgd_loop": lambda ps: torch.optim.SGD(ps, 0.05, momentum=0.9, foreach=False),
    "adamw": lambda ps: torch.optim.AdamW(ps, 0.01, foreach=True),
    "adamw_fused": lambda ps: torch.optim.AdamW(ps, 0.01, fused=True),
    "adam": lambda ps: torch.optim.Adam(ps, 0.01, amsgrad=True),
    "rprop": lambda ps: torch.optim.Rprop(ps, 0.01, foreach=False),
}


def clip(model: Model) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def clip_by_hand(model: Model) -> Tensor:
    total = sum(p.grad.norm().item() ** 2 for p in model.parameters() if p.grad is not None) ** 0.5
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(min(1.0, 0.5 / total))
    return torch.tensor(total)


def clip_as_old_tutorials(model: Model) -> Tensor:
    norms = [p.grad.detach().data.norm(2) for p in model.parameters() if p.grad is not None]
    total = torch.norm(torch.stack(norms), 2)
    for p in model.parameters():
        if p.grad is not None:
            p.grad.data.mul_(0.5 / (total + 1e-6))
    return total


def largest(model: Model) -> Tensor:
    assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None)
    return torch.tensor(max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None))


def value(model: Model) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


def masked(model: Model) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad[p.detach().abs() < 0.05] = 0
        p.data[p.abs() < 0.01] = 0.0


def nothing(model: Model) -> None:
    pass


ACTIONS = {f.__name__: f for f in (clip, clip_by_hand, clip_as_old_tutorials, largest, value, masked, nothing)}


def number(norm: Tensor | None) -> float | None:
    return None if norm is None else float(norm)


def steps(model: Model, optimizer: Optimizer, action: str, first: int = 0, last: int = 4) -> list[float | None]:
    seen = []
    for x in X[first:last]:
        optimizer.zero_grad()
        loss(model(x[share(model)])).backward()
        seen.append(number(ACTIONS[action](model)))
        optimizer.step()
    return seen


def whole(model: Model) -> dict[str, Tensor]:
    return model.full_state_dict() if isinstance(model, ParallelModule) else model.state_dict()


Numbers = tuple[list[float | None], dict[str, Tensor]]  # norms by step, and the state in the end


def trained(comm: Comm, cuts: Cuts, cases: list[tuple[str, str]]) -> list[Numbers]:
    """By optimizer and what the loop does with gradients."""
    told = []
    for optimizer, action in cases:
        model = made(comm, cuts)
        assert all(isinstance(p, DTensor) for p in model.parameters())
        told.append((steps(model, OPTIMIZERS[optimizer](model.parameters()), action), whole(model)))
    return told


def by_hand(comm: Comm, cuts: Cuts) -> None:
    """What a loop's own tools do with split parameters, or are told."""
    model = made(comm, cuts)
    weight, before = model.state_dict()["first.weight"], model.full_state_dict()
    with pytest.raises(RuntimeError):
        weight.untyped_storage().data_ptr()
    with pytest.raises(LayerwiseError, match=r"accelerator\.save\(model\.full_state_dict\(\), file\)"):
        weight.storage().data_ptr()
    with pytest.raises(LayerwiseError, match="a collective outside layerwise, or DistributedDataParallel around a mod"):
        dist.all_reduce(model.get_parameter("first.weight").detach())
    with torch.no_grad():
        for p in model.parameters():  # as `vector_to_parameters` writes them
            p.data = p.data * 0.5
            with pytest.raises(LayerwiseError, match="changes the shape or type of a parameter"):
                p.data = p.data.float()
    after = model.full_state_dict()
    assert all(torch.equal(after[name], before[name] * 0.5) for name, _ in model.named_parameters())
    # a DTensor of the user's own is left to PyTorch
    mine = distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (comm.size,)), [Shard(0)])
    torch.manual_seed(comm.rank)
    drawn = torch.rand_like(mine).to_local()
    torch.manual_seed(comm.rank)
    assert torch.equal(drawn, torch.rand(8 // comm.size))
    assert mine.full_tensor().sum().item() == 28.0


def scaled(comm: Comm | None, cuts: Cuts, bad: int) -> Numbers:
    """With GradScaler; in one step a gradient is infinite, of which rank `bad` has a part."""
    model = made(comm, cuts) if comm is not None else net_again()
    optimizer, scaler, scales = torch.optim.SGD(model.parameters(), 0.05), torch.amp.GradScaler("cpu", 1024.0), []
    for i, x in enumerate(X):
        optimizer.zero_grad()
        scaler.scale(loss(model(x[share(model)]))).backward()
        if i == 1:
            gradient = dict(model.named_parameters())["hidden.weight"].grad
            if comm is None:
                gradient[0, 0] = float("inf")
            elif comm.rank == bad:
                gradient.to_local()[0, 0] = float("inf")
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, whole(model)


def half(comm: Comm | None, cuts: Cuts) -> tuple[list[float], dict[str, Tensor]]:
    """In float32 with float16 by autocast and GradScaler, whose first scale is too large, the next well below."""
    if comm is None:
        model: Model = net_again().float()
    else:
        torch.set_num_threads(1)
        with by_rank_0(comm):
            net()
        model = load(plan(comm.size, cuts), net()[1], comm=comm, dtype=torch.float32)
    optimizer, scales = torch.optim.SGD(model.parameters(), 0.05), []
    scaler = torch.amp.GradScaler("cpu", 2.0**30, backoff_factor=2.0**-20)
    for x in (*X, *X):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = model(x[share(model)].float())
        assert out.dtype == torch.float16
        scaler.scale(loss(out.float())).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, whole(model)


def net_again() -> Net:
    return copy.deepcopy(original())


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "squares": lambda out, _: loss(out),
    "cross_entropy": F.cross_entropy,
    "mean": lambda out, _: out.mean(),
}


def penalised(comm: Comm | None, cuts: Cuts, how: str) -> tuple[list[float], dict[str, Tensor]]:
    """The sums over the ranks of the losses, each of its own samples and of a penalty, and what is trained."""
    model, losses = made(comm, cuts) if comm is not None else net_again(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for x in X:
        optimizer.zero_grad()
        penalty = sum(p.abs().sum() + p.norm(dim=0).sum() for p in model.parameters())
        assert not isinstance(penalty, DTensor)
        mine = share(model)
        total = 0.1 * penalty
        total += LOSSES[how](model(x[mine]), (torch.arange(len(x)) % 4)[mine])
        losses.append(total.item())
        total.backward()
        optimizer.step()
    return losses, whole(model)


def written(comm: Comm | None, cuts: Cuts) -> dict[str, Tensor]:
    """Parameters that all ranks have, written from those that some have; without a communicator on one device."""
    model = copy.deepcopy(original()) if comm is None else made(comm, cuts)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        parameters["second.bias"].copy_(parameters["head.bias"])
        for name in ("first.weight", "second.weight"):
            parameters[name].mul_(parameters["head.weight"].norm())
    here = {f"{name}, here": local_tensor(parameters[name]).detach() for name in ("second.bias", "second.weight")}
    return whole(model) | here


def own_counts(comm: Comm | None, cuts: Cuts) -> dict[str, Tensor]:
    """Each rank divides its loss and the penalty by a number of its own, as of the pixels that it has labels of."""
    model = made(comm, cuts) if comm is not None else net_again()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for x in X:
        optimizer.zero_grad()
        penalty = torch.stack([p.norm() for p in model.parameters()]).sum()
        if comm is None:
            parts = model(x).square().sum(1).chunk(2)
            total = sum((part.sum() + penalty) / (rank + 1) for rank, part in enumerate(parts)) / 2
        else:
            total = (model(x[share(model)]).square().sum() + penalty) / (comm.rank + 1)
            assert type(total) is Tensor  # so it is logged and sent as any other
            assert f"{penalty:.3f}" == f"{penalty.item():.3f}"
            assert float(torch.zeros(()).add_(penalty.detach())) == pytest.approx(penalty.item())
        total.backward()
        optimizer.step()
    return whole(model)


class Scaled(nn.Module):
    """With a scale that it has learnt, which is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(4, 8), nn.Linear(8, 4), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu()) * self.scale


def scale_on_one_rank(comm: Comm | None) -> dict[str, Tensor]:
    """Penalised, where the other rank has none of it; and once more outside of the model."""
    torch.manual_seed(0)
    model: Model = Scaled().double()
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if comm is not None:
        network = network_of(model, (x,), 8, "test")
        graph = fuse(network.graph)
        cuts = {layer.name: {"c": 2} if layer.name == "first" else {} for layer in graph.inner}
        strategy = parse_strategy(cuts, graph, comm.size)
        model = load(
            Plan("test", graph.digest, 8, 2, 2, "sample", True, strategy), network, comm=comm, dtype=torch.float64
        )
    if comm is not None:
        with pytest.raises(LayerwiseError, match=r"torch\.autograd\.grad or backward\(inputs=\.\.\.\) asked"):
            torch.autograd.grad(model(x[share(model)]).mean(), [model.scale], allow_unused=True)
    for optimizer in (
        torch.optim.SGD(model.parameters(), 0.05, momentum=0.9),
        torch.optim.AdamW(model.parameters(), 0.01),
    ):
        for _ in range(2):
            optimizer.zero_grad()
            mine = share(model)
            outside = model.scale if isinstance(optimizer, torch.optim.AdamW) else 1.0
            total = F.cross_entropy(model(x[mine]) * outside, torch.arange(8)[mine] % 4)
            total = total + 0.1 * sum(p.norm() for p in model.parameters())
            total.backward()
            optimizer.step()
    return whole(model)


def beside(comm: Comm, cuts: Cuts) -> None:
    """Parameters beside tensors of a rank's own: what is read is plain, and a rank's own; what is written is alike."""
    model = made(comm, cuts)
    full = model.full_state_dict()
    for name, p in model.named_parameters():
        kept, own = torch.zeros_like(full[name]), torch.full_like(full[name], float(comm.rank))
        with torch.no_grad():
            assert torch.equal(kept.lerp_(p, 0.5), 0.5 * full[name])
            assert torch.equal(own + p, own + full[name])
            assert p.tolist() == full[name].tolist() == p.numpy().tolist()
            assert type(p.square()) is type(p)
            p.add_(kept).sub_(kept)
            torch._foreach_mul_([p], [torch.full_like(kept, 1.0)])
            for write in (Tensor.add_, Tensor.copy_, lambda p, x: torch._foreach_add_([p], [x])):
                if own.numel() > 1:
                    with pytest.raises(LayerwiseError, match="a tensor that differs between ranks"):
                        write(p, own)
        with pytest.raises(LayerwiseError, match="a tensor that differs between ranks"):
            p.detach().mul_(torch.tensor(float(comm.rank)))
        p.grad = None
        (own * p).sum().backward()
        assert isinstance(p.grad, DTensor)
        assert torch.equal(p.grad.full_tensor(), torch.full_like(kept, (comm.size - 1) / 2))
        p.grad = None
        number = p.norm()
        assert type(number) is Tensor
        number -= torch.tensor(float(comm.rank))
        assert number.item() == pytest.approx(float(full[name].norm()) - comm.rank)
        assert type(p[0]) is not type(p)


def messages(comm: Comm, cuts: Cuts) -> dict[str, int]:
    """How many collectives optimizers and clipping ask for."""
    model, counts = made(comm, cuts), dict[str, int]()

    def count(what: str, act: Callable[[], object]) -> None:
        names = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast")
        with ExitStack() as stack, CollectivesMode() as functional:
            mocks = [
                stack.enter_context(mock.patch(f"torch.distributed.{n}", wraps=getattr(torch.distributed, n)))
                for n in names
            ]
            act()
        counts[what] = sum(one.call_count for one in mocks) + functional.count

    for kind, how in (("adamw", {"foreach": True}), ("loop", {"foreach": False}), ("fused", {"fused": True})):
        optimizer = torch.optim.AdamW(model.parameters(), **how)
        model(X[0][model.share()]).square().mean().backward()
        count(kind, optimizer.step)
    count("clipping", lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    count("a gather", lambda: [p.full_tensor() for p in model.parameters()])
    return counts


class CollectivesMode(TorchDispatchMode):
    """Counts PyTorch's functional collectives."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "_c10d_functional" and "wait" not in func._schema.name
        return func(*args, **(kwargs or {}))


def moved(comm: Comm, cuts: Cuts) -> None:
    """`to` keeps the parameters that an optimizer has; a part of them frozen; thawed."""
    model = made(comm, cuts)
    before = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    steps(model, optimizer, "nothing", 0, 1)
    assert model.to("cpu") is model
    model.float()
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert {p.dtype for p in model.parameters()} == {torch.float32} == {p.grad.dtype for p in model.parameters()}
    assert {v.dtype for v in model.state_dict().values()} <= {torch.float32, torch.int64}
    model.double()
    steps(model, torch.optim.SGD(model.parameters(), 0.05), "clip", 1, 2)
    frozen = dict(model.named_parameters())["hidden.weight"].requires_grad_(False)
    kept, grad = frozen.full_tensor().clone(), frozen.grad
    steps(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.05), "nothing", 2, 3)
    assert torch.equal(kept, frozen.full_tensor())
    assert grad is None or frozen.grad is not None
    frozen.requires_grad_()
    steps(model, torch.optim.SGD(model.parameters(), 0.05), "nothing", 3, 4)
    assert not torch.equal(kept, frozen.full_tensor())


def drawn(comm: Comm, cuts: Cuts) -> str | tuple[Tensor, Tensor]:
    """Dropout of a parameter, whose square's gradient is 8 p or 0; or the refusal of a PyTorch that cannot."""
    torch.manual_seed(100 + comm.rank)
    p = made(comm, cuts).get_parameter("first.weight")
    try:
        total = nn.functional.dropout(p, 0.5).square().sum()
    except LayerwiseError as error:
        return str(error)
    total.backward()
    assert isinstance(p, DTensor)
    assert isinstance(p.grad, DTensor)
    return total.detach(), p.grad.full_tensor() / p.detach().full_tensor()
