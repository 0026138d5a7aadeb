"""What the ranks of a pool (tests/comm/pool.py) are called to do."""

import warnings
from typing import Any

from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from tests.loops.loops import LOOPS
from tests.loops.setting import Setting
from tests.traces import once

ERRORS = (LayerwiseError, RuntimeError, NotImplementedError, AttributeError, TypeError, ValueError)


def run(comm: Comm, name: str, strategy: str) -> dict[str, Any] | str:
    """A loop's numbers, or with what words it is refused."""
    (loop,) = (loop for loop in LOOPS if loop.__name__ == name)
    with warnings.catch_warnings(), once():
        warnings.simplefilter("ignore")
        try:
            return dict(loop(Setting(comm, strategy)))
        except ERRORS as error:
            return f"{type(error).__name__}: {error}"
