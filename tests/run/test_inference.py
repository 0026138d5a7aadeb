"""Law: in evaluation every rank has one device's outputs, and what is sent is what inference is priced with."""

import copy
import random
from collections import Counter
from collections.abc import Mapping
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import layerwise
from layerwise.comm.base import Comm
from layerwise.cost.model import CostModel, CostOptions
from layerwise.cost.price import complete, price
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.importers.load import Network, network_of
from layerwise.machine import load as load_profile
from layerwise.plan import Plan
from layerwise.run.base import PREDICTED
from layerwise.run.load import load
from tests.api.keywords import quiet
from tests.comm.thread import run_threads
from tests.run.plans import difference, random_plan
from tests.run.test_bytes import Frames, Images, Words

pytestmark = pytest.mark.usefixtures("models_traced_once")


@cache
def trained(name: str) -> tuple[nn.Module, Tensor, Network]:
    """A module whose running statistics are not those of the batch, and a batch."""
    torch.manual_seed(0)
    model = {"words": Words, "images": Images, "frames": Frames}[name]().double()
    shape = (4, 2, 3, 4, 4) if name == "frames" else (4, 4, 6, 6)
    x = torch.randint(12, (4, 6)) if name == "words" else torch.randn(shape, dtype=torch.float64)
    if name == "images":
        model(3 * x + 1)
    return model, x, network_of(copy.deepcopy(model), (x[:2],), 4, name)


def check(
    model: nn.Module, network: Network, plan: Plan, x: Tensor, predicted: Mapping[str, float] | None = None
) -> None:
    """Outputs of all ranks' samples are one device's, and bytes are those predicted."""

    def run(comm: Comm) -> tuple[slice, Tensor, Counter[str]]:
        module = load(plan, network, comm=comm, dtype=torch.float64).eval()
        before = comm.sent.copy()
        with torch.inference_mode():
            out = module(x[module.share()])
        return module.share(), out.clone(), comm.sent - before

    found = run_threads(plan.gpus, run)
    with torch.no_grad():
        expected = copy.deepcopy(model).eval()(x)
    assert all(difference(out, expected[share]) <= 1e-9 for share, out, _ in found)
    if predicted is not None:
        sent = {kind: sum(here[kind] for *_, here in found) for kind in PREDICTED}
        assert sent == {kind: pytest.approx(predicted[told.removesuffix("_bytes")]) for kind, told in PREDICTED.items()}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["words", "images", "frames"])
def test_outputs_and_bytes(name: str, seed: int) -> None:
    model, x, network = trained(name)
    ranks = 2 + 2 * (seed % 2)
    graph = fuse(network.graph)
    plan = random_plan(graph, ranks, seed, "sample", random.Random(seed).choice)  # without shared-out states
    machine = load_profile("cpu").device_graph(ranks, ranks)
    inference = CostModel(graph, machine, CostOptions(dtype="float64", kind="inference"))
    predicted = price(inference, complete(inference, plan.strategy)).bytes

    check(model, network, plan, x, predicted)


@pytest.mark.parametrize("strategy", [None, {"0": {"h": 2}, "4": {"k": 2}}])
def test_parallelize(strategy: object) -> None:
    """Planned for answers: in evaluation mode, with nothing to train."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5), nn.Dropout(0.5)
    ).double()
    model(2 * torch.randn(8, 3, 8, 8, dtype=torch.float64))
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    expected = copy.deepcopy(model).eval()(x).detach()

    def run(comm: Comm) -> tuple[Tensor, bool, str]:
        how = quiet(comm, strategy=strategy, inference=True)
        made = layerwise.parallelize(copy.deepcopy(model), x[:2], **how)
        told = made.plan.provenance["cost_options"]["kind"]
        with torch.inference_mode():
            out = made(x[made.share()])
        return out.clone(), made.training or any(p.requires_grad for p in made.parameters()), told

    found = run_threads(2, run)
    assert difference(torch.cat([out for out, _, _ in found]), expected) <= 1e-9
    assert [(trains, kind) for _, trains, kind in found] == [(False, "inference")] * 2


def test_what_trains_is_told_from_what_answers() -> None:
    """Ranks that are asked for different things."""

    def run(comm: Comm) -> str:
        with pytest.raises(LayerwiseError) as caught:
            layerwise.parallelize(nn.Linear(4, 4), torch.randn(2, 4), **quiet(comm, inference=comm.rank == 0))
        return str(caught.value)

    assert all("differ in inference" in message for message in run_threads(2, run))
