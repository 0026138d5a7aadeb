"""What an earlier run asked is read, and says what it said then."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from layerwise.cache import Answers
from layerwise.cost.model import CostModel
from layerwise.files import parse_json
from layerwise.graph.fuse import fuse
from layerwise.machine import load
from layerwise.oracle import question
from layerwise.oracle.ask import ask
from layerwise.oracle.question import Oracle, Question
from layerwise.oracle.report.found import as_dict
from layerwise.oracle.strategies import Wishes
from layerwise.oracle.tables import Priced
from tests.importers.networks import chain

NAMES = ("data", "spatial", "filter", "channel", "df", "ds", "layerwise")
ASKED = Question(fuse(chain(1, depth=2)), load("p100"), 2, gpus_per_node=4)


def told(answers: Answers | None, asked: Question = ASKED, names: tuple[str, ...] = NAMES) -> object:
    """Everything that an oracle says."""
    oracle = Oracle(asked, answers)
    return as_dict("chain", oracle, ask(oracle, names, (1, 4, 8), 8), 100, None, [])


def never(*_: object, **__: object) -> None:
    raise AssertionError("it is priced again")


def test_the_same_question_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    answers = Answers(tmp_path, said.append)
    names = NAMES[:-1]
    first = told(answers, names=names)
    assert first == told(None, names=names)
    priced, price = list[int](), question.price_plan

    def counted(model: CostModel, *rest: Any) -> Priced:
        priced.append(model.devices.count)
        return price(model, *rest)

    monkeypatch.setattr(question, "price_plan", counted)
    assert told(answers, names=names) == first
    assert priced == [1]  # what speed-ups are over
    assert not said
    monkeypatch.setattr(question, "price_plan", never)
    others = (
        replace(ASKED, batch=4),
        replace(ASKED, scaling="strong", batch=32),
        replace(ASKED, gpus_per_node=2),
        replace(ASKED, profile=load("v100")),
        replace(ASKED, options=replace(ASKED.options, optimizer="adam")),
        replace(ASKED, wishes=Wishes(inside=2)),
    )
    for other in others:
        with pytest.raises(AssertionError, match="it is priced again"):
            Oracle(other, answers).learn(names, 8)
    Oracle(ASKED, answers).learn(names, 8)


def test_searched_plans_are_those_of_before(tmp_path: Path) -> None:
    answers = Answers(tmp_path, never)
    assert told(answers) == told(answers)


def test_what_cannot_be_read_is_priced_anew(tmp_path: Path) -> None:
    said: list[str] = []
    answers, names = Answers(tmp_path, said.append), NAMES[:-1]
    first = told(answers, names=names)
    for path in tmp_path.glob("*.json"):
        kept = parse_json(path.read_text().partition("\n")[2], "it")
        del kept["data"]["shape"]
        answers.keep(path.stem, kept)
    assert told(answers, names=names) == first
    assert len(said) == 3
    assert all("is of no use" in line for line in said)
