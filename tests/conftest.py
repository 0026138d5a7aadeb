"""How the tests are run: hypothesis's settings, and in which order files are given to several workers."""

import os

import pytest
from hypothesis import settings

# No deadline (this runs on shared machines); more examples on request: HYPOTHESIS_PROFILE=thorough.
settings.register_profile("default", deadline=None, max_examples=60)
settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# The files that take longest, so that no worker is left alone with one of them at the end (--dist loadfile).
FIRST = ("tests/usability/test_scripts.py",)


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # pytest-xdist would begin with the files that have most tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        file = item.nodeid.partition("::")[0]
        return FIRST.index(file) if file in FIRST else len(FIRST)

    items.sort(key=place)
