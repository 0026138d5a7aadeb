"""Constraints: the optimum under them is the least of all strategies that meet them, and what they cost is said."""

import json
from itertools import product
from pathlib import Path

import pytest

import layerwise
from layerwise.__main__ import dispatch
from layerwise.cli import run_main
from layerwise.config import Config, SearchSpace
from layerwise.constraints import Constraint, parse_constraints
from layerwise.cost.model import CostModel
from layerwise.cost.price import complete, price
from layerwise.errors import LayerwiseError
from layerwise.partition.sharding import held_configurations
from layerwise.search.find import search

LABELS = ("n", "c", "h", "w", "k")
RULES = [
    ["keep 0=n"],
    ["keep 2"],
    ["at-most *=2"],
    ["one-node *"],
    ["same 0=4"],
    ["keep 0=n", "same 2=4", "at-most 4=2"],
]


@pytest.fixture(scope="module")
def model() -> CostModel:
    """Two nodes of two devices, where splitting channels pays."""
    graph = layerwise.fuse(layerwise.load_model("mlp:256x1024x1024x64", 8))
    return CostModel(graph, layerwise.load_profile("p100").device_graph(4, 2))


def meets(rules: tuple[Constraint, ...], strategy: dict[str, Config]) -> bool:
    one = all(c.allows(config) for name, config in strategy.items() for c in rules if c.names(name))
    ties = ({config for name, config in strategy.items() if c.names(name)} for c in rules if c.same)
    return one and all(len(configs) == 1 for configs in ties)


@pytest.mark.parametrize("texts", RULES, ids=" ".join)
def test_the_optimum_is_the_least_of_all_that_meet_them(model: CostModel, texts: list[str]) -> None:
    rules = parse_constraints(texts, 2, LABELS)
    space = SearchSpace(4, spread=True, constraints=rules)
    inner = [layer.name for layer in model.graph.inner]
    choices = [held_configurations(layer, space) for layer in model.graph.inner]
    strategies = (dict(zip(inner, configs, strict=True)) for configs in product(*choices))
    costs = [price(model, complete(model, s)).step_time_s for s in strategies if meets(rules, s)]
    found = search(model, space, objective="additive")
    assert found.additive.price.step_time_s == pytest.approx(min(costs))
    assert found.optimum.proven
    assert found.unconstrained is not None
    assert found.unconstrained.price.step_time_s <= found.best.price.step_time_s * (1 + 1e-9)
    by_timeline = search(model, space)
    for other in (found.best, by_timeline.best, *(by_timeline.simulated if "same" not in str(texts) else ())):
        assert meets(rules, {name: other.strategy[name] for name in inner})


def test_under_a_memory_limit_and_in_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are in the plan, whose layers `explain` compares under them; the cache tells searches apart."""
    out = tmp_path / "plan.json"
    line = f"search mlp:256x1024x1024x64 --gpu p100 --gpus 4 --global-batch 8 --memory-limit 9.5MB --out {out} --json"
    free, ruled = (
        (run_main(dispatch, [*line.split(), *more]), json.loads(capsys.readouterr().out))[1]
        for more in ([], ["--keep", "2=n", "--at-most", "4=2"])
    )
    assert ruled["without_constraints"]["timeline_s"] == free["timeline_s"] <= ruled["timeline_s"]
    assert ruled["memory_bytes"] <= 9.5e6
    assert ruled["strategy"]["2"]["c"] == 1
    provenance = layerwise.load_plan(out).provenance
    assert provenance["constraints"] == ["keep 2=n", "at-most 4=2"]
    assert run_main(dispatch, ["explain", str(out), "2", "--all", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["alternatives"]
    assert all(row["config"].keys() <= {"n", "placement"} for row in rows)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--keep clasifier=n", "did you mean 'classifier'?"),
        ("--keep features.*=z", "'z' is no dimension"),
        ("--at-most classifier", "name layers and what holds for them"),
        ("--at-most classifier=0", "not a number of devices"),
        ("--keep features=c --replicas 2", "has no configuration that meets 'keep features=c'"),
        ("--at-most *=2 --price data", "is against the constraint 'at-most *=2'"),
    ],
)
def test_what_cannot_be_is_one_sentence(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(dispatch, ["search", "lenet5", "--gpus", "4", *flags.split()]) == 2
    assert said in capsys.readouterr().err


def test_texts_that_are_none() -> None:
    for text in ("hold 0=n", "keep", "same 0", 3):
        with pytest.raises(LayerwiseError, match="constraint"):
            parse_constraints([text], 2, LABELS)  # type: ignore[list-item]
