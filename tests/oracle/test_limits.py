"""What holds a strategy back: each finding of table 6 with its number."""

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from benchmarks.paradl.facts import Facts, facts_of
from benchmarks.paradl.project import Formulas, case_of, project
from layerwise.cost.timeline.simulate import timeline
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.importers.load import load_model
from layerwise.machine import load
from layerwise.oracle.limits import Finding, Sizes, findings
from layerwise.oracle.pipeline import imbalance, pipeline_stages
from layerwise.oracle.question import Answer, Oracle, Question
from layerwise.oracle.runs import MeasuredRun, accuracy, compare, mean_accuracy, read_runs


@cache
def facts(name: str) -> Facts:
    return facts_of(fuse(load_model(name, 32)), load("v100"))


def sizes(model: str) -> Sizes:
    f = facts(model)
    items = sum(layer.inputs + layer.outputs for layer in f.layers)
    return Sizes(f.weights, f.parameters - f.weights, items, f.compute_s)


def found(model: str, strategy: str, p: int, batch: int, form: Formulas = "published") -> dict[str, Finding]:
    """Of the closed forms' projections, which are known by hand."""
    projection = project(case_of(strategy, facts(model), p, batch), form)
    staged = pipeline_stages(facts(model).model(p, batch), p, projection.segments) if strategy == "pipeline" else ()
    rows = findings(projection, sizes(model), load("v100").device_graph(p), staged)
    assert [f.lost_s for f in rows] == sorted((f.lost_s for f in rows), reverse=True)
    return {f.name: f for f in rows}


@pytest.mark.parametrize("model", ["vgg16", "alexnet", "lenet5"])
def test_sizes_are_the_closed_forms(model: str) -> None:
    mine, theirs = Oracle(Question(facts(model).graph, load("v100"), 32)).sizes, sizes(model)
    assert (mine.weights, mine.biases, mine.activations) == (theirs.weights, theirs.biases, theirs.activations)
    assert mine.compute_s == pytest.approx(theirs.compute_s)


def test_one_device_has_no_limits() -> None:
    assert found("vgg16", "data", 1, 32) == {}


def test_gradients_of_vgg() -> None:
    rows = found("vgg16", "data", 64, 64 * 32)
    at = project(case_of("data", facts("vgg16"), 64, 64 * 32)).phases
    assert rows["gradient exchange"].value == pytest.approx(at.gradient_s / at.total_s)
    assert rows["number of PEs"].value == pytest.approx(1 / 32)
    assert "layer-wise communication" not in rows
    assert "computation redundancy" not in rows  # the published form divides without loss


def test_what_overlap_hides_of_the_gradients_is_not_lost() -> None:
    """The cost tables simulate it; on 2 GPUs hardly anything is exposed."""
    oracle = Oracle(Question(facts("vgg16").graph, load("v100"), 32))
    answer = oracle.answer("data", 2)
    at, step = answer.projection.phases, timeline(oracle.model(2), answer.strategy or {})
    (exchange,) = (f for f in oracle.findings(answer) if f.name == "gradient exchange")
    assert exchange.lost_s == pytest.approx(step.exposed_sync_s)
    assert 0 < exchange.lost_s < at.gradient_s / 2
    assert exchange.value < at.gradient_s / at.total_s
    assert f"is {at.gradient_s / at.total_s:.1%} of an iteration without overlap" in exchange.text
    assert f"the exposed part is {exchange.value:.1%}" in exchange.text


def test_hidden_congestion_costs_nothing() -> None:
    projection = project(case_of("df", facts("vgg16"), 16, 128))
    rows = findings(projection, sizes("vgg16"), load("v100").device_graph(16), (), 1e-6)
    (congestion,) = (f for f in rows if f.name == "network congestion")
    assert congestion.lost_s == 1e-6


