"""Predicted beside measured times: by hand, and of plans that run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from layerwise.__main__ import dispatch
from layerwise.cli import run_main
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.importers.load import load_network
from layerwise.plan import Plan
from layerwise.run.load import load
from layerwise.run.parallel import of
from layerwise.trace import Trace
from layerwise.train.compare_times import PARTS, Comparison, Part, _together, check, compare_times, tables
from tests.comm.thread import ThreadComm, run_threads
from tests.run.plans import optimised_plan


def test_what_ranks_do_together_begins_when_the_last_has_come() -> None:
    ranks = {0: [(0.0, 5.0), (10.0, 15.0)], 2: [(3.0, 5.5), (14.0, 16.0)]}
    assert _together(ranks, alone=False) == Part(None, (2.5 + 2.0) / 2, (3.0 + 4.0) / 2, 2)
    assert _together(ranks, alone=True) == Part(None, 5.0)


def comparison(**parts: Part) -> Comparison:
    return Comparison(Part(0.9, 1.0), dict(parts), {"conv1": dict(parts)})


@pytest.mark.parametrize(
    ("parts", "causes"),
    [
        ({"compute_s": Part(0.5, 0.54)}, []),  # within a tenth
        ({"compute_s": Part(0.5, 0.56)}, ["layer slower than its profile"]),
        ({"compute_s": Part(0.5, 0.44)}, ["layer faster than its profile"]),
        ({"compute_s": Part(0.001, 0.01)}, []),  # ten times as long, and yet less than a hundredth of the step
        ({"transfers_s": Part(0.1, 0.2)}, ["link slower than its profile"]),
        ({"transfers_s": Part(0.1, 0.1, 0.05, 3)}, ["waits 50.0 ms for rank 3"]),
        ({"sync_s": Part(0.0, 0.2)}, ["link, in sums of gradients, slower than its profile"]),
        ({"statistics_s": Part(0.1, 0.2)}, ["statistics slower than its profile"]),
        ({"compute_s": Part(None, 0.2)}, []),
    ],
)
def test_causes(parts: dict[str, Part], causes: list[str]) -> None:
    found = comparison(**parts)
    assert found.causes("conv1") == causes
    assert found.as_dict()["layers"]["conv1"]["causes"] == causes  # type: ignore[index]
    assert len(list(tables(found))) == 1 + bool(causes)


def plan_of(gpus: int) -> Plan:
    return optimised_plan(fuse(load_network("lenet5", 16, None).graph), gpus)


@pytest.mark.parametrize(
    ("steps", "accumulate", "said"), [(2, 1, "take more than 2"), (9, 2, "leave out --accumulate")]
)
def test_what_cannot_be_compared_is_said(steps: int, accumulate: int, said: str) -> None:
    with pytest.raises(LayerwiseError, match=said):
        check(plan_of(2), steps, accumulate)


def test_an_older_plan_has_nothing_to_compare(tmp_path: Path) -> None:
    plan = plan_of(2)
    old = Plan(**{name: getattr(plan, name) for name in Plan.__slots__ if name != "predicted_layers"})
    with pytest.raises(LayerwiseError, match="search again"):
        check(old, 9, 1)


def test_every_rank_gets_every_layer_that_the_plan_predicts() -> None:
    network = load_network("lenet5", 16, None)
    plan = plan_of(2)

    def train(comm: ThreadComm) -> dict[str, object]:
        module = load(plan, network, comm=comm)
        trace = of(module).trace = Trace()
        y = torch.randint(0, 10, (16,))
        x = torch.randn(16, *network.graph.layers[0].out.shape[1:])
        share = module.share(16)
        for _ in range(4):
            nn.functional.cross_entropy(module(x[share]), y[share]).backward()
        return compare_times(trace, module, [1.0, 1.0, 0.4, 0.2], comm).as_dict()

    first, second = run_threads(2, train)
    assert first == second
    assert first["step"] == {"predicted_s": plan.predicted["timeline_s"], "measured_s": pytest.approx(0.3)}
    layers: Any = first["layers"]
    assert set(plan.predicted_layers) <= set(layers)
    for layer in fuse(network.graph).inner:
        assert layers[layer.name]["compute_s"]["measured_s"] > 0
    for name, times in plan.predicted_layers.items():
        for part, seconds in times.items():
            assert layers[name][part]["predicted_s"] == pytest.approx(seconds)
    measured = {part for parts in layers.values() for part in parts if part in PARTS and parts[part]["measured_s"] > 0}
    assert measured == {part for times in plan.predicted_layers.values() for part in times}


def test_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("COLUMNS", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    searched = ["search", "lenet5", "--gpus", "1", "--profile", "cpu", "--global-batch", "16", "--out", "plan.json"]
    assert run_main(dispatch, searched) == 0
    capsys.readouterr()
    assert run_main(dispatch, ["run", "plan.json", "--steps", "4", "--compare", "--json"]) == 0
    out, err = capsys.readouterr()
    times = json.loads(out)["times"]
    assert times["totals"]["compute_s"]["measured_s"] > 0
    assert "predicted" in err
    assert run_main(dispatch, ["run", "plan.json", "--steps", "2", "--compare"]) == 2
    assert "--compare: the first 2 steps are not timed" in capsys.readouterr().err
