"""What devices hold: the bisections are what trying every number finds, and the memory model agrees."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import layerwise
from layerwise.__main__ import dispatch
from layerwise.cli import run_main
from layerwise.config import SearchSpace
from layerwise.cost.memory.step import peak_bytes
from layerwise.cost.model import CostModel, CostOptions
from layerwise.graph.fuse import fuse
from layerwise.importers.load import load_model
from layerwise.machine import load
from layerwise.search.capacity import STEP, Limits, Tried, largest_side, least_devices
from layerwise.search.curve import memory_curve
from layerwise.search.find import search
from layerwise.search.priced.variants import OFFERS
from layerwise.search.remedies import remedies
from layerwise.search.report.tables import curve_table

ASKED = "unet3d:32 --gpu cpu --global-batch 1 --inference --io boxes --dims d,c --memory-limit 60MB --json"


@given(st.integers(1, 40), st.floats(1, 100), st.floats(1, 3000))
def test_the_least_number_of_devices(most: int, fixed: float, shared: float) -> None:
    def need(count: int) -> float:
        return fixed + shared / count

    fitting = [count for count in range(1, most + 1) if need(count) <= 100]
    least = fitting[0] if fitting else None
    beyond = most if least is None else least - 1
    assert least_devices(need, 100, most) == Limits(
        None if least is None else Tried(least, need(least)), Tried(beyond, need(beyond)) if beyond else None
    )


@given(st.integers(8, 400), st.integers(8, 500), st.integers(8, 60))
def test_the_largest_cube(largest: int, start: int, least: int) -> None:
    """From whatever side the bisection starts."""
    tried = list(range(-(-least // STEP) * STEP, 257, STEP))
    fitting = [side for side in tried if side <= largest]
    limits = largest_side(float, largest, start, least, 256)
    assert limits.fits == (Tried(fitting[-1], fitting[-1]) if fitting else None)
    beyond = None if fitting and fitting[-1] == tried[-1] else fitting[-1] + STEP if fitting else tried[0]
    assert limits.beyond == (None if beyond is None else Tried(beyond, beyond))


def answer(capsys: pytest.CaptureFixture[str], command: str) -> Any:
    assert run_main(dispatch, command.split()) == 0
    return json.loads(capsys.readouterr().out)


def test_as_a_user_asks(capsys: pytest.CaptureFixture[str]) -> None:
    """A search finds a plan for what fits, with the memory that was said."""
    said = answer(capsys, f"fits {ASKED} --gpus 1,3")
    devices, side, samples = (said[name]["fits"]["number"] for name in ("devices", "size", "samples"))
    assert said["devices"]["beyond"]["number"] == devices - 1 > 0
    assert said["size"]["beyond"]["number"] == side + STEP
    assert said["samples"]["beyond"]["number"] == samples + 1
    assert said["gpus"]["1"]["least"] > 60e6 >= said["gpus"]["3"]["least"]
    assert (said["gpus"]["1"]["fits"], said["gpus"]["3"]["fits"]) == ("no", "a plan")
    plan = answer(capsys, f"search {ASKED} --gpus {devices} --effort quick")
    assert plan["memory_bytes"] <= 60e6
    assert said["devices"]["beyond"]["bytes"] > 60e6
    alone = answer(capsys, f"search {ASKED} --gpus 1 --effort quick".replace("60MB", "1GB"))
    assert alone["memory_bytes"] == sum(said["kinds"].values()) == said["gpus"]["1"]["data parallelism"]


def test_fewer_devices_may_hold_what_more_do_not() -> None:
    """A plan takes a divisor of what there is: 7 devices are one, or all."""
    assert least_devices({1: 9, 2: 7, 3: 6, 4: 6, 5: 6, 6: 4, 7: 9}.__getitem__, 5, 7).fits == Tried(6, 4)


def test_no_code_is_imported_that_nobody_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lenet5.py").write_text("open('it was run', 'w')")
    monkeypatch.chdir(tmp_path)
    assert answer(capsys, "fits lenet5 --gpus 2 --gpu cpu --json")["size"] is None
    assert not (tmp_path / "it was run").exists()


def test_memory_of_a_module_is_what_a_search_says() -> None:
    """By kind, and at which layer; largest batches are next to what does not fit."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    said = layerwise.memory(net, torch.randn(16, 64), gpu="t4", gpus=4, optimizer="adam", memory_limit="1MB")
    parameters = 4 * sum(p.numel() for p in net.parameters())
    assert said.kinds["parameters"] == parameters
    assert said.kinds["states"] == 2 * parameters
    assert {gpus: row.fits(1e6) for gpus, row in said.gpus.items()} == dict.fromkeys((1, 2, 4), "data parallelism")
    assert said.gpus[4].forms["both"] <= said.gpus[4].forms["sharded"] < said.gpus[4].forms["data parallelism"]
    assert said.samples is not None
    assert said.samples.fits is not None
    assert said.samples.beyond is not None
    assert said.samples.fits.bytes <= 1e6 < said.samples.beyond.bytes
    assert said.at == "the optimizer's update"
    assert "4 devices hold at least 1,024 samples" in str(said)
    answers = layerwise.memory(net, torch.randn(16, 64), inference=True)
    assert answers.bytes < said.bytes
    assert answers.at == "forward of 0"
    with pytest.raises(layerwise.LayerwiseError, match="did you mean a100-40"):
        layerwise.memory(net, torch.randn(16, 64), gpu="a100")


