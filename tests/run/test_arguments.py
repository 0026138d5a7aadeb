"""Models called by names, some left out: in training and evaluation, at another batch and size."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerwise
from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.importers.load import network_of
from layerwise.run.load import load
from tests.api.keywords import quiet
from tests.comm.thread import run_threads
from tests.run.plans import difference, random_plan


class Modulated(nn.Module):
    """Has optional arguments, and is another network in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor, shift: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
        x = self.body(x)
        if shift is not None:
            x = x + shift[:, None, None, None]
        if scale is not None:
            x = x * scale[:, None, None, None]
        made: Tensor = self.head(x if self.training else x.relu())
        return made


def given(samples: int, size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(samples * size)
    x = torch.randn(samples, 3, size, size, generator=generator).double()
    return {"x": x, "scale": torch.randn(samples, generator=generator).double()}


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_argument_that_is_left_out_stays_left_out(ranks: int) -> None:
    """With another batch and larger images too. By position the second is another, which evaluation alone takes."""
    torch.manual_seed(0)
    model = Modulated().double()
    network = network_of(model, (), 4, "test", given(4, 8))
    plan = random_plan(fuse(network.graph), ranks, 1, "sample")
    single = copy.deepcopy(model).eval()

    def evaluated(comm: Comm) -> list[float]:
        module = load(plan, network, comm=comm, dtype=torch.float64).eval()
        with torch.no_grad():
            away = []
            for samples, size in ((4, 8), (6, 8), (4, 16)):
                batch, share = given(samples, size), module.share(samples)
                mine = {name: value[share] for name, value in batch.items()}
                away.append(difference(module(**mine), single(**batch)[share]))
            away.append(difference(module(mine["x"], None, mine["scale"]), single(**batch)[share]))
            away.append(difference(module(mine["x"], mine["scale"]), single(batch["x"], batch["scale"])[share]))
        if ranks > 1:
            module.train()
            with pytest.raises(LayerwiseError, match="inputs x, scale; 'scale' is missing"):
                module(mine["x"], mine["scale"])
        return away

    for away in run_threads(ranks, evaluated, timeout_s=60):
        assert max(away) <= 1e-9, away


class Masked(nn.Module):
    """Makes a mask and factors of what it is given, others in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1]).tril(0 if self.training else 2) == 0
        factors = torch.arange(6.0, dtype=x.dtype) * (2 if self.training else 3)
        x = self.body(x)
        scores = (x @ x.transpose(1, 2)).masked_fill(mask, -1e9).softmax(-1)
        made: Tensor = self.head(scores @ x) * factors
        return made


@pytest.mark.parametrize("seed", range(4))
def test_what_the_forward_pass_makes_is_of_its_mode_and_size(seed: int) -> None:
    torch.manual_seed(seed)
    model = Masked().double()
    network = network_of(model, (torch.randn(4, 4, 4).double(),), 4, "test")
    plan = random_plan(fuse(network.graph), 2, seed, "sample")
    batches = torch.randn(4, 4, 4).double(), torch.randn(6, 4, 4).double(), torch.randn(4, 8, 4).double()

    def called(comm: Comm) -> list[float]:
        module, single, away = load(plan, network, comm=comm, dtype=torch.float64), copy.deepcopy(model), []
        for training in (True, False, True):
            for x in batches:
                share = module.share(len(x))
                away.append(difference(module.train(training)(x[share]), single.train(training)(x)[share]))
        return away

    for away in run_threads(2, called, timeout_s=60):
        assert max(away) <= 1e-9, away


class OfADict(nn.Module):
    """Takes one dict."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": (self.body(batch["x"]) - batch["y"]).square().mean()}


class OfADictAndMore(OfADict):
    """Takes whatever else is there, as Lightning's steps do."""

    def forward(self, batch: dict[str, Tensor], *more: Any, **options: Any) -> dict[str, Tensor]:
        return super().forward(batch)


@pytest.mark.parametrize("kind", [OfADict, OfADictAndMore])
@pytest.mark.parametrize("strategy", ["data", {"body": {"c": 2}}])
def test_a_model_of_one_dict(strategy: Any, kind: type[OfADict]) -> None:
    x, y = torch.randn(2, 4, 4).double()
    model = kind().double()
    wanted = model({"x": x, "y": y})["loss"].item()

    def called(comm: Comm) -> float:
        own = copy.deepcopy(model)
        batch = {"y": y[:2], "x": x[:2]}
        module = layerwise.parallelize(own, batch, strategy=strategy, **quiet(comm))
        loss = module({name: value[module.share()] for name, value in {"x": x, "y": y}.items()})["loss"]
        loss.backward()
        return float(loss.detach())

    assert sum(run_threads(2, called)) / 2 == pytest.approx(wanted, rel=1e-9)


class Options(nn.Module):
    """Its arguments: one equals nothing, itself included, and a list keeps what the next frame needs, as Wan's does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(
        self,
        x: Tensor,
        labels: Tensor | None = None,
        fill: float = float("nan"),
        scale: float = 1.0,
        cache: Any = None,
        first: bool = False,
    ) -> Tensor:
        made: Tensor = self.body(x) * scale
        if cache is not None:
            made = made + sum(cache)
            cache.append(made.detach())
        made = made if fill != fill else made + fill
        made = made[:, :2] if first else made
        return made if labels is None else made - labels


OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"fill": 7.0}, "'fill'"),
    ({"scale": 3.0}, "'scale'"),
    ({"cache": []}, "'cache' is not among them"),
    ({"cache": [1.0]}, r"'cache\[0\]' is not among them"),
    ({"first": True}, "'first' is not among them"),
]


@pytest.mark.parametrize("example", [{}, {"fill": float("nan")}, {"fill": 2.0, "scale": 2.0}])
def test_other_arguments_are_those_of_the_example(example: dict[str, float]) -> None:
    """In evaluation labels may be left out."""
    model, x, labels = Options(), torch.randn(2, 4), torch.randn(2, 4)

    def called(comm: Comm) -> tuple[Tensor, Tensor]:
        own, mine = copy.deepcopy(model), slice(comm.rank, comm.rank + 1)
        batch = {"x": x[mine], "labels": labels[mine], **example}
        module = layerwise.parallelize(own, batch, strategy={"body": {"c": 2}}, **quiet(comm))
        for training in (True, False):
            for more, said in OTHERS:
                with pytest.raises(LayerwiseError, match=said):
                    module.train(training)(**batch | more)
        made: Tensor = module.train()(**batch).detach()
        with torch.no_grad():
            return made, module.eval()(x[mine], **example)

    labelled, plain = (torch.cat(each) for each in zip(*run_threads(2, called), strict=True))
    torch.testing.assert_close(labelled, model(x, labels, **example).detach())  # one row, other kernel
    torch.testing.assert_close(plain, model(x, **example).detach())
