"""Fine-tuning: parameters with requires_grad=False stay as they are; no gradient of them is made, sent or priced."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerwise import checkpoint
from layerwise.comm.base import Comm
from layerwise.comm.solo import SoloComm
from layerwise.cost.model import CostModel
from layerwise.cost.price import price
from layerwise.cost.timeline.simulate import timeline
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.machine import load as load_profile
from layerwise.run.load import load
from layerwise.search.baselines import baseline
from tests.comm.thread import run_threads
from tests.run.plans import Case, case, check_equal, difference, plain, random_plan, train
from tests.run.small_modules import layered


class Net(nn.Module):
    """A trunk with batch norm, a linear layer that is used twice, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3))
        self.norm = nn.BatchNorm2d(6)
        self.twice, self.head = nn.Linear(6 * 36, 6 * 36), nn.Linear(6 * 36, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.trunk(x))).flatten(1)
        return self.head(torch.relu(self.twice(torch.relu(self.twice(x)))))


# Beginnings of the names that are frozen.
FROZEN = {
    "the trunk": ("trunk", "norm", "twice"),
    "the head": ("head",),
    "all but a norm": ("trunk", "twice", "head"),
    "biases and what is used twice": ("trunk.0.bias", "twice", "head.bias"),
    "a weight in between": ("trunk.3.weight",),
}


def frozen_case(which: str) -> tuple[Case, set[str]]:
    torch.manual_seed(0)
    module = Net()
    for name, p in module.named_parameters():
        p.requires_grad_(not name.startswith(FROZEN[which]))
    names = {name for name, p in module.named_parameters() if not p.requires_grad}
    return case(module, (2, 8, 8), 4), names


@pytest.mark.parametrize("which", FROZEN)
def test_numbers_are_one_devices_and_bytes_as_predicted(which: str) -> None:
    """Under random plans: k split, strided, on fewer ranks. One device's are PyTorch's own."""
    given, names = frozen_case(which)
    module = copy.deepcopy(given.network.module)
    assert module is not None
    before = {name: given.network.value(name) for name in names}
    single = train(given, random_plan(given.graph, 1, 0, "sample"), SoloComm())
    assert single.losses == pytest.approx(plain(module, given), rel=1e-9)
    assert all(difference(single.state[name], value) <= 1e-9 for name, value in module.state_dict().items())
    assert not names & single.gradients.keys()
    odd = list(FROZEN).index(which) % 2
    for seed in (odd, odd + 2):
        plan = random_plan(given.graph, 2 + seed % 3, seed, "sample" if seed < 2 else "free")
        ranks = run_threads(plan.gpus, lambda comm, plan=plan: train(given, plan, comm))
        check_equal(ranks, single, plan)
        for rank in ranks:
            assert not names & rank.gradients.keys()
            assert all(torch.equal(rank.state[name], value) for name, value in before.items())


def test_no_gradient_of_the_frozen_is_priced() -> None:
    """Of data parallelism: 2 (r - 1) bytes a byte of what is trained; and neither memory nor time of the rest."""
    given, names = frozen_case("the trunk")
    devices = load_profile("cpu").device_graph(gpus=2, gpus_per_node=2)
    models = [CostModel(graph, devices) for graph in (given.graph, given.graph.freeze(()))]
    strategies = [baseline(model, "data") for model in models]
    found, full = map(price, models, strategies)
    head, item_bytes = 6 * 36 * 5 + 5, given.graph["head"].out.item_bytes
    assert (found.bytes["sync"], given.graph.parameter_count()) == (2 * item_bytes * head, head)
    assert full.bytes["sync"] > 30 * found.bytes["sync"]
    assert found.memory_bytes < full.memory_bytes
    backward = [timeline(model, strategy).backward_s for model, strategy in zip(models, strategies, strict=True)]
    assert backward[0] < backward[1] / 2
    assert names == {name for layer in given.graph.layers for name in layer.frozen}


