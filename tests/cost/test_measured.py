"""t_C from measurements: the very cell's time where there is one, else the fit, else the roofline; and what it says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from layerwise.config import Config, SearchSpace
from layerwise.cost.basis import basis, describe, model_error, unmeasured_error, warnings
from layerwise.cost.compute.measured import LAYER, latest, step_name, update_name
from layerwise.cost.model import CostModel, CostOptions
from layerwise.cost.price import measured_share, price
from layerwise.machine import DeviceGraph
from layerwise.machine.layer_times import CellTime, Conditions, LayerTimes
from layerwise.measure.layers.cells import Wanted, wanted_cells
from tests.cost import brute
from tests.cost.test_model import residual

WHERE = Conditions(brute.PROCESSOR.name, "2.13.0", "float32", threads=1)
SPACE = SearchSpace(6, ("n", "c", "l", "k"), spread=True)


def machine(*sets: LayerTimes) -> DeviceGraph:
    return replace(brute.machine((2, 6)), layers=sets)


def model_of(*sets: LayerTimes, **options: str) -> CostModel:
    return CostModel(residual(), machine(*sets), CostOptions(**options))  # type: ignore[arg-type]


def all_cells(model: CostModel) -> dict[tuple[str, tuple[int, ...]], Wanted]:
    return wanted_cells(model, {layer.name: SPACE.configurations(layer.space.dims) for layer in model.graph.inner})


def times_of(cells: list[Wanted], scale: float = 1.0) -> LayerTimes:
    """Made-up times: different for every cell."""
    found: dict[str, dict[tuple[int, ...], CellTime]] = {}
    for i, cell in enumerate(cells):
        t = scale * (1 + i) * 1e-5
        found.setdefault(cell.name, {})[cell.extents] = CellTime(t, 2 * t, 0.1, 9, cell.forward, cell.backward)
    return LayerTimes(WHERE, cells=found)


def test_every_configuration_costs_what_its_cell_was_measured_to() -> None:
    cells = all_cells(model_of())
    times = times_of(list(cells.values()))
    model = model_of(times)
    for layer in model.graph.inner:
        for config in SPACE.configurations(layer.space.dims):
            own = wanted_cells(
                model, {other.name: (Config(),) for other in model.graph.inner} | {layer.name: (config,)}
            )
            compute = model.node_cost(layer, (config,)).compute
            mine = [times.cells[name][row] for name, row in own if name in times.cells]
            assert any(np.isclose(compute.forward[0], t.forward_s) for t in mine), f"{layer.name} {config}"
            assert compute.measured == pytest.approx(compute.total)
            assert not compute.fitted.any()
    fused = model.graph["linear"]
    (config,) = (Config.of({"c": 3}),)
    (cell,) = (c for c in all_cells(model).values() if c.what == "linear" and c.extents[:3] == (6, 1, 30))
    (update,) = (c for c in all_cells(model).values() if c.name == update_name("sgd") and c.extents == (30, 1))
    expected = [times.cells[c.name][c.extents].forward_s for c in (cell, update)]
    compute = model.node_cost(fused, (config,)).compute
    assert [float(compute.forward[0]), float(compute.update[0])] == pytest.approx(expected)
    assert float(compute.backward[0]) == pytest.approx(2 * expected[0])


def test_the_rest_is_fitted_and_without_anything_to_fit_to_analytic() -> None:
    cells = list(all_cells(model_of()).values())
    analytic = model_of()
    some = times_of([c for i, c in enumerate(cells) if i % 2])
    none = LayerTimes(WHERE, cells={LAYER: {(): CellTime(1.0, 1.0, 0, 1)}})
    parts = {"measured": 0, "fitted": 0}
    for layer in analytic.graph.inner:
        configs = SPACE.configurations(layer.space.dims)
        compute = model_of(some).node_cost(layer, configs).compute
        assert (compute.measured >= 0).all()
        assert (compute.measured + compute.fitted <= compute.total * (1 + 1e-12)).all()
        for name in parts:
            parts[name] += int((getattr(compute, name) > 0).sum())
        left = model_of(none).node_cost(layer, configs).compute
        roofline = analytic.node_cost(layer, configs).compute
        for part in ("forward", "backward", "update"):
            assert getattr(left, part) == pytest.approx(getattr(roofline, part))
        assert not (left.measured + left.fitted).any()
    assert min(parts.values()) > 20


def test_what_the_runtime_adds_is_paid_by_layer_and_by_step() -> None:
    cells = list(all_cells(model_of()).values())
    times = times_of(cells)
    extra = {LAYER: {(): CellTime(0.25, 0.5, 0, 1)}, step_name("sgd"): {(): CellTime(3.0, 5.0, 0, 1)}}
    plain, more = model_of(times), model_of(replace(times, cells={**times.cells, **extra}))
    for layer in plain.graph.inner:
        a, b = (model.node_cost(layer, (Config(),)).compute for model in (plain, more))
        assert float((b.forward - a.forward)[0]) == pytest.approx(0.25)
        assert float((b.backward - a.backward)[0]) == pytest.approx(0.5)
    serial = {layer.name: Config() for layer in plain.graph.inner}
    difference = price(more, serial).step_time_s - price(plain, serial).step_time_s
    assert difference == pytest.approx(8 + 0.75 * len(serial))


def test_the_shares_are_of_the_whole() -> None:
    model = model_of(replace(times_of(list(all_cells(model_of()).values())[::3]), held_out_error=0.07))
    serial = {layer.name: Config() for layer in model.graph.inner}
    found = price(model, serial)
    on = basis(model, found)
    assert on.measured + on.fitted + on.analytic == pytest.approx(1)
    assert min(on.measured, on.fitted) > 0
    assert on.of_step == pytest.approx(sum(p.seconds["compute"] for p in found.layers.values()) / found.step_time_s)
    share = measured_share(model, serial)
    assert share == pytest.approx(on.measured)
    assert model_error(model, serial) == pytest.approx(0.01 * on.measured + 0.07 * (on.fitted + on.analytic))
    said = describe(model, on)
    assert f"{on.measured:.0%} measured on {WHERE.device} (float32, torch 2.13.0, 1 thread)" in said
    assert "median error 7.0% on cells held out" in said
    assert "not measured but an analytic roofline" in describe(model_of(), basis(model_of(), price(model_of(), serial)))


@pytest.mark.parametrize(("held_out", "unmeasured"), [(None, 0.03), (0.01, 0.03), (0.3, 0.3)])
def test_what_is_fitted_errs_as_cells_held_out_of_the_fit_do(held_out: float | None, unmeasured: float) -> None:
    """But no less than a roofline is taken to, as few cells may fit one another by chance."""
    wanted = list(all_cells(model_of()).values())
    serial = {layer.name: Config() for layer in model_of().graph.inner}
    for known in (wanted, wanted[::3], wanted[:0]):
        model = model_of(replace(times_of(known), held_out_error=held_out))
        share = measured_share(model, serial)
        assert model_error(model, serial) == pytest.approx(0.01 * share + unmeasured * (1 - share))
    assert unmeasured_error(model) == unmeasured
    assert model_error(model_of(), serial) == unmeasured_error(model_of()) == 0.03


def test_the_latest_set_of_the_element_type_is_used() -> None:
    sets = [
        LayerTimes(replace(WHERE, dtype=d, torch=t)) for d, t in (("float32", "1"), ("float64", "2"), ("float32", "3"))
    ]
    assert latest(sets, "float32") is sets[2]
    assert latest(sets, "float64") is sets[1]
    assert latest(sets, "bfloat16") is None


def test_other_conditions_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layerwise.cost.basis.version", lambda name: {"torch": "2.13.0+cpu"}[name])
    assert not list(warnings(model_of()))
    assert not list(warnings(model_of(LayerTimes(WHERE))))
    (said,) = warnings(model_of(LayerTimes(WHERE), dtype="float16"))
    assert "has times of layers at float32 only; at float16 t_C is analytic" in said
    (said,) = warnings(model_of(LayerTimes(replace(WHERE, torch="2.11.0+cu128"))))
    assert "torch 2.11.0+cu128, and here is 2.13.0+cpu" in said
    (said,) = warnings(model_of(LayerTimes(replace(WHERE, device="another"))))
    assert "measured on another" in said
