"""An outside solver, toulbar2, proves the same optimum from the exported tables."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel, CostOptions, CostTables
from layerwise.cost.price import complete
from layerwise.geometry.arrays import Floats, Ints
from layerwise.graph.fuse import fuse
from layerwise.importers.load import load_model
from layerwise.machine import load
from layerwise.search.baselines import NAMES, baseline
from layerwise.search.export import constrained, export_costs
from layerwise.search.find import configurations, search
from layerwise.search.limit.additive import Choice, Costs, Problem
from layerwise.search.limit.limited import fastest_within
from layerwise.search.limit.within import LimitedSearch
from layerwise.search.solve.eliminate import eliminate
from tests.importers.networks import chain, crossing, residual
from tests.search.tables import every_strategy, exhaustive, random_tables, tables

pytoulbar2 = pytest.importorskip("pytoulbar2")


def solved(t: CostTables, path: Path, rows: Sequence[Costs] = (), limit_bytes: float = 0.0) -> float:
    """toulbar2's optimum, after checking that its strategy costs that much by our tables; inf where nothing fits."""
    export_costs(t, path, "some", rows, limit_bytes)
    problem = pytoulbar2.CFN()
    try:
        problem.Read(str(path))
        answer = problem.Solve()
    except pytoulbar2.pytb2.Contradiction:
        answer = None
    if answer is None:
        return np.inf
    choice, cost_s, _ = answer
    indices = dict(zip(t.configs, choice, strict=False))  # what follows are the variables of edges
    assert t.price({name: t.configs[name][i] for name, i in indices.items()}) == pytest.approx(
        cost_s, rel=1e-12, abs=rounding(t)
    )
    assert all(row.of(indices, everywhere(t)) <= limit_bytes for row in rows)
    return float(cost_s)


def everywhere(t: CostTables) -> dict[str, Ints]:
    """Each configuration is a base of its own."""
    return {name: np.arange(len(configs)) for name, configs in t.configs.items()}


def rounding(t: CostTables) -> float:
    """Of every entry that adds up to a strategy's cost."""
    return 0.5e-12 * (len(t.node) + len(t.transfer))


@given(random_tables(nodes=6))
def test_it_agrees_on_random_tables(tmp_path_factory: pytest.TempPathFactory, t: CostTables) -> None:
    assert solved(t, tmp_path_factory.getbasetemp() / "random.cfn") == pytest.approx(
        exhaustive(t).cost_s, rel=1e-12, abs=rounding(t)
    )


@given(random_tables(nodes=4), st.integers(0, 2**32 - 1), st.floats(0.1, 1.0), st.integers(1, 2))
def test_it_agrees_under_a_memory_limit(
    tmp_path_factory: pytest.TempPathFactory, t: CostTables, seed: int, share: float, count: int
) -> None:
    rng = np.random.default_rng(seed)
    node = [{name: rng.integers(1, 10**9, len(c)) + 0.0 for name, c in t.node.items()} for _ in range(count)]
    edge = [{e: rng.integers(0, 3, c.shape) * 1e8 for e, c in t.transfer.items()} for _ in range(count)]
    rows = [Costs(n, e) for n, e in zip(node, edge, strict=True)]
    base = everywhere(t)

    def taken(choice: Choice) -> Floats:
        return np.array([row.of(choice, base) for row in rows])

    problem = Problem(
        Costs(t.node, t.transfer), base, rows.__getitem__, taken, lambda choice: float(taken(choice).max())
    )
    limit = share * sum(float(cost.max()) for cost in (*node[0].values(), *edge[0].values()))
    ours = fastest_within(problem, limit)
    assert ours.proven
    outside = solved(t, tmp_path_factory.getbasetemp() / "limited.cfn", rows, limit)
    assert outside == pytest.approx(ours.cost_s, rel=1e-12, abs=rounding(t))


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


def agree(model: CostModel, space: SearchSpace, folder: Path) -> None:
    """toulbar2 on the unpruned tables, elimination on the same, and the search with all its pruning."""
    named = {name: complete(model, baseline(model, name)) for name in NAMES}
    t = model.tables(configurations(model, space, named))
    proven_s = solved(t, folder / "costs.cfn")
    assert eliminate(t).cost_s == pytest.approx(proven_s, rel=1e-12, abs=rounding(t))
    found = search(model, space, objective="additive")
    assert found.best.price.step_time_s == pytest.approx(proven_s, rel=1e-12, abs=rounding(t))
    assert found.optimum.proven


