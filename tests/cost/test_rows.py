"""Law: no strategy needs less than rows say, whatever the network, the machine and its options."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import cycle, product
from typing import Literal, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.config import States
from layerwise.cost.compute.roofline import OPTIMIZERS
from layerwise.cost.memory.rows import ByteRows, byte_rows
from layerwise.cost.memory.step import peak_bytes
from layerwise.cost.model import CostModel, CostOptions
from layerwise.cost.price import complete
from layerwise.graph.fuse import fuse
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.load import load_model
from layerwise.machine import load
from layerwise.search.baselines import baseline
from layerwise.search.priced.variants import Forms, Variants
from tests.cost import brute
from tests.cost.test_price import NETWORKS
from tests.examples import examples

Io = Literal["sample", "free", "boxes"]
FORMS = tuple(product((False, True), get_args(States)))


def variants(model: CostModel) -> Variants:
    """Every legal configuration of every layer, each in one of the forms that save memory; the ends have one."""
    forms = FORMS if model.options.kind == "training" else FORMS[:1]
    return Variants.grouped(
        {
            layer.name: (model.end_config(layer),)
            if layer.end
            else tuple(
                replace(config, recompute=recompute, states=states)
                for config, (recompute, states) in zip(brute.held(layer, model.devices.count), cycle(forms))
            )
            for layer in model.graph.layers
        }
    )


def check(rows: ByteRows, model: CostModel, space: Variants, choice: Mapping[str, int]) -> None:
    """No row is above the simulated peak of device 0, and each is the sum of its tables."""
    found, peak = rows.rows(choice), peak_bytes(model, space.strategy(dict(choice)))[0]
    worst = int(found.argmax())
    told = rows.instants[worst]
    assert found[worst] <= peak + 1e-6, f"{told}: {found[worst] - peak} more than {peak}"
    assert len(found) == len(rows.instants)
    for row in {worst, 0, len(found) - 1, len(found) // 2}:
        assert abs(rows.row(row).of(choice, space.base) - found[row]) <= 1e-6 * max(1.0, found[row])


@given(
    NETWORKS,
    st.sampled_from(["p100", "cpu"]),
    st.sampled_from(["sample", "free", "boxes"]),
    st.sampled_from(list(OPTIMIZERS)),
    st.sampled_from(["float32", "autocast-bfloat16"]),
    st.sampled_from(["training", "training", "inference"]),
    st.sampled_from([1, 4, 6]),
    st.integers(0, 2**32 - 1),
)
@examples(30)
def test_no_strategy_needs_less(
    network: LayerGraph,
    profile: str,
    io: Io,
    optimizer: str,
    dtype: str,
    kind: Literal["training", "inference"],
    devices: int,
    seed: int,
) -> None:
    """Random strategies of random networks."""
    options = CostOptions(io=io, optimizer=optimizer, dtype=dtype, kind=kind)
    model = CostModel(network, load(profile).device_graph(devices, min(devices, 2)), options)
    space, rng = variants(model), np.random.default_rng(seed)
    rows = byte_rows(model, space.configs, space.base)

    def drawn(start: Mapping[str, int] | None = None) -> dict[str, int]:
        many = {name: int(rng.integers(len(configs))) for name, configs in space.configs.items()}
        return many if start is None else {n: i if rng.random() < 0.2 else start[n] for n, i in many.items()}

    first = drawn()
    for choice in (first, drawn(), drawn(first), drawn(first)):
        check(rows, model, space, choice)


@pytest.mark.parametrize(
    ("profile", "form", "near"),
    [
        ("h100", (False, "replicated"), 0.999),
        ("h100", (True, "replicated"), 0.99),
        ("h100", (False, "sharded"), 0.99),
        ("cpu", (False, "replicated"), 0.999),
        ("cpu", (True, "replicated"), 0.955),
        ("cpu", (False, "sharded"), 0.88),
    ],
)
def test_rows_of_what_matters_are_near(profile: str, form: tuple[bool, States], near: float) -> None:
    """Of the named strategies of a network with branches and skips; else no bound would say much.

    Buckets of shared-out parameters are of several layers: what they hold meanwhile is not bounded, nor what a CPU
    takes for messages, which arrive in storages of their own, and for one parameter's update after the other.
    """
    model = CostModel(fuse(load_model("unet2d", 8)), load(profile).device_graph(8), CostOptions(optimizer="adam"))
    forms = Forms.of(model.graph, 8, ())
    for name in ("data", "owt"):
        strategy = {
            layer: replace(forms.of_layer(layer, c, form), recompute=form[0] and layer in forms.recomputable)
            for layer, c in complete(model, baseline(model, name)).items()
        }
        space = Variants.grouped({layer: (config,) for layer, config in strategy.items()})
        rows = byte_rows(model, space.configs, space.base).rows(dict.fromkeys(strategy, 0))
        assert near <= rows.max() / peak_bytes(model, strategy).max() <= 1 + 1e-9
