"""Law: no simulated step is below any row, whatever the strategy, and however its buckets are cut."""

import random
from collections.abc import Callable
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.config import Config, SearchSpace
from layerwise.cost.model import CostModel, CostOptions
from layerwise.cost.price import complete
from layerwise.cost.timeline.simulate import timeline
from layerwise.graph.fuse import fuse
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.load import load_model
from layerwise.machine import load
from layerwise.partition.buckets import CAPS
from layerwise.program import StepKind
from layerwise.search.baselines import NAMES, baseline, configurations
from layerwise.search.find import search
from layerwise.search.overlap import EFFORTS, Cuts, overlapped
from layerwise.search.priced.variants import OFFERS, Forms, Variants
from tests.cost import networks
from tests.examples import examples
from tests.importers.networks import chain, crossing, dense, inception, residual

NETWORKS = [chain, residual, inception, dense, crossing]
SMALL = networks.windows() | networks.views() | networks.branches() | networks.sequences()
SLACK = 1 + 1e-9


def space_of(model: CostModel, dims: str = "nchw") -> dict[str, tuple[Config, ...]]:
    named = {name: complete(model, baseline(model, name)) for name in NAMES}
    space = SearchSpace(model.devices.count, (*dims,), spread=model.devices.nodes > 1)
    return configurations(model, space, named)


def model_of(graph: LayerGraph, devices: int, profile: str = "p100", kind: StepKind = "training") -> CostModel:
    io = "sample" if graph.batch >= devices else "free"
    options = CostOptions(io=io, kind=kind, optimizer="adam")
    return CostModel(fuse(graph), load(profile).device_graph(devices, 2), options)


def holds(graph: LayerGraph, profile: str, kind: StepKind, seed: int, strategies: int) -> None:
    """Random strategies, in all forms, with any buckets."""
    model = model_of(graph, 4, profile, kind)
    cells, rng = space_of(model), random.Random(seed)
    offer = OFFERS if kind == "training" else OFFERS[1:]
    for space in (Variants.grouped(cells), Variants.of(cells, Forms.of(model.graph, 4, offer))):
        exact, rough = Cuts(model, space, None), Cuts(model, space)
        for _ in range(strategies):
            choice = {name: rng.randrange(len(these)) for name, these in space.configs.items()}
            rows, strategy = exact.rows(choice), space.strategy(choice)
            seconds = timeline(model, strategy, bucket_bytes=rng.choice(CAPS)).total_s
            assert rows.max() <= seconds * SLACK
            assert (rough.rows(choice) <= rows * SLACK).all()
            number = rng.randrange(len(rows))
            assert exact.row(number).of(choice, space.base) == pytest.approx(rows[number])


@pytest.mark.parametrize(("profile", "kind"), [("p100", "training"), ("pcie", "inference")])
@pytest.mark.parametrize("network", NETWORKS)
def test_no_step_is_below_its_rows(network: Callable[[int], LayerGraph], profile: str, kind: StepKind) -> None:
    holds(network(8), profile, kind, 1, 3)


@examples(15)
@given(SMALL, st.sampled_from(["p100", "pcie", "h100"]), st.integers(0, 99))
def test_nor_in_any_small_network(graph: LayerGraph, profile: str, seed: int) -> None:
    holds(graph, profile, "training", seed, 3)


def test_alone_and_in_line_the_last_row_is_the_step() -> None:
    """One device, and a network of which nothing is hidden: nothing is lost."""
    model = model_of(chain(8), 1)
    space = Variants.grouped(space_of(model))
    choice = dict.fromkeys(space.configs, 0)
    assert Cuts(model, space, None).rows(choice).max() == pytest.approx(timeline(model, space.strategy(choice)).total_s)


@pytest.mark.parametrize(("name", "profile"), product(["mlp:64x256x256x10", "mlp:512x64x512x64"], ["pcie", "p100"]))
def test_the_bound_is_below_the_best_of_all_strategies(name: str, profile: str) -> None:
    model = model_of(load_model(name, 16), 4, profile)
    cells = space_of(model, "nc")
    assert prod(map(len, cells.values())) < 10_000
    names = list(cells)
    every = [dict(zip(names, configs, strict=True)) for configs in product(*cells.values())]
    steps = [timeline(model, strategy).total_s for strategy in every]
    least = min(timeline(model, every[i]).total_s for i in np.argsort(steps)[:1])
    data = complete(model, baseline(model, "data"))
    for effort in EFFORTS:
        (first, *_), bound_s = overlapped(model, cells, [data], lambda s: timeline(model, s).total_s, effort=effort)
        assert 0 < bound_s <= least * SLACK
        seconds = timeline(model, first).total_s
        assert least <= seconds * SLACK
        assert effort == "quick" or seconds <= 1.01 * least


def test_more_effort_is_never_worse_and_a_limit_is_kept() -> None:
    model = model_of(load_model("mlp:256x1024x1024x10", 32), 4, "pcie")
    space = SearchSpace(4)
    quick, normal = (search(model, space, effort=effort) for effort in EFFORTS[:2])
    assert quick.overlap_bound_s is None
    assert normal.fastest.timeline.total_s <= quick.fastest.timeline.total_s
    assert normal.overlap_bound_s is not None
    assert normal.overlap_bound_s <= normal.fastest.timeline.total_s * SLACK
    limit = 0.8 * normal.best.price.memory_bytes
    limited = search(model, space, memory_limit_bytes=limit)
    assert limited.best.fits
    assert limited.overlap_bound_s is not None
    assert limited.overlap_bound_s <= limited.best.timeline.total_s * SLACK
    fast = search(model, space, memory_limit_bytes=limit, effort="quick")
    assert limited.best.timeline.total_s <= fast.best.timeline.total_s