def test_filters() -> None:
    rows = found("vgg16", "filter", 32, 32, "as-run")
    assert rows["layer-wise communication"].value > 0.5
    assert rows["computation redundancy"].value > 0.5
    assert "64 output channels" in rows["number of PEs"].text
    assert rows["number of PEs"].value == 0.5
    assert rows["memory redundancy"].value > 0.9


def test_halos_and_redundant_weights() -> None:
    rows = found("vgg16", "ds", 16, 128)
    assert rows["point-to-point communication"].value > 0
    assert 0 < rows["memory redundancy"].value < 1


def test_congestion_is_of_data_and_filter() -> None:
    rows = found("vgg16", "df", 16, 128)
    assert rows["network congestion"].value == 2  # four rings, two NICs
    assert rows["network congestion"].lost_s == pytest.approx(rows["gradient exchange"].lost_s / 2)


def test_pipelines_are_as_slow_as_their_slowest_stage() -> None:
    rows = found("vgg16", "pipeline", 4, 32)
    assert rows["workload balancing"].value > 0
    assert rows["workload balancing"].lost_s > 0
    assert "42.9% of all turns" in rows["workload balancing"].text  # 3 of 4 + 4 - 1


def test_halos_are_a_share_of_an_iteration() -> None:
    """Not of the gradient exchange, which overlap may have left with next to nothing."""
    text = found("lenet5", "spatial", 4, 32)["point-to-point communication"].text
    assert text.startswith("halo exchange is ")
    assert "gradient" not in text


def test_imbalance_is_that_of_the_answers_stages() -> None:
    question = Question(facts("alexnet").graph, load("v100"), 32)
    oracle = Oracle(question)
    answer = oracle.answer("pipeline", 4)
    (balance,) = (f for f in oracle.findings(answer) if f.name == "workload balancing")
    assert balance.value == pytest.approx(imbalance(answer.stages))


def test_segments_gradients_are_part_of_the_update() -> None:
    answer = (oracle := Oracle(Question(facts("alexnet").graph, load("v100"), 32))).answer("pipeline", 4)
    (update,) = (f for f in oracle.findings(answer) if f.name == "weight update")
    assert "gradients of segments added up" in update.text


def test_memory() -> None:
    assert "memory capacity" in found("cosmoflow:512", "data", 4, 4)


GOOD = {"strategy": "data", "gpus": 16, "batch": 512, "iteration_s": 0.2}


def written(folder: Path, value: object) -> Path:
    path = folder / "runs.json"
    path.write_text(json.dumps(value))
    return path


def test_an_epoch_is_its_iterations_of_a_strategy_by_its_long_name_too(tmp_path: Path) -> None:
    run = {"strategy": "data+spatial", "gpus": 8, "batch": 64, "epoch_s": 100.0, "samples": 6400, "inside": 4}
    (found,) = read_runs(written(tmp_path, {"runs": [run]}))
    assert found == MeasuredRun("ds", 8, 64, 1.0, inside=4)


