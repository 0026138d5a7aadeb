"""Layers that the user fixes: named one by one, by a module around them, or by a pattern."""

from pathlib import Path

import pytest

from layerwise.config import Config, SearchSpace
from layerwise.cost.model import CostModel
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.importers.load import load_model
from layerwise.machine import load
from layerwise.plan import load_plan
from layerwise.search.__main__ import main as command
from layerwise.search.baselines import fixed_layers
from layerwise.search.find import search
from layerwise.search.rebuild import rebuild, replan

GRAPH = fuse(load_model("alexnet", 64))
TWO, ONE = Config.of({"n": 2}), Config()


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({"classifier.4": {"n": 2}}, {"classifier.4": TWO}),
        ({"classifier": {"n": 2}}, {"classifier.1": TWO, "classifier.4": TWO, "classifier.6": TWO}),
        ({"cla*.[14]": {"n": 2}}, {"classifier.1": TWO, "classifier.4": TWO}),
        ({"cla*.[14]": {"n": 2}, "classifier.1": {}}, {"classifier.1": ONE, "classifier.4": TWO}),
    ],
)
def test_layers_by_pattern(wanted: dict[str, object], found: dict[str, Config]) -> None:
    assert fixed_layers(GRAPH, 4, wanted) == found


@pytest.mark.parametrize(
    ("wanted", "said"),
    [({"clasifier": {}}, "did you mean 'classifier"), ({"features": {"h": 5}}, "5")],
)
def test_what_cannot_be_fixed(wanted: dict[str, object], said: str) -> None:
    with pytest.raises(LayerwiseError, match=said):
        fixed_layers(GRAPH, 4, wanted)


def test_the_best_plan_with_fixed_layers_is_no_better_than_the_best_of_all() -> None:
    model = CostModel(GRAPH, load("p100").device_graph(4))
    fixed = fixed_layers(GRAPH, 4, {"classifier": {}})
    free, found = search(model, SearchSpace(4)), search(model, SearchSpace(4, fixed=tuple(fixed.items())))
    assert free.best.timeline.total_s < found.best.timeline.total_s
    for candidate in (found.best, *found.simulated):
        assert {name: candidate.strategy[name] for name in fixed} == fixed
    assert found.baselines["data"].strategy == free.baselines["data"].strategy


def test_a_plan_remembers_what_was_fixed(tmp_path: Path) -> None:
    """Its search is repeated with the same layers fixed; a strategy of the wrong form is refused."""
    path, asked = tmp_path / "plan.json", ["mlp:64x32x10", "--gpus", "4", "--global-batch", "8", "--profile", "cpu"]
    assert command([*asked, "--fix", "*", "n=2", "--fix", "0", "1", "--out", str(path)]) == 0
    plan = load_plan(path)
    assert plan.strategy == {"0": ONE, "2": TWO}
    assert command([*asked, "--fix", "0", "n=2", "--out", str(path)]) == 0
    plan = load_plan(path)
    assert plan.provenance["fixed"] == {"0": {"n": 2}}
    assert rebuild(plan)[1].fixed == (("0", TWO),)
    assert replan(plan, 2, 2).strategy["0"] == TWO
    with pytest.raises(LayerwiseError, match="degrees must be like c=4"):
        command([*asked, "--fix", "0", "n2"])
