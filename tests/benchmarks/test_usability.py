"""Halstead's measures, counted as in the tables of the thesis; by them the one call is the least."""

from __future__ import annotations

import pytest

from benchmarks.usability.__main__ import measured, saved
from benchmarks.usability.halstead import Halstead, added, added_lines, measure, symbols

ONE_CALL = (
    "trainData.data, trainData.labels, trsize = automation.datamodule.parallelize("
    "trainData.data, trainData.labels, model, trsize, None, None, opt.batchSize)"
)


def test_formulas_as_in_table_4_13() -> None:
    """TorchAD-NN's own one call, and the code that it replaces."""
    h = Halstead(2, 7, 11, 21, 19)
    assert (h.vocabulary, h.length) == (18, 40)
    assert h.effort == pytest.approx(1008.31, abs=0.1)
    assert h.time_s == pytest.approx(56.0, abs=0.05)
    assert Halstead(12, 26, 14, 65, 30).effort == pytest.approx(14085.73, rel=1e-3)


def test_distinct_ones_of_the_one_call() -> None:
    found = measure(symbols(ONE_CALL))
    assert (found.n1, found.n2) == (6, 10)  # with `require` and the name of what it takes: 7 and 11, as printed


@pytest.mark.parametrize(
    ("source", "operators", "operands"),
    [
        # lines of tables 4.9 to 4.12, as Python would have them, with the counts that are printed there
        ("mpi.start(True)", 3, 2),
        ("mpinn.synchronizeParameters(model)", 3, 2),
        ("stripe = trsize / mpi.size()", 5, 3),
        ("mpi.barrier()", 3, 1),
        (ONE_CALL, 18, 17),
        # by hand
        ("", 0, 0),
        ("# a comment\n", 0, 0),
        ('"""A docstring,\nof two lines."""\n', 0, 0),
        ("import torch.distributed as dist", 3, 3),  # import . as
        ("x = 'text'  # a comment", 1, 2),
        ("x = f'{a}, {b:.2f}'", 1, 2),
        ("if a.b[0] == None:\n    pass", 7, 4),
        ("def f(x):\n    '''Doc.'''\n    return -x", 7, 2),
        ("a.b.c(1)", 4, 3),
        ("(\n    1,\n\n    2,\n)", 4, 2),
    ],
)
def test_counts(source: str, operators: int, operands: int) -> None:
    found = measure(symbols(source))
    assert (operators, operands) == (found.N1, found.N2)


def test_nothing_added_costs_nothing() -> None:
    h = added("x = 1\n", "x = 1\n")
    assert (h.lines, h.length, h.volume, h.difficulty, h.effort) == (0, 0, 0.0, 0.0, 0.0)


BEFORE = "import a\n\nfor x in a:\n    print(x)\nend()\n"
AFTER = "import a\nimport b\n\n# split\nif b:\n    for x in b(a):\n        print(x)\nend()\n"


def test_added_lines() -> None:
    assert added_lines(BEFORE, AFTER) == {2, 4, 5, 6}  # the call that is indented further is no new one
    h = added(BEFORE, AFTER)
    assert h.lines == 3  # the comment is no code
    assert (h.N1, h.N2) == (1 + 2 + 6, 1 + 1 + 2)


def test_lines_that_are_taken_away_cost_nothing() -> None:
    assert added(AFTER, BEFORE).lines == 1  # the loop that was changed


def test_one_call_is_the_least() -> None:
    found = measured()
    assert saved(found, "ddp", "effort") > 0.9
    assert saved(found, "ddp", "lines") > 0.75
    assert saved(found, "model_parallel", "lines") > 0.94
    assert saved(found, "model_parallel", "effort") > 0.99
    assert found["fit"].effort < 0.1 * found["ddp"].effort
