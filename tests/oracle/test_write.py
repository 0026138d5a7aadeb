"""An oracle's plan is a search's plan of the same strategy."""

from __future__ import annotations

import pytest

from layerwise.config import SearchSpace
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.importers.load import load_model
from layerwise.machine import load
from layerwise.oracle.ask import plan_of
from layerwise.oracle.question import Oracle, Question
from layerwise.search.find import search
from layerwise.search.make_plan import make_plan

SEARCHED = {
    "timeline_lower_bound_s",
    "data_timeline_s",
    "lower_bound_s",
    "additive_optimum_proven",
}  # what only a search can say


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(Question(fuse(load_model("lenet5", 1)), load("p100"), batch=16))


def test_it_says_all_that_a_search_says_of_the_same_strategy(oracle: Oracle) -> None:
    model = oracle.model(4)
    result = search(model, SearchSpace(4))
    answer = oracle.answer("layerwise", 4)
    assert answer.strategy == {layer.name: result.best.strategy[layer.name] for layer in model.graph.inner}
    ours = plan_of("lenet5", "p100", model, answer)
    theirs = make_plan("lenet5", "p100", model, SearchSpace(4), result, fused=True)
    assert {**theirs.predicted, **ours.predicted} == theirs.predicted
    assert set(theirs.predicted) - set(ours.predicted) == SEARCHED - {"additive_optimum_proven"}
    of_searches = {"additive_optimum_proven", "memory_limit_bytes", "offer"}
    assert set(theirs.provenance) - set(ours.provenance) == of_searches
    assert set(ours.provenance) < set(theirs.provenance)
    assert ours.predicted_layers == theirs.predicted_layers
    ours.check(model.graph, 4)


def test_what_the_oracle_answered_is_in_it(oracle: Oracle) -> None:
    answer = oracle.answer("filter", 4)
    plan = plan_of("lenet5", "p100", oracle.model(4), answer)
    assert plan.strategy == answer.strategy
    assert plan.predicted["timeline_s"] == answer.overlapped_s
    assert (plan.provenance["chosen"], plan.provenance["fits"]) == ("filter", answer.fits)
    assert plan.provenance["dims"] == ["c"]


def test_a_pipeline_is_no_plan(oracle: Oracle) -> None:
    with pytest.raises(LayerwiseError, match="pipeline is not a configuration for every layer"):
        plan_of("lenet5", "p100", oracle.model(2), oracle.answer("pipeline", 2))
