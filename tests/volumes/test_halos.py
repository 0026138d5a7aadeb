"""Halos of inputs, read or sent: one device's numbers, the bytes that were predicted, and the cheaper plan."""

from collections import Counter
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from layerwise import ParallelOptions, checkpoint, parallelize
from layerwise.comm.base import Comm
from layerwise.comm.solo import SoloComm
from layerwise.config import Config, SearchSpace
from layerwise.cost.model import CostModel, CostOptions
from layerwise.errors import LayerwiseError
from layerwise.graph.cells import with_cells, without_cells
from layerwise.graph.fuse import fuse
from layerwise.importers.load import network_of
from layerwise.machine import load as load_profile
from layerwise.machine import save
from layerwise.plan import load_plan
from layerwise.run.execute.predicted_bytes import PREDICTED
from layerwise.run.load import load
from layerwise.search.curve import memory_curve
from layerwise.search.find import candidate, search
from layerwise.search.halos import search_halos
from layerwise.search.limit.variants import OFFERS
from layerwise.search.make_plan import make_plan
from layerwise.search.report.sentences import halo_lines
from layerwise.search.report.tables import curve_table
from layerwise.search.result import SearchResult
from layerwise.train.report import KINDS, Result
from layerwise.volumes.loader import BoxLoader
from tests.comm.thread import run_threads
from tests.run.plans import difference, random_plan
from tests.volumes.networks import samples, segments

pytestmark = pytest.mark.usefixtures("models_traced_once")


class Drops(nn.Module):
    """A convolution of volumes and random numbers behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.drop = nn.Conv3d(1, 3, 3, padding=1), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.drop(self.conv(x)).square().mean()
        return loss


@pytest.mark.parametrize(("seed", "ranks"), [(0, 2), (1, 4)])
def test_halos_that_are_sent_train_as_one_device(seed: int, ranks: int, tmp_path: Path) -> None:
    """Every voxel is read once; another plan, which reads halos, began the training."""
    _, network, graph = segments(2)
    x, target = samples(2)

    def step(comm: Comm, *, sent: bool, resumed: bool) -> tuple[float, dict[str, Tensor]]:
        of = with_cells(graph, ["x"]) if sent else graph
        plan = replace(random_plan(of, comm.size, seed, "boxes"), halos_sent=("x",) if sent else ())
        module = load(plan, network, comm=comm, dtype=torch.float64)
        if sent:
            read = comm.all_gather_object(module.read_boxes()["x"].volume)
            assert sum(read) == x.size
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        if resumed:
            checkpoint.load(tmp_path, module, optimizer)
        (inputs,) = BoxLoader(module, x, target)
        before = Counter(comm.sent)
        loss = module(*inputs)
        loss.backward()
        for kind, name in PREDICTED.items():
            assert sum(comm.all_gather_object(comm.sent[kind] - before[kind])) == round(plan.predicted[name]), kind
        optimizer.step()
        if not resumed:
            checkpoint.save(tmp_path, module, optimizer, {})
        return loss.item(), module.full_state_dict()

    step(SoloComm(), sent=False, resumed=False)
    loss, state = step(SoloComm(), sent=False, resumed=True)
    for told, held in run_threads(ranks, lambda comm: step(comm, sent=True, resumed=True)):
        assert told == pytest.approx(loss, rel=1e-12)
        assert all(difference(held[name], value) < 1e-9 for name, value in state.items())


def test_random_numbers_do_not_depend_on_it() -> None:
    model = Drops().double()
    network = network_of(model, (torch.empty(2, 1, 6, 6, 6).double(),), 2, "drops")
    graph = fuse(network.graph)
    x = torch.rand(2, 1, 6, 6, 6).double()

    def loss(comm: Comm, sent: tuple[str, ...]) -> float:
        plan = random_plan(with_cells(graph, sent), comm.size, 0, "boxes")
        module = load(replace(plan, halos_sent=sent), network, comm=comm, dtype=torch.float64)
        return float(module(x[module.read_boxes()["x"].slices()]).item())

    wanted = loss(SoloComm(), ())
    assert run_threads(2, lambda comm: loss(comm, ("x",))) == pytest.approx([wanted] * 2, rel=1e-12)


def found(rate: float | None, io: str = "boxes") -> tuple[CostModel, SearchResult]:
    """A convolution cut along d on four devices that read at this rate, in float32."""
    network = network_of(Drops(), (torch.empty(1, 1, 16, 16, 16),), 1, "drops")
    cpu = load_profile("cpu")
    cpu = replace(cpu, processor=replace(cpu.processor, read_bytes_per_s=rate))
    model = CostModel(fuse(network.graph), cpu.device_graph(4, 4), CostOptions(io=io))  # type: ignore[arg-type]
    fixed = {"conv": Config.of({"d": 4})}
    return search_halos(model, partial(search, space=SearchSpace(4), fixed=fixed))


def test_the_cheaper_plan_is_taken(tmp_path: Path) -> None:
    plane = 16 * 16 * 4  # bytes
    for rate, sent in ((1e3, True), (1e12, False)):
        model, result = found(rate)
        halos = result.halos
        assert halos is not None
        assert (halos.inputs, halos.sent) == (("x",), sent)
        assert halos.read_bytes == 6 * plane
        assert halos.sent_bytes == 4 * plane
        chosen_s, size = (halos.sent_s, halos.sent_bytes) if sent else (halos.read_s, halos.read_bytes)
        assert chosen_s == result.best.timeline.total_s + size / rate == min(halos.sent_s, halos.read_s)
        (said,) = halo_lines(result)
        assert said.startswith(f"Halos of x are {'sent' if sent else 'read'}")
        path = tmp_path / f"{sent}.json"
        make_plan("drops", "cpu", model, SearchSpace(4), result, fused=True).save(path)
        plan = load_plan(path)
        assert plan.halos_sent == (("x",) if sent else ())
        assert ("x.cells" in plan.strategy) == sent
        plan.check(plan.layers(without_cells(model.graph)), 4)
        told = Result(plan, [], 0, None, (), None, dict.fromkeys(KINDS), None).as_dict()["halos"]
        assert told == {"sent": ["x"] * sent, "read_s": halos.read_s, "sent_s": halos.sent_s}


@pytest.mark.parametrize("options", [CostOptions(io="boxes", kind="inference"), CostOptions(io="boxes", dtype="bf16")])
def test_a_plan_that_sends_halos_is_for_the_network_as_it_was_imported(options: CostOptions) -> None:
    """The cost model's own graph has other types, or no gradients."""
    graph = fuse(network_of(Drops(), (torch.empty(1, 1, 16, 16, 16),), 1, "drops").graph)
    h100 = load_profile("h100")
    machine = replace(h100, processor=replace(h100.processor, read_bytes_per_s=1.0)).device_graph(4, 4)
    fixed = {"conv": Config.of({"d": 4})}
    choice = search_halos(CostModel(graph, machine, options), partial(search, space=SearchSpace(4), fixed=fixed))
    plan = make_plan("drops", "cpu", choice[0], SearchSpace(4), choice[1], fused=True)
    assert plan.halos_sent == ("x",)
    plan.check(plan.layers(graph), 4)


