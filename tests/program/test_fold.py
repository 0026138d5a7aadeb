"""Every consumer of a program says what each instruction is to it."""

import pytest

from layerwise.program import Program, fold
from layerwise.program.instructions import Free, Update


def test_an_instruction_that_a_table_lacks_is_no_instruction_without_effect() -> None:
    with pytest.raises(KeyError):
        fold(Program([Update()], []), {Free: lambda _: None})
