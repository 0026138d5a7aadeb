"""An outside solver, toulbar2, proves the same optimum from the exported tables."""

from pathlib import Path

import pytest
from hypothesis import given

from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel, CostTables
from layerwise.cost.price import complete
from layerwise.graph.fuse import fuse
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.load import load_model
from layerwise.machine import load
from layerwise.search.baselines import NAMES, baseline, configurations
from layerwise.search.export import export_costs
from layerwise.search.find import search
from layerwise.search.solve.eliminate import eliminate
from tests.importers.networks import chain, crossing, residual
from tests.search.tables import every_cost, random_tables

pytoulbar2 = pytest.importorskip("pytoulbar2")


def solved(t: CostTables, path: Path) -> float:
    """toulbar2's optimum, after checking that its strategy costs that much by our tables."""
    export_costs(t, path, "some")
    problem = pytoulbar2.CFN()
    problem.Read(str(path))
    choice, cost_s, _ = problem.Solve()
    indices = dict(zip(t.configs, choice, strict=True))
    assert t.price({name: t.configs[name][i] for name, i in indices.items()}) == pytest.approx(
        cost_s, rel=1e-12, abs=rounding(t)
    )
    return float(cost_s)


def rounding(t: CostTables) -> float:
    """Of every entry that adds up to a strategy's cost."""
    return 0.5e-12 * (len(t.node) + len(t.transfer))


@given(random_tables(nodes=6))
def test_it_agrees_on_random_tables(tmp_path_factory: pytest.TempPathFactory, t: CostTables) -> None:
    assert solved(t, tmp_path_factory.getbasetemp() / "random.cfn") == pytest.approx(
        every_cost(t).min(), rel=1e-12, abs=rounding(t)
    )


@pytest.mark.parametrize("graph", [chain(8), residual(8), crossing(8)], ids=lambda g: g.name)
def test_it_agrees_on_small_networks(tmp_path: Path, graph: object) -> None:
    model = CostModel(fuse(graph), load("p100").device_graph(6, 2))  # type: ignore[arg-type]
    agree(model, SearchSpace(6, spread=True), tmp_path)


@pytest.mark.parametrize(
    ("network", "gpus"),
    [("vgg16", 4), ("vgg16", 16), *(pytest.param("inception_v3", n, marks=pytest.mark.slow) for n in (4, 16))],
)
def test_it_agrees_on_the_papers_networks(tmp_path: Path, network: str, gpus: int) -> None:
    model = CostModel(fuse(load_model(network, 32 * gpus)), load("p100").device_graph(gpus))
    agree(model, SearchSpace(gpus, spread=gpus > 4), tmp_path)


@pytest.mark.parametrize(
    ("graph", "kinds"),
    [
        (chain(8), "cpu@0.5:1+cpu:1"),
        (residual(8), "cpu@0.5:2+cpu:1"),
        (crossing(8), "cpu@0.25:1+cpu:1"),
        (load_model("lenet5", 64), "cpu@0.5:1+cpu:3"),
        (load_model("alexnet", 64), "cpu@0.5:1+cpu:1"),
    ],
    ids=lambda case: case if isinstance(case, str) else case.name,
)
def test_it_agrees_on_unequal_devices(tmp_path: Path, graph: LayerGraph, kinds: str) -> None:
    machine = load(f"cpu,kinds={kinds}")
    model = CostModel(fuse(graph), machine.device_graph(len(machine.kind_of)))
    agree(model, SearchSpace(model.devices.count, weights=model.weights), tmp_path)


def agree(model: CostModel, space: SearchSpace, folder: Path) -> None:
    """toulbar2 on the unpruned tables, elimination on the same, and the search with all its pruning."""
    named = {name: complete(model, baseline(model, name)) for name in NAMES}
    t = model.tables(configurations(model, space, named))
    proven_s = solved(t, folder / "costs.cfn")
    assert eliminate(t).cost_s == pytest.approx(proven_s, rel=1e-12, abs=rounding(t))
    found = search(model, space, objective="additive")
    assert found.best.price.step_time_s == pytest.approx(proven_s, rel=1e-12, abs=rounding(t))
    assert found.optimum.proven
