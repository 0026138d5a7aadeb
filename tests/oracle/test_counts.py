"""Numbers of GPUs as they are written on the command line."""

import argparse

import pytest

from layerwise.oracle.__main__ import counts


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("16", (16,)),
        ("1..1024", (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)),
        ("3..20", (4, 8, 16)),
        ("12,1..4,2", (1, 2, 4, 12)),
        ("8..8", (8,)),
    ],
)
def test_counts(text: str, found: tuple[int, ...]) -> None:
    assert counts(text) == found


@pytest.mark.parametrize("text", ["", "four", "1..", "..4", "0", "-1", "8..4", "5..7", "1,,2", "65537", "1..1e3"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        counts(text)