class Positions(nn.Module):
    """A token is looked up, and its position in a table of 100 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions, self.head = nn.Embedding(50, 8), nn.Embedding(100, 8), nn.Linear(8, 50)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.tokens(ids) + self.positions(torch.arange(ids.shape[1])))
        return out


class Looked(Positions):
    """Positions are rows of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Buffer(torch.randn(100, 8))

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.tokens(ids) + self.rows[torch.arange(ids.shape[1])])
        return out


@pytest.mark.parametrize(
    ("model", "example", "line"),
    [
        (Positions(), torch.randint(0, 50, (2, 24)), "sequences of 96: a plan takes .*; 104 are more than it takes"),
        (Looked(), torch.randint(0, 50, (2, 24)), "sequences of 96: a plan takes .*; 104 are more than it takes"),
        (nn.TransformerEncoderLayer(16, 2, 16, 0.0, batch_first=True), torch.randn(2, 12, 16), "sequences of"),
        (nn.Conv1d(4, 4, 3), torch.randn(2, 4, 100), "sequences of"),
        (nn.Conv2d(1, 4, 3), torch.randn(2, 1, 32, 32), "images of .*²"),
        (nn.Conv3d(1, 4, 3), torch.randn(2, 1, 16, 16, 16), "cubes of .*³"),
    ],
)
def test_the_largest_input(model: nn.Module, example: Tensor, line: str) -> None:
    """Of any kind of which the model takes another size; what is longer than its table of positions does not count."""
    said = layerwise.memory(model, example, gpu="t4", memory_limit="1MB")
    assert said.size is not None
    assert said.size.fits is not None
    assert said.size.beyond is not None
    assert said.size.fits.bytes <= 1e6 < said.size.beyond.bytes
    assert re.search(line, " ".join(str(said).split()))


class Counted(Positions):
    """Positions are computed of the tokens, as RoBERTa's are."""

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.tokens(ids) + self.positions((ids != 0).long().cumsum(1)))
        return out


@pytest.mark.parametrize(
    ("model", "example"),
    [
        (nn.Conv2d(1, 4, 3), torch.randn(2, 1, 32, 16)),
        (nn.Linear(64, 4), torch.randn(2, 64)),
        (Counted(), torch.randint(0, 50, (2, 24))),
    ],
)
def test_no_size_is_said_where_there_is_none(model: nn.Module, example: Tensor) -> None:
    assert layerwise.memory(model, example, gpu="t4", memory_limit="1MB").size is None


SPACE = SearchSpace(2)


def model_of(batch: int = 8) -> CostModel:
    return CostModel(
        fuse(load_model("mlp:64x256x256x8", batch)), load("p100").device_graph(2), CostOptions(optimizer="adam")
    )


def test_a_curve_falls_and_ends_where_nothing_fits() -> None:
    model = model_of()
    free, least = search(model, SPACE).best.price.memory_bytes, search(model, SPACE, memory_limit_bytes=1.0).least
    assert least is not None
    curve = memory_curve(model, SPACE, 0.9 * least.bytes, 2 * free, offer=OFFERS, points=8)
    assert curve[0].limit_bytes == 2 * free
    assert curve[0].result.within is None
    assert curve[-1].best is None
    limits = [point.limit_bytes for point in curve]
    assert limits == sorted(limits, reverse=True)
    fitting = [(point.limit_bytes, point.best) for point in curve if point.best is not None]
    assert len(fitting) > 1
    assert all(peak_bytes(model, best.strategy).max() <= limit for limit, best in fitting)
    times = [best.timeline.total_s for _, best in fitting]
    assert times == sorted(times)
    *_, last = zip(*(column.cells for column in curve_table(curve).columns), strict=True)
    assert last[:3] == (limits[-1], least.bytes, "at least")


def test_a_curve_ends_at_its_least_limit() -> None:
    model = model_of()
    free = search(model, SPACE).best.price.memory_bytes
    (point,) = memory_curve(model, SPACE, 2 * free, 3 * free, offer=OFFERS)
    assert point.best is not None


def test_remedies_are_tried_in_the_order_of_their_cost_up_to_the_first_that_fits() -> None:
    model = model_of()
    least = search(model, SPACE, memory_limit_bytes=1.0).least
    assert least is not None
    tried = remedies(model, SPACE, least.bytes - 1, offer=(), more_devices=load("p100").device_graph(4))
    assert [remedy.what for remedy in tried] == [
        "--offer shard",
        "--offer recompute,shard",
        "4 GPUs",
    ]
    assert tried[1].bytes == least.bytes <= tried[0].bytes
    assert [remedy.fits for remedy in tried] == [False, False, True]
    none = [remedy.what for remedy in remedies(model, SPACE, 1.0, offer=OFFERS)]
    assert none == ["a global batch of 4"]
    free = CostModel(model.original, model.devices, replace(model.asked, io="free"))
    assert remedies(free, SPACE, 1.0, offer=OFFERS)[0].what == "--io boxes"
