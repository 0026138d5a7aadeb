"""A search that was done before is read, and says what it said then."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from layerwise.cache import Answers
from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel, CostOptions
from layerwise.files import parse_json
from layerwise.graph.fuse import fuse
from layerwise.machine import load
from layerwise.search import find
from layerwise.search.curve import memory_curve
from layerwise.search.limit.variants import OFFERS
from layerwise.search.report.found import as_dict
from layerwise.search.result import SearchResult
from tests.importers.networks import chain

LIMITS = {"without": 1e12, "binding": 5.9e6, "impossible": 1e4}


def model(batch: int = 8) -> CostModel:
    return CostModel(fuse(chain(batch, depth=1)), load("p100").device_graph(2), CostOptions(optimizer="adam"))


def search(answers: Answers | None, limit: float, batch: int = 8) -> SearchResult:
    return find.search(model(batch), SearchSpace(2), memory_limit_bytes=limit, answers=answers)


def told(result: SearchResult) -> dict[str, Any]:
    return as_dict(result, "chain", {}, [])


def never(*_: object, **__: object) -> Any:
    raise AssertionError("it is searched again")


@pytest.mark.parametrize("limit", LIMITS)
def test_the_same_search_is_read(limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    answers = Answers(tmp_path, said.append)
    first = search(answers, LIMITS[limit])
    assert (first.within is not None) == (limit != "without")
    assert first.best.fits == (limit != "impossible")
    monkeypatch.setattr(find, "narrow", never)
    monkeypatch.setattr(find, "_limited", never)
    monkeypatch.setattr(find, "overlapped", never)
    again = search(answers, LIMITS[limit])
    assert told(again) == told(first) == told(search(answers, LIMITS[limit]))
    assert again.optimum == first.optimum
    assert (again.within, again.least) == (first.within, first.least)
    assert "cache" in again.seconds
    assert not said
    with pytest.raises(AssertionError, match="it is searched again"):
        search(answers, LIMITS[limit], batch=16)


def test_the_points_of_a_curve_share_what_there_is_without_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow, times = find.narrow, list[None]()

    def counted(*args: Any) -> Any:
        times.append(None)
        return narrow(*args)

    monkeypatch.setattr(find, "narrow", counted)
    curve = memory_curve(model(), SearchSpace(2), 5.6e6, 7e6, offer=OFFERS, answers=Answers(tmp_path, print))
    assert len(curve) > 1
    assert len(times) == 1


def altered(change: Callable[[dict[str, Any]], None], tmp_path: Path) -> list[str]:
    """What is said of an answer that was changed, and that it is found anew."""
    said: list[str] = []
    answers = Answers(tmp_path, said.append)
    first = search(answers, 1e12)
    (file,) = (one for one in tmp_path.iterdir() if '"optimum"' in one.read_text())
    answer = parse_json(file.read_text().partition("\n")[2], "answer")
    change(answer)
    answers.keep(file.stem, answer)
    assert told(search(answers, 1e12)) == told(first)
    assert told(search(answers, 1e12)) == told(first)
    return said


def another(strategy: dict[str, Any]) -> None:
    """Gives the first layer another configuration, which costs something else."""
    first = next(iter(strategy))
    strategy[first] = {} if strategy[first] else {"n": 2}


def worse(answer: dict[str, Any]) -> None:
    another(answer["strategies"][0])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (worse, "its strategy costs something else now"),
        (lambda answer: answer.update(kept="many"), "TypeError: a str stands where a <class 'int'> belongs"),
        (lambda answer: answer["optimum"].update(final_nodes=None), "TypeError: a NoneType stands where"),
        (lambda answer: answer["optimum"].update(order=3), "TypeError: a int stands where"),
        (lambda answer: answer.pop("optimum"), "KeyError: 'optimum'"),
        (lambda answer: answer["strategies"][0].popitem(), "the strategy has no configuration for layer"),
    ],
)
def test_an_answer_that_is_none_is_found_anew(
    change: Callable[[dict[str, Any]], None], why: str, tmp_path: Path
) -> None:
    (line,) = altered(change, tmp_path)
    assert "is of no use" in line
    assert why in line
