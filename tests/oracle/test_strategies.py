"""Named strategies: what each layer gets, what limits them, and that they run with one device's numbers."""

from functools import cache

import pytest
import torch
from torch import nn

from layerwise.comm.solo import SoloComm
from layerwise.config import Config
from layerwise.cost.model import CostModel, CostOptions
from layerwise.cost.price import complete, price
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.load import load_model
from layerwise.machine import load
from layerwise.machine import load as load_profile
from layerwise.oracle.question import Oracle, Question
from layerwise.oracle.strategies import (
    Shape,
    UnreachableError,
    Wishes,
    applicable,
    gather_layer,
    limit,
    shapes,
    strategy,
)
from layerwise.plan import Plan
from layerwise.search.baselines import ProcessGrid, grid_strategy, grids
from tests.comm.thread import run_threads
from tests.run import plans


@cache
def graph(name: str, batch: int = 32) -> LayerGraph:
    return fuse(load_model(name, batch))


def only(name: str, strategy_name: str, devices: int, node: int = 4, **wishes: object) -> dict[str, Config]:
    """The strategy's first shape."""
    shape = shapes(graph(name), strategy_name, devices, node, Wishes(**wishes))[0]  # type: ignore[arg-type]
    return strategy(graph(name), strategy_name, shape)


def degrees(config: Config) -> dict[str, int]:
    return dict(config.degrees)


# --------------------------------------------------------------------------------------------- what the layers get


def test_data_cuts_samples_everywhere() -> None:
    assert {str(c) for c in only("resnet50", "data", 16).values()} == {"{n=16}"}


def test_filter_cuts_output_channels_and_channel_the_sum() -> None:
    by_filter, by_channel = (only("vgg16", name, 8) for name in ("filter", "channel"))
    assert {str(c) for c in by_filter.values()} == {"{c=8}"}
    assert by_channel["features.0"] == Config()  # as the paper: the first layer is not split
    assert degrees(by_channel["features.2"]) == {"k": 8}
    assert degrees(by_channel["features.4"]) == {"c": 8}  # a pooling lies as the channels that it reads
    assert degrees(by_channel["classifier.6"]) == {"k": 8}


def test_spatial_gathers_on_one_device() -> None:
    found = only("vgg16", "spatial", 4, dims=("h",))
    assert degrees(found["features.0"]) == degrees(found["features.28"]) == {"h": 4}
    assert found["classifier.0"] == Config()
    early = only("vgg16", "spatial", 4, dims=("h",), gather_after="features.7")
    assert degrees(early["features.7"]) == {"h": 4}
    assert early["features.9"] == Config()


def test_hybrids_put_samples_across_nodes() -> None:
    df, ds = (only("vgg16", name, 16, node=4) for name in ("df", "ds"))
    assert {str(c) for c in df.values()} == {"{n=4, c=4}"}
    assert df["features.0"].placement == "contiguous"
    assert ds["features.0"]["n"] == 4
    assert ds["features.0"].total == 16
    assert str(ds["classifier.0"]) == "{n=4}/strided"  # the first device of each group


def test_spatial_of_a_volume_tries_every_grid() -> None:
    found = {shape.grid for shape in shapes(graph("unet3d"), "spatial", 4, 4)}
    whole = {((d, 4),) for d in "dhw"}
    assert found == whole | {((a, 2), (b, 2)) for a, b in ("dh", "dw", "hw")}


# ------------------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("model", "name", "most", "by"),
    [
        ("vgg16", "filter", 64, "'features.0' with 64 output channels"),
        ("vgg16", "channel", 64, "'features.2' with 64 input channels"),
        ("resnet50", "filter", 64, "'conv1' with 64 output channels"),
        ("resnet50", "spatial", 49, "with 7 × 7 positions"),
        ("vgg16", "data", 32, "32 samples"),
        ("vgg16", "df", 32 * 64, "64 output channels"),
        ("vgg16", "serial", 1, "definition"),
        ("vgg16", "pipeline", len(graph("vgg16").inner), "layers"),
    ],
)
def test_limits_are_those_of_the_paper(model: str, name: str, most: int, by: str) -> None:
    found = limit(graph(model), name, 4)
    assert found.devices == most
    assert by in found.by
    with pytest.raises(UnreachableError, match=f"at most {most:,}"):
        shapes(graph(model), name, most + 1, 4)


def test_every_number_up_to_the_limit_that_factors_is_reached() -> None:
    assert shapes(graph("resnet50"), "spatial", 49, 4)[0].grid == (("h", 7), ("w", 7))
    with pytest.raises(UnreachableError, match="cannot split space into 32"):  # 4 × 8 is more than 7 × 7
        shapes(graph("resnet50"), "spatial", 32, 4)


