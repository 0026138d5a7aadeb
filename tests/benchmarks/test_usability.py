"""Halstead's measures, counted as in the tables of the thesis."""

import pytest

from benchmarks.usability.halstead import Halstead, measure, symbols

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
    ],
)
def test_counts(source: str, operators: int, operands: int) -> None:
    found = measure(symbols(source))
    assert (operators, operands) == (found.N1, found.N2)