def test_it_bounds_the_search_under_a_limit(tmp_path: Path) -> None:
    """The optimum of the priced rows' problem is at most that of true peaks, and more than without a limit."""
    options = CostOptions(optimizer="adam")
    model = CostModel(fuse(load_model("mlp:64x256x64", 64)), load("p100").device_graph(4), options)
    named = {name: complete(model, baseline(model, name)) for name in NAMES}
    free = search(model, SearchSpace(4), objective="additive")
    limited = LimitedSearch(model, configurations(model, SearchSpace(4), named), offer=("shard",))
    limit = 1.05 * limited.least(list(named.values())).bytes
    within = limited.under(limit, list(named.values()))
    assert within.prices
    t, rows = constrained(limited, within)
    outside_s = solved(t, tmp_path / "limited.cfn", rows, limit)
    assert free.additive.price.step_time_s < outside_s <= within.cost_s + rounding(t)


def test_its_answer_keeps_all_rows(tmp_path: Path) -> None:
    """Written with negative weights, toulbar2 1.4.0 gives 0 s for this, and breaks the first row by 9 bytes."""
    t = tables({"a": 2, "b": 2, "c": 2, "d": 3, "e": 2}, [("b", "c", 0), ("c", "d", 0)], seed=0)
    for cost in (*t.node.values(), *t.transfer.values()):
        cost[...] = 0.0
    t.node["d"][2], t.node["e"][1] = 5e-5, 1.5e-5
    t.transfer["b", "c", 0][0, 1] = 2e-5
    t.transfer["c", "d", 0][...] = [[2e-5, 2e-5, 2e-5], [2e-5, 0.0, 0.0]]
    nothing = {"a": [0.0, 0.0], "b": [0.0, 0.0], "c": [0.0, 0.0], "d": [0.0, 0.0, 0.0], "e": [0.0, 0.0]}
    weights = [{"a": [386, 0], "c": [0, 3849], "d": [1626, 1626, 813], "e": [138, 0]}]
    share = 5990 // 4
    for last in ([0, share], [share, 0]):
        weights.append({"a": [0, share], "b": [0, share], "c": [0, share], "d": [0, share, 0], "e": last})
    rows = [Costs({name: np.array(ws, np.float64) for name, ws in {**nothing, **row}.items()}, {}) for row in weights]
    fits = {
        strategy: cost
        for strategy, cost in every_strategy(t).items()
        if all(row.of(dict(zip(t.configs, strategy, strict=True)), everywhere(t)) <= 5990 for row in rows)
    }
    assert solved(t, tmp_path / "rows.cfn", rows, 5990) == pytest.approx(min(fits.values()), abs=rounding(t))


@pytest.mark.parametrize(
    ("model", "gpus", "share", "offer"),
    [
        ("mlp:64x256x64", 4, 0.02, ("shard",)),
        ("mlp:64x256x64", 4, 0.2, ("shard",)),
        ("mlp:96x64x128", 4, 0.02, ("shard",)),
        ("mlp:96x64x128", 4, 0.2, ("shard",)),
        ("lenet5", 2, 0.05, ("shard",)),
        ("lenet5", 2, 0.2, ("shard",)),
        ("lenet5", 4, 0.5, ("recompute", "shard")),
    ],
)
def test_it_finds_the_optimum_under_a_limit(
    tmp_path: Path, model: str, gpus: int, share: float, offer: tuple[str, ...]
) -> None:
    """Rows of bytes are below true peaks: what is exported has all that the optimum takes."""
    costs = CostModel(fuse(load_model(model, 64)), load("p100").device_graph(gpus), CostOptions(optimizer="adam"))
    named = {name: complete(costs, baseline(costs, name)) for name in NAMES}
    limited = LimitedSearch(costs, configurations(costs, SearchSpace(gpus), named), offer=offer)
    least = limited.least(list(named.values())).bytes
    most = limited.peak(search(costs, SearchSpace(gpus), objective="additive", offer=()).additive.strategy)
    within = limited.under(least + share * (most - least), list(named.values()))
    assert within.proven
    assert within.prices
    t, rows = constrained(limited, within)
    outside_s = solved(t, tmp_path / "limited.cfn", rows, within.limit_bytes)
    assert outside_s == pytest.approx(within.cost_s, rel=1e-9, abs=rounding(t))