def test_gather_layer() -> None:
    assert gather_layer(graph("resnet50"), 4) == "layer4.2.conv3"
    assert gather_layer(graph("mlp:8x8"), 4) is None
    with pytest.raises(LayerwiseError, match=r"did you mean 'layer4\.2\.conv3'"):
        gather_layer(graph("resnet50"), 4, "layer4.2.conv33")


def test_hybrids_need_two_groups_of_two() -> None:
    with pytest.raises(UnreachableError, match="at least two groups"):
        shapes(graph("vgg16"), "df", 2, 4)
    assert shapes(graph("vgg16"), "df", 2, 4, Wishes(inside=2)) == [Shape(1, 2)]
    assert shapes(graph("vgg16"), "df", 4, 4) == [Shape(2, 2)]
    assert shapes(graph("vgg16"), "df", 64, 4) == [Shape(16, 4)]
    with pytest.raises(UnreachableError, match="groups of 3"):
        shapes(graph("vgg16"), "df", 64, 4, Wishes(inside=3))


# ---------------------------------------------------------------------------------------------- the runtime runs them


def _convolutional() -> nn.Module:
    """Strided, pooled, residual-free, with channels that four devices can cut, unevenly."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 25, 12), nn.ReLU(), nn.Linear(12, 7),
    )  # fmt: skip


@cache
def given(network: str) -> tuple[plans.Case, plans.Trained]:
    """A network and one device's training of it, with the batch on every rank."""
    torch.manual_seed(0)
    case = plans.small(network, 2) if network in plans.SMALL else plans.case(_convolutional(), (3, 21, 21), 4, 2)
    single = planned(case.graph, {layer.name: Config() for layer in case.graph.inner}, 1)
    return case, plans.train(case, single, SoloComm(torch.device("cpu")))


def planned(found: LayerGraph, chosen: dict[str, Config], ranks: int) -> Plan:
    model = CostModel(found, load_profile("cpu").device_graph(ranks, ranks), CostOptions(io="free"))
    sent = plans.predicted_bytes(model, chosen)
    return Plan("test", found.digest, found.batch, ranks, ranks, "free", True, chosen, predicted=sent)


ALL = ("data", "spatial", "filter", "channel", "df", "ds")
RUNS = [("convolutional", name, ranks) for name in ALL for ranks in (2, 4)]
# A network with residuals, and a volume of two samples: there hybrids and space are new.
RUNS += [("resnet18", "ds", 4), ("unet3d", "spatial", 4)]
MORE = [("resnet18", name, 4) for name in ALL[:5]] + [("unet3d", "data", 2), ("unet3d", "ds", 4)]
SLOW = [pytest.param(*run, marks=pytest.mark.slow) for run in MORE]


@pytest.mark.parametrize(("network", "name", "ranks"), [*RUNS, *SLOW])
def test_runs_with_the_numbers_of_one_device(network: str, name: str, ranks: int) -> None:
    case, single = given(network)
    found = shapes(case.graph, name, ranks, 4, Wishes(inside=2))
    for shape in (found[0], found[-1])[: len(found)]:  # the first and the last grid
        plan = planned(case.graph, strategy(case.graph, name, shape), ranks)
        trained = run_threads(ranks, lambda comm, plan=plan: plans.train(case, plan, comm))
        plans.check_equal(trained, single, plan)


def test_of_an_mlp_the_cheapest_process_grid_is_listed() -> None:
    oracle = Oracle(Question(fuse(load_model("mlp:64x256x256x10", 1)), load("p100"), 64, "strong"))
    assert "grid" in applicable(oracle.question.graph, oracle.node)
    assert "grid" not in applicable(fuse(load_model("lenet5", 1)), oracle.node)
    answer = oracle.answer("grid", 8)
    model = oracle.model(8)
    plans = {grid: complete(model, grid_strategy(model, grid)) for grid in grids(8, model.graph)}
    every = {grid: price(model, plan).step_time_s for grid, plan in plans.items()}
    best = ProcessGrid(*answer.projection.groups)
    assert len(every) == 4
    assert every[best] == min(every.values())
    assert answer.projection.phases.total_s == pytest.approx(every[best])
    assert answer.projection.phases.total_s <= oracle.answer("data", 8).projection.phases.total_s
    assert oracle.findings(answer)
    with pytest.raises(UnreachableError, match="at most 16,384, by the batch of 64 samples, times 256 outputs"):
        oracle.answer("grid", 32768)