def test_parallelize_takes_it_from_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The built-in one, of slower processors, so that space is split, and with a slow disk."""
    cpu = load_profile("cpu")
    rates = {name: rate / 1e4 for name, rate in cpu.processor.peak_flops.items()}
    processor = replace(cpu.processor, peak_flops=rates, read_bytes_per_s=1e3)
    sources = {**cpu.sources, "device.read_bytes_per_s": "assumption"}
    save(replace(cpu, name="slow", processor=processor, sources=sources), tmp_path / "slow.json")
    x = torch.rand(1, 1, 8, 8, 8).double()

    network = Drops().double()

    def loss(comm: Comm) -> float:
        model = parallelize(
            deepcopy(network), (x,), io="boxes", options=ParallelOptions(profile=tmp_path / "slow.json", comm=comm)
        )
        assert model.plan.halos_sent == (("x",) if comm.size > 1 else ())
        return float(model(x[model.read_boxes()["x"].slices()]).item())

    wanted = loss(SoloComm())
    assert "Halos" not in capsys.readouterr().out
    assert run_threads(2, loss) == pytest.approx([wanted] * 2, rel=1e-12)
    assert "Halos of x are sent" in capsys.readouterr().out


def test_plans_are_told_what_they_read() -> None:
    """Of one device all of the input, of four a part each, halos included."""
    for rate, io in ((None, "boxes"), (1e3, "boxes"), (1e3, "free")):
        model = found(rate, io)[0]
        model = CostModel(without_cells(model.graph), model.devices, model.options)
        alone, cut = (candidate(model, "", {"conv": Config.of({"d": d}), "mean": Config()}) for d in (1, 4))
        told = rate is not None and io == "boxes"
        assert alone.reading_s == (16**3 * 4 / 1e3 if told else 0.0)
        assert cut.reading_s == (6 * 16**2 * 4 / 1e3 if told else 0.0)


@pytest.mark.parametrize(("rate", "io"), [(None, "boxes"), (1e3, "free")])
def test_there_is_a_choice_only_where_reading_is_known(rate: float | None, io: str) -> None:
    model, result = found(rate, io)
    assert result.halos is None
    assert without_cells(model.graph) == model.graph


def test_an_input_that_is_not_there() -> None:
    with pytest.raises(LayerwiseError, match="sends halos of 'y', which is no input of the model: search again"):
        with_cells(segments(2)[2], ["y"])


def test_a_memory_curve_sends_halos_where_that_is_cheaper() -> None:
    """With reading, no limit's plan is slower than what a search under it chooses."""
    for rate, sent in ((1e3, True), (1e12, False)):
        model = found(rate)[0]
        model = CostModel(without_cells(model.graph), model.devices, model.options)
        alone = search_halos(model, partial(search, space=SearchSpace(4)))[1]
        most = 2 * alone.best.price.memory_bytes
        curve = memory_curve(model, SearchSpace(4), most / 4, most, offer=OFFERS, points=3)
        first = curve[0].best
        assert first is not None
        assert alone.halos is not None
        assert any(point.halos_sent for point in curve) == sent
        for point in curve:
            assert point.best is None or ("x.cells" in point.best.strategy) == bool(point.halos_sent)
        with_reading_s = first.timeline.total_s + first.reading_s
        assert with_reading_s <= min(alone.halos.read_s, alone.halos.sent_s)
        assert curve_table(curve).columns[-1].heading == "halos"
