"""How many examples hypothesis tries, where another number than usual (tests/conftest.py) is worth its time."""

import os

from hypothesis import settings

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"


def examples(number: int) -> settings:
    """So many; with HYPOTHESIS_PROFILE=thorough as many as of any other test, or more."""
    return settings(max_examples=max(number, settings.default.max_examples) if THOROUGH else number)
