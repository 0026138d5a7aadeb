"""process_kept: imports and tracing set things of the whole process, which is to be afterwards as it was before."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def process_kept() -> Iterator[None]:
    """Returns a context after which filters of warnings, Python's random numbers and the environment are as before.

    SymPy adds a filter when it is imported, Rich draws random numbers, and PyTorch's compiler names its cache.
    """
    environment, drawn = dict(os.environ), random.getstate()
    try:
        with warnings.catch_warnings():
            yield
    finally:
        random.setstate(drawn)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