def test_several_iterations_are_their_median_and_outliers_are_counted(tmp_path: Path) -> None:
    (found,) = read_runs(written(tmp_path, [GOOD | {"iteration_s": [0.2, 0.21, 0.19, 0.2, 0.8]}]))
    assert found.iteration_s == 0.2
    assert (found.iterations, found.slow) == (5, 1)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({}, "runs: missing"),
        ({"runs": []}, "runs: expected a list of at least one item"),
        (["data"], "[0]: expected an object with strategy, gpus, batch, found the string 'data'"),
        ([GOOD, {}], "[1].strategy: missing"),
        ([GOOD | {"strategy": "dta"}], "did you mean 'data'"),
        ([{k: v for k, v in GOOD.items() if k != "gpus"}], "[0].gpus: missing"),
        ([GOOD | {"batch": 0}], "[0].batch: expected a whole number from 1 to 1,073,741,824, found 0"),
        ([GOOD | {"batch": True}], "batch: expected a number, found true"),
        ([{k: v for k, v in GOOD.items() if k != "iteration_s"}], "neither 'iteration_s' nor 'epoch_s'"),
        ([GOOD | {"iteration_s": "fast"}], "iteration_s: expected a number, found the string 'fast'"),
        ([GOOD | {"iteration_s": []}], "a list with nothing in it"),
        ([GOOD | {"iteration_s": [0.1, -1]}], "iteration_s[1]: expected a finite number of at least 0, found -1"),
        ([GOOD | {"iteration_s": 0}], "iteration_s: expected seconds from 1e-12 to 1e+12, found 0"),
        ([{"strategy": "data", "gpus": 2, "batch": 4, "epoch_s": 1.0}], "nor 'epoch_s' with 'samples'"),
        ([GOOD | {"strategy": "df", "inside": 1.5}], "inside: expected a whole number, found 1.5"),
        ([GOOD | {"inside": 2}], "inside: is for df and ds, not for data"),
        ([GOOD | {"segments": 2}], "segments: is for pipeline, not for data"),
        ([GOOD | {"insdie": 2}], "insdie: unknown field; did you mean 'inside'?"),
        ([GOOD | {"iteration_s": 1e-320}], "iteration_s: expected seconds from"),
        ([{"strategy": "data", "gpus": 2, "batch": 4, "epoch_s": 1e308, "samples": 1}], "epoch_s: expected seconds"),
        ([GOOD | {"batch": 10**30}], "batch: expected a whole number from 1 to 1,073,741,824, found 1000"),
        ([GOOD | {"gpus": 10**30}], "gpus: expected a whole number from 1 to 65,536"),
        ([GOOD | {"strategy": ["data"]}], "strategy: expected a non-empty string"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, value: object, reason: str) -> None:
    with pytest.raises(LayerwiseError, match="measured file") as told:
        read_runs(written(tmp_path, value))
    assert reason in str(told.value)


def test_accuracy_is_the_papers() -> None:
    assert accuracy(0.9, 1.0) == pytest.approx(0.9)
    assert accuracy(1.1, 1.0) == pytest.approx(0.9)
    assert accuracy(3.0, 1.0) == pytest.approx(-1.0)


def test_times_without_spread_have_no_outliers(tmp_path: Path) -> None:
    (found,) = read_runs(written(tmp_path, [GOOD | {"iteration_s": [1, 1, 1, 1, 1.0001]}]))
    assert found.slow == 0
    runs = [MeasuredRun("data", 2, 64, seconds) for seconds in (1.0, 1.0, 1.0, 1.0, 1.0001)]
    assert not any(c.abnormal for c in compare([(run, answered(1.0)) for run in runs]))


@pytest.mark.parametrize(("slow", "flagged"), [(5, False), (6, True)])
def test_a_run_is_flagged_for_more_than_a_few_slow_iterations(slow: int, flagged: bool) -> None:
    run = MeasuredRun("data", 2, 64, 1.0, iterations=100, slow=slow)
    assert bool(compare([(run, answered(1.0))])[0].abnormal) is flagged


def answered(seconds: float) -> Answer:
    return cast(Answer, SimpleNamespace(overlapped_s=seconds))


def test_a_congested_run_is_flagged_and_a_biased_projection_is_not() -> None:
    """All runs take 1.3 times their projection; the one that takes 4 times is abnormal."""
    runs = [MeasuredRun("data", gpus, 32 * gpus, 1.3 + gpus / 1000) for gpus in (1, 2, 4, 8, 16)]
    pairs = [(run, answered(1.0)) for run in runs]
    assert [c.abnormal for c in compare(pairs)] == [""] * 5
    found = compare([*pairs, (MeasuredRun("data", 32, 1024, 4.0), answered(1.0))])
    assert [bool(c.abnormal) for c in found] == [False] * 5 + [True]
    assert "4.00× its projection" in found[-1].abnormal
    assert mean_accuracy(found)["data"] == pytest.approx(sum(c.accuracy for c in found) / 6)
