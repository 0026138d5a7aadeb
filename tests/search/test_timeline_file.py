"""The simulated step as a Chrome trace, beside the runtime's own."""

import json
from collections import defaultdict
from pathlib import Path

import pytest

from layerwise.chrome import CATEGORIES
from layerwise.config import Config
from layerwise.cost.model import CostModel
from layerwise.cost.timeline.simulate import timeline
from layerwise.graph.fuse import fuse
from layerwise.importers.load import load_model
from layerwise.machine import load
from layerwise.search.baselines import baseline
from layerwise.search.find import candidate
from layerwise.search.make_plan import layer_times, write_timeline


def model(gpus: int) -> CostModel:
    return CostModel(fuse(load_model("lenet5", 64)), load("p100").device_graph(gpus, 2))


@pytest.mark.parametrize("name", ["data", "model", "owt"])
def test_the_file_is_the_simulated_step(name: str, tmp_path: Path) -> None:
    """Its last span ends with the step, all devices' spans are in it, and none of a device overlap in a category."""
    cost = model(4)
    strategy = baseline(cost, name)
    write_timeline(candidate(cost, name, strategy), tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert named == {i: f"rank {i} (predicted, node{i // 2}/gpu{i % 2})" for i in range(4)}
    spans = [e for e in events if e["ph"] == "X"]
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(timeline(cost, strategy).total_s * 1e6, abs=0.01)
    tracks = defaultdict(list)
    for e in spans:
        assert e["cat"] in CATEGORIES
        tracks[e["pid"], e["cat"]].append((e["ts"], e["ts"] + e["dur"]))
    for times in tracks.values():
        for (_, end), (start, _) in zip(sorted(times), sorted(times)[1:], strict=False):
            assert start >= end - 0.002
    assert {e["name"] for e in spans} >= {f"{layer.name} (backward)" for layer in cost.graph.inner}


def test_layers_times_are_those_of_the_spans() -> None:
    cost = model(4)
    strategy = {layer.name: Config.of({"n": 4}) for layer in cost.graph.inner}
    times = layer_times(cost, strategy)
    for layer in cost.graph.inner:
        compute = cost.node_cost(layer, (strategy[layer.name],)).compute
        assert times[layer.name]["compute_s"] == pytest.approx(float(compute.forward[0] + compute.backward[0]))
    assert sum("sync_s" in parts for parts in times.values()) == 1  # one bucket holds all of LeNet-5
