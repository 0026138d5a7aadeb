"""Time against memory, and what would make a plan fit."""

from __future__ import annotations

from layerwise.config import SearchSpace
from layerwise.cost.memory.step import peak_bytes
from layerwise.cost.model import CostModel, CostOptions
from layerwise.graph.fuse import fuse
from layerwise.importers.load import load_model
from layerwise.machine import load
from layerwise.search.curve import memory_curve
from layerwise.search.find import search
from layerwise.search.limit.variants import OFFERS
from layerwise.search.remedies import remedies
from layerwise.search.report.tables import curve_table, curve_values, draw_curve

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
    told = curve_values(curve)
    assert [row["fits"] for row in told] == [*[True] * len(fitting), False]
    assert told[-1]["least_memory_bytes"] > limits[-1]
    assert len(curve_table(curve).columns[0].cells) == len(curve)
    (axis,) = draw_curve(curve, "an MLP").axes
    assert axis.get_title() == "an MLP"
    assert len(axis.get_lines()) == 4  # three curves, and where nothing fits


def test_a_curve_ends_at_its_least_limit() -> None:
    model = model_of()
    free = search(model, SPACE).best.price.memory_bytes
    (point,) = memory_curve(model, SPACE, 2 * free, 3 * free, offer=OFFERS)
    assert point.best is not None


def test_remedies_are_tried_each_alone() -> None:
    model = model_of()
    least = search(model, SPACE, memory_limit_bytes=1.0).least
    assert least is not None
    tried = remedies(model, SPACE, least.bytes - 1, offer=(), more_devices=load("p100").device_graph(4))
    assert [remedy.what for remedy in tried] == [
        "--offer recompute,shard",
        "k in --dims",
        "4 GPUs",
        "a global batch of 4",
    ]
    offered, _, more, fewer = tried
    assert offered.bytes == least.bytes
    assert not offered.fits
    assert all(remedy.fits == (remedy.bytes <= least.bytes - 1) for remedy in (more, fewer))
