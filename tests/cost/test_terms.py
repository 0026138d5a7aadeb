"""The table of terms: names, and the equations that the docs have."""

from __future__ import annotations

from pathlib import Path

import pytest

from layerwise.cost.terms import EDGE_TERMS, LAYER_TERMS, TERMS, Term

DOCS = Path(__file__).parents[2] / "docs" / "explanation" / "cost_model.md"


@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.name)
def test_the_equation_is_in_the_docs(term: Term) -> None:
    assert f"\n({term.equation})" in DOCS.read_text(encoding="utf-8")


def test_names_are_distinct_and_phases_whole() -> None:
    assert len({term.name for term in TERMS}) == len(TERMS) == len(LAYER_TERMS) + len(EDGE_TERMS) + 1  # and t_C
    assert all(sum(term.phases.values()) == 1 for term in LAYER_TERMS)