class Behind(nn.Module):
    """A part that no gradient reaches, one that some does, and one that is used twice, once behind a detach."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.neck, self.both = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = torch.relu(self.both(self.body(x)))
        return self.head(torch.relu(self.both(self.neck(x))))


def test_weight_decay_leaves_alone_what_no_gradient_reaches() -> None:
    """As in PyTorch, where there is no gradient of it."""
    torch.manual_seed(1)
    module = Behind()
    given = case(module, (6,), 4)

    def step(model: nn.Module, x: Tensor, y: Tensor) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    def rank(comm: Comm) -> dict[str, Tensor]:
        model = load(random_plan(given.graph, 2, 3, "sample"), given.network, dtype=torch.float64, comm=comm)
        share = model.share()
        step(model, given.inputs[0][share], given.targets[0][share])
        return model.full_state_dict()

    before = {name: value.clone() for name, value in module.state_dict().items()}
    ranks = run_threads(2, rank)
    step(module, given.inputs[0], given.targets[0])
    for state in ranks:
        assert all(difference(state[name], value) <= 1e-9 for name, value in module.state_dict().items())
        assert torch.equal(state["body.weight"], before["body.weight"])


def test_thawing_later_is_refused() -> None:
    """Its gradients would differ between the ranks, without a word. Freezing more is no such thing."""
    given, _ = frozen_case("the trunk")
    plan, network = random_plan(given.graph, 1, 0, "sample"), layered(given.network)
    module = load(plan, network, dtype=torch.float64, comm=SoloComm())
    named = dict(module.named_parameters())
    named["head.bias"].requires_grad_(False)
    module(given.inputs[0]).sum().backward()
    assert {name for name, p in named.items() if p.grad is not None} == {"head.weight"}
    named["trunk.0.weight"].requires_grad_(True)
    with pytest.raises(LayerwiseError, match=r"'trunk\.0\.weight' was frozen when the plan was made"):
        module(given.inputs[0])


def test_a_plan_knows_what_is_frozen() -> None:
    given, _ = frozen_case("the trunk")
    other, _ = frozen_case("the head")
    with pytest.raises(LayerwiseError, match="the plan is for another model"):
        load(random_plan(given.graph, 1, 0, "sample"), other.network, comm=SoloComm())
    assert given.graph.freeze(()).digest == other.graph.freeze(()).digest
    assert fuse(given.network.graph.freeze(())).digest == given.graph.freeze(()).digest


def test_a_checkpoint_of_the_whole_training_begins_the_fine_tuning(tmp_path: Path) -> None:
    """And one of a fine-tuning, with the optimizer's state, goes on."""
    given, names = frozen_case("the trunk")
    whole = Case(given.network, given.graph.freeze(()), given.inputs, given.targets)
    network = type(given.network)(given.network.graph.freeze(()), given.network.stored, given.network.keys)

    def rank(comm: Comm) -> dict[str, Tensor]:
        first = load(random_plan(whole.graph, 2, 1, "sample"), network, dtype=torch.float64, comm=comm)
        checkpoint.save(tmp_path / "whole", first, None, {})
        tuned = load(random_plan(given.graph, 2, 2, "sample"), given.network, dtype=torch.float64, comm=comm)
        checkpoint.load(tmp_path / "whole", tuned)
        optimizer = torch.optim.Adam(tuned.parameters())
        x, y = given.inputs[0][tuned.share()], given.targets[0][tuned.share()]
        F.cross_entropy(tuned(x), y).backward()
        optimizer.step()
        checkpoint.save(tmp_path / "tuned", tuned, optimizer, {})
        again = load(random_plan(given.graph, 2, 3, "sample"), given.network, dtype=torch.float64, comm=comm)
        checkpoint.load(tmp_path / "tuned", again, torch.optim.Adam(again.parameters()))
        kept = tuned.full_state_dict()
        assert all(torch.equal(value, kept[name]) for name, value in again.full_state_dict().items())
        return kept

    for state in run_threads(2, rank):
        assert all(torch.equal(state[name], given.network.value(name)) for name in names)
        assert not torch.equal(state["head.weight"], given.network.value("head.weight"))
