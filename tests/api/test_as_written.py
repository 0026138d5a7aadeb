"""Models that cannot be taken apart into layers are run as they are written, where samples alone are split."""

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from layerwise.api.arguments import ParallelOptions
from layerwise.api.parallelize import parallelize
from layerwise.api.split import split
from layerwise.comm.base import Comm
from layerwise.comm.solo import SoloComm
from layerwise.errors import LayerwiseError
from layerwise.plan import load_plan
from tests.api.as_written_models import MODELS, Branching, Quantised
from tests.api.keywords import keywords, quiet
from tests.comm.thread import run_threads
from tests.run.plans import difference

drawn = torch.Generator().manual_seed(0)
IMAGES = torch.randn(22, 3, 8, 8, generator=drawn, dtype=torch.float64)
CLASSES = torch.randint(0, 5, (22,), generator=drawn)
BATCH, CPU = 8, SoloComm(torch.device("cpu"))


def built(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    module = MODELS[name]().double()
    for p in module.parameters():
        p.data = p.data.to(torch.cdouble) if p.is_complex() else p.data
    return module


def loop(model: nn.Module, batches: Iterable[Any], held_out: Iterable[Any]) -> tuple[dict[str, Tensor], Tensor]:
    """Three steps, the last of 6 samples, and what the model makes of what is held out."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        outputs = torch.cat([model(x) for x, _ in held_out])
    return {name: value.clone() for name, value in model.state_dict().items()}, outputs


def data() -> list[DataLoader[Any]]:
    return [DataLoader(TensorDataset(IMAGES, CLASSES), BATCH), DataLoader(TensorDataset(IMAGES[:5], CLASSES[:5]), 5)]


@pytest.mark.parametrize(("name", "strategy"), [*((name, None) for name in MODELS), ("Branching", "data")])
def test_a_loop_over_loaders_is_one_devices(name: str, strategy: str | None) -> None:
    wanted, outputs = loop(built(name), *data())
    models = [built(name, seed) for seed in range(2)]  # rank 0's values win

    def rank(comm: Comm) -> tuple[dict[str, Tensor], Tensor]:
        how = keywords({"strategy": strategy}, comm=comm, verbose=False)
        batches, held_out = data()
        model = parallelize(models[comm.rank], IMAGES[:BATCH], batch=BATCH, **how)
        return loop(model, split(batches, model), held_out)

    ranks = run_threads(2, rank, timeout_s=30)
    for state, made in ranks:
        assert difference(made, outputs) <= 1e-9
        for key, value in state.items():
            assert torch.equal(value, ranks[0][0][key]), key  # of a buffer that the forward writes, too
            assert key == "counts" or difference(value, wanted[key]) <= 1e-9, key


def test_one_line_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    run_threads(
        2,
        lambda comm: parallelize(Branching(), IMAGES[:4].float(), options=ParallelOptions(comm=comm, measure_s=0)),
        timeout_s=30,
    )
    said = capsys.readouterr().out
    assert " ".join(said.split()).count("as it is written, and samples alone are split, because model 'Branching'") == 1
    assert max(map(len, said.splitlines())) <= 80


def test_another_strategy_is_refused_and_this_one_is_named() -> None:
    with pytest.raises(LayerwiseError, match=r"depend on data.*\. strategy='data' runs the model as it is written"):
        parallelize(Branching(), IMAGES[:4].float(), strategy="owt", options=ParallelOptions(comm=CPU), verbose=False)
    with pytest.raises(LayerwiseError, match=r"torch\.export fails.*check that the model runs"):  # nor does DDP run it
        parallelize(Branching(), torch.ones(4, 3), strategy="data", options=ParallelOptions(comm=CPU), verbose=False)


def test_its_plan_is_read_again(tmp_path: Any) -> None:
    def rank(comm: Comm) -> bool:
        first = parallelize(Quantised(), IMAGES[:4].float(), **quiet(comm))
        first.plan.save(tmp_path / f"{comm.rank}.json")
        again = parallelize(
            Quantised(), IMAGES[:4].float(), plan=tmp_path / f"{comm.rank}.json", options=ParallelOptions(comm=comm)
        )
        return again.plan == load_plan(tmp_path / f"{comm.rank}.json")

    assert run_threads(2, rank, timeout_s=30) == [True, True]


def test_a_frozen_batch_norm_stays_as_it_is() -> None:
    """A part in evaluation within a model in training: layers have one mode, the model as it is written has its own."""
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 5)).double()
    module[1].eval()
    wanted, outputs = loop(copy.deepcopy(module), *data())

    def rank(comm: Comm) -> tuple[dict[str, Tensor], Tensor]:
        batches, held_out = data()
        model = parallelize(copy.deepcopy(module), IMAGES[:BATCH], **quiet(comm, batch=BATCH))
        return loop(model, split(batches, model), held_out)

    for state, made in run_threads(2, rank, timeout_s=30):
        assert difference(made, outputs) <= 1e-9
        assert all(difference(value, wanted[key]) <= 1e-9 for key, value in state.items())


def test_what_a_data_plan_would_lose_by_layers_is_run_as_it_is_written() -> None:
    """A hook, and a dropout that is no module: its plan has no kernel for the one and no module for the other."""

    class Dropping(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), 0.5, self.training)

    called: list[int] = []

    def rank(comm: Comm) -> None:
        module = nn.Sequential(Dropping(6, 6), nn.Linear(6, 2))
        module[0].register_forward_hook(lambda *_: called.append(comm.rank))
        model = parallelize(module, torch.randn(4, 6), **quiet(comm, strategy="data"))
        called.clear()
        model(torch.randn(4, 6)).sum().backward()

    run_threads(2, rank, timeout_s=30)
    assert called


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("strategy", ["data", {"linear": {"c": 2}}])
def test_buffers_with_values_of_a_model_on_meta(named: bool, strategy: Any) -> None:
    class Shifted(nn.Module):
        shift: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 4)
            self.register_buffer("shift", torch.arange(4.0, device="cpu"))
            self.register_buffer("seen", torch.zeros(3))  # there without values

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.linear(x) * 0 + self.shift[None, :]
            return made

    def rank(comm: Comm) -> Tensor:
        with torch.device("meta"):
            module = Shifted()
        x = torch.randn(3, 6)
        how = keywords({"strategy": strategy}, comm=comm, verbose=False)
        made: Tensor = parallelize(module, {"x": x} if named else x, **how)(x)
        return made

    for made in run_threads(2, rank, timeout_s=30):
        assert made.shape == (3, 4)
        assert torch.equal(made, torch.arange(4.0).expand(3, 4))
