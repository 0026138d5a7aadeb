"""Attention whose keys and values come a piece at a time, and masks that are computed box by box."""

import copy
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common.live import Live
from layerwise.comm.base import Comm
from layerwise.config import Config
from layerwise.cost.memory.step import peak_bytes
from layerwise.cost.model import CostModel, CostOptions
from layerwise.cost.price import complete, price
from layerwise.graph.fuse import fuse
from layerwise.importers.load import Network, network_of
from layerwise.importers.torch.calls import recipes
from layerwise.machine import load as load_profile
from layerwise.ops.nn import attention
from layerwise.ops.nn.attention import Attention
from layerwise.plan import Plan
from layerwise.run.load import load
from tests.comm.thread import run_threads
from tests.run.plans import difference, random_plan
from tests.run.test_inference import check, trained

KINDS = ["none", "causal", "numbers", "flags", "grouped", "no keys", "least"]


class Attend(nn.Module):
    """One attention of `length` positions; its mask is computed in the forward pass, as diffusers' decoders do."""

    def __init__(self, kind: str, width: int, length: int) -> None:
        super().__init__()
        self.kind, self.length = kind, length
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        if kind == "grouped":
            self.k, self.v = (nn.Linear(width, width // 2) for _ in range(2))

    def mask(self, x: Tensor) -> Tensor | None:
        frame = torch.arange(self.length) // 3
        a, b = torch.meshgrid(frame, frame, indexing="xy")
        if self.kind == "numbers":
            return torch.where(a <= b, 0, -float("inf")).to(x.dtype)[None].expand(len(x), -1, -1)[:, None]
        if self.kind == "least":  # as transformers has it: a query that sees no key sees all of them alike
            return torch.zeros_like(a, dtype=x.dtype).masked_fill(a >= b, torch.finfo(x.dtype).min)
        if self.kind == "flags":
            return a <= b
        return a < b if self.kind == "no keys" else None

    def forward(self, x: Tensor) -> Tensor:
        heads = 2 if self.kind == "grouped" else 1
        q, k, v = (f(x).unflatten(2, (-1, x.shape[2] // (2 * heads))).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(
            q, k, v, self.mask(x), is_causal=self.kind == "causal", enable_gqa=self.kind == "grouped"
        )
        return self.out(y.transpose(1, 2).flatten(2))


def made(kind: str, width: int, length: int) -> tuple[nn.Module, Tensor, Network]:
    torch.manual_seed(0)
    model, x = Attend(kind, width, length).double().eval(), torch.randn(1, length, width, dtype=torch.float64)
    return model, x, network_of(copy.deepcopy(model), (x,), 1, kind, trusted=True)


def split(network: Network, ranks: int, label: str = "s") -> tuple[Plan, CostModel]:
    """Every layer that can be is split along `label`."""
    graph = fuse(network.graph)
    plan = random_plan(graph, ranks, 0, "free", random.Random(0).choice)
    configs = {x.name: Config.of({label: ranks}) if x.space.max_degree(label) > 1 else Config() for x in graph.inner}
    machine = load_profile("cpu").device_graph(ranks, ranks)
    model = CostModel(graph, machine, CostOptions(dtype="float64", kind="inference", io="free"))
    return replace(plan, strategy=configs), model


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MUCH", 0)
    monkeypatch.setattr(attention, "SCORES", 40)
    monkeypatch.setattr(recipes, "WIDE", 16)


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize(("kind", "ranks"), [*((kind, 3) for kind in KINDS), ("numbers", 2), ("grouped", 4)])
def test_outputs_and_bytes(kind: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, network = made(kind, 8, 13)
    plan, costs = split(network, ranks)
    predicted = price(costs, complete(costs, plan.strategy)).bytes
    seen = list[int]()
    run_pieces = Attention.run_pieces

    def counted(self: Attention, local: object, inputs: object, pieces: object) -> Tensor:
        bounds = list[int]()

        def noted() -> object:
            for lo, hi, tensors in pieces:
                bounds.append(hi - lo)
                yield lo, hi, tensors

        out = run_pieces(self, local, inputs, noted())
        seen.extend(bounds)
        return out

    monkeypatch.setattr(Attention, "run_pieces", counted)
    check(model, network, plan, x, predicted)
    assert len(seen) == ranks * ranks
    assert max(seen) < 13


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("seed", range(4))
def test_any_plan(seed: int) -> None:
    """Heads, samples and positions are split, on some of the ranks."""
    model, x, network = trained("words")
    ranks = 2 + 2 * (seed % 2)
    check(model, network, random_plan(fuse(network.graph), ranks, seed, "sample", random.Random(seed).choice), x)


def test_memory_falls_with_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MUCH", 0)
    monkeypatch.setattr(attention, "SCORES", 1 << 10)
    monkeypatch.setattr(recipes, "WIDE", 16)
    _, x, network = made("numbers", 32, 480)
    peaks = []
    for ranks in (1, 2, 4):
        plan, costs = split(network, ranks)
        predicted = float(peak_bytes(costs, complete(costs, plan.strategy)).max())

        def run(comm: Comm, plan: Plan = plan) -> float:
            module = load(plan, network, comm=comm, dtype=torch.float64).eval()
            live = Live([*module.parameters(), x])
            with torch.inference_mode(), live:
                module(x)
            return float(live.peak)

        measured = max(run_threads(ranks, run))
        peaks.append((predicted, measured))
        if ranks > 1:  # one rank runs the model as it is written, which has more than one copy of its mask
            # A rank's pieces are copies until the other threads have taken them, of up to two rounds.
            assert predicted == pytest.approx(measured, rel=0.2), peaks
    assert peaks[0][1] > 1.7 * peaks[1][1] > 2.5 * peaks[2][1], peaks


class Shifted(nn.Module):
    """Constants that are saved for the backward pass, one of them made for each sample, and not as a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) * (torch.arange(x.shape[1])[:, None] * torch.arange(6)).to(x.dtype).cos()
        return self.second(y * (torch.full(x.shape, 0.5, dtype=x.dtype) + 1))


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("seed", range(4))
def test_constants_after_inference(seed: int) -> None:
    """Boxes that are first read in inference mode are read in training later, also by batches of another size."""
    torch.manual_seed(0)
    model, x = Shifted().double(), torch.randn(4, 5, 6, dtype=torch.float64)
    network = network_of(copy.deepcopy(model), (x[:2],), 4, "shifted")
    plan = random_plan(fuse(network.graph), 2, seed, "sample", random.Random(seed).choice)
    stepped = copy.deepcopy(model)
    stepped(x).square().mean().backward()
    torch.optim.SGD(stepped.parameters(), lr=1.0).step()

    def run(comm: Comm) -> None:
        module = load(plan, network, comm=comm, dtype=torch.float64)
        with torch.inference_mode():
            assert difference(module(x[module.share()]), model(x)[module.share()]) <= 1e-9
        module(x[module.share()]).square().mean().backward()
        torch.optim.SGD(module.parameters(), lr=1.0).step()
        few = x[:2][module.share(2)]
        assert difference(module(few), stepped(few)) <= 1e-9

    run_threads(2, run)


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("autocast", [True, False])
def test_large_scores_in_half_precision(autocast: bool) -> None:
    """Scores are summed up in float32, as PyTorch's kernels do it, though what comes in has eight bits."""
    torch.manual_seed(0)
    x = torch.randn(1, 13, 8) * 8
    model = Attend("numbers", 8, 13).eval()
    x, model = (x, model) if autocast else (x.bfloat16(), model.bfloat16())
    network = network_of(copy.deepcopy(model), (x,), 1, "half", trusted=True)
    plan, _ = split(network, 2)

    def run(comm: Comm) -> Tensor:
        module = load(plan, network, comm=comm, dtype=x.dtype).eval()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return module(x).clone()

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = model(x)
    for out in run_threads(2, run):
        assert out.dtype == expected.dtype
        assert difference(out.float(), expected.float()) <= 3e-3
