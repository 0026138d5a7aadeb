"""A planned module returns what its model returns: one tensor, a tuple, a dict, a dataclass."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.importers.load import network_of
from layerwise.run.load import load
from layerwise.run.local_tensor import local_tensor
from layerwise.run.outputs import map_tensors, returned
from layerwise.run.parallel import of
from tests.comm.thread import run_threads
from tests.run.plans import random_plan


@dataclass
class Found:
    """As models of transformers' return them."""

    logits: Tensor
    hidden: tuple[Tensor, ...]
    note: str | None = None


torch.export.register_dataclass(Found)


class Returns(nn.Module):
    """Two linear layers; `pack` says how their results are returned."""

    def __init__(self, pack: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.first, self.second, self.pack = nn.Linear(6, 8), nn.Linear(8, 4), pack

    def forward(self, x: Tensor) -> object:
        hidden = self.first(x)
        return self.pack(hidden, self.second(hidden))


PACKS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "one": lambda a, b: b,
    "tuple": lambda a, b: (b, a),
    "list": lambda a, b: [b, a],
    "tuple of one": lambda a, b: (b,),
    "dict": lambda a, b: {"logits": b, "hidden": a},
    "nested": lambda a, b: {"y": (b, {"x": [a]}), "none": None, "number": 3},
    "the same": lambda a, b: {"logits": b, "same": b, "viewed": b.view(-1, 4), "hidden": a},
    "constants": lambda a, b: (b, torch.arange(4.0).expand(len(b), 4), {"mask": torch.ones(len(b), dtype=torch.bool)}),
    "dataclass": lambda a, b: Found(b, (a,), "as they are"),
}


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("io", ["sample", "free"])
def test_the_models_own_structure(pack: str, io: str) -> None:
    torch.manual_seed(0)
    model = Returns(PACKS[pack])
    network = network_of(model, (torch.zeros(2, 6),), 4, "returns")
    plan = random_plan(fuse(network.graph), 2, 0, io)
    x = torch.randn(4, 6)
    wanted, tree = pytree.tree_flatten(model(x))

    def run(comm: Comm) -> None:
        module = load(plan, network, comm=comm)
        share = module.share()
        found, own = pytree.tree_flatten(module(x[share]))
        assert own == tree
        for value, leaf in zip(found, wanted, strict=True):
            if isinstance(leaf, Tensor):
                torch.testing.assert_close(value, leaf[share])
            else:
                assert value == leaf
        sum(leaf.sum() for leaf in found if isinstance(leaf, Tensor)).backward()

    run_threads(2, run)


def test_dataclasses_are_mapped_as_they_are_made() -> None:
    """One object stays one, what has no tensor itself, and a field without a value without one."""

    @dataclass
    class Late:
        x: Tensor
        note: list[str]
        late: Tensor = field(init=False)

    one, plain = Late(torch.ones(2), ["as it is"]), Late("none", [])  # type: ignore[arg-type]
    first, second, same = map_tensors(lambda x: x * 2, (one, {"again": one}, plain))
    assert (first is second["again"], first is one, same is plain, first.note is one.note) == (True, False, True, True)
    assert (first.x.tolist(), one.x.tolist(), hasattr(first, "late")) == ([2, 2], [1, 1], False)


class Own(nn.Module):
    """It returns parameters as they are, and a buffer; others are made as wide as the batch in another shape."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.prior = nn.Linear(6, 8), nn.Parameter(torch.randn(5))
        self.tokens = nn.Parameter(torch.randn(24))
        self.register_buffer("scale", torch.rand(3))
        self.factor = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        tokens = self.tokens.view(1, 3, 8).expand(len(x), 3, 8)
        y = torch.cat([self.first(x)[:, None], tokens, self.prior.reshape(1, 5, 1).expand(len(x), 5, 8)], 1)
        return y * self.factor, self.prior, self.first.weight, self.scale, self.factor, y.detach()


@pytest.mark.parametrize("seed", range(3))
def test_what_no_layer_computes_is_returned(seed: int) -> None:
    """Gradients reach it, and parameters have the shapes that the model gave them."""
    torch.manual_seed(0)
    model, x = Own(), torch.randn(4, 6)
    network = network_of(model, (x[:2],), 4, "own")
    plan = random_plan(fuse(network.graph), 2, seed, "sample")
    wanted = model(x)
    wanted[0].square().sum().add(4 * sum(y.square().sum() for y in wanted[1:])).backward()

    def run(comm: Comm) -> None:
        module = load(plan, network, comm=comm)
        y, *rest = module(x[module.share()])
        parts = [t[module.share()] if t.shape[:1] == x.shape[:1] else t for t in wanted]
        torch.testing.assert_close([y, *rest], parts)
        assert [t.requires_grad for t in (y, *rest)] == [t.requires_grad for t in wanted]
        (2 * y.square().sum()).add(4 * sum(t.square().sum() for t in rest)).backward()
        shapes = {name: value.shape for name, value in module.full_state_dict().items()}
        assert shapes == {name: value.shape for name, value in model.state_dict().items()}
        for shard in module.shards():
            if shard.name in dict(model.named_parameters()):
                gradient, whole = module.get_parameter(shard.name).grad, model.get_parameter(shard.name).grad
                assert gradient is not None
                assert whole is not None
                torch.testing.assert_close(local_tensor(gradient), whole[shard.box.slices()])

    run_threads(2, run)


@pytest.mark.parametrize("wrong", [lambda x: x[:-1], lambda x: x[:, :-1]], ids=["rows", "columns"])
def test_an_output_of_another_shape_than_the_models_own_is_not_returned(wrong: Callable[[Tensor], Tensor]) -> None:
    graph = network_of(Returns(PACKS["tuple"]), (torch.zeros(2, 6),), 4, "returns").graph
    module = load(random_plan(fuse(graph), 1, 0, "sample"), graph)
    schedule, right = of(module).rank_schedule, list(module(torch.randn(4, 6)))
    assert len(returned(schedule, right, None, 4)) == 2
    with pytest.raises(
        LayerwiseError, match=r"an output has shape .* but the model's output for this rank's 4 samples"
    ):
        returned(schedule, [right[0], wrong(right[1])], None, 4)
