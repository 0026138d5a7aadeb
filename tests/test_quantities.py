"""Sizes as people write them."""

import math
import re

import numpy as np
import pytest

from layerwise.errors import LayerwiseError
from layerwise.quantities import parse_bytes, parse_bytes_range


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("14GB", 14e9),
        ("14GiB", 14 * 2**30),
        (" 1.5 tb ", 1.5e12),
        ("24G", 24e9),
        ("24Gi", 24 * 2**30),
        ("100B", 100.0),
        ("1000000", 1e6),
        ("1e9", 1e9),
        ("512MiB", 2**29),
        (7_000_000, 7e6),
        (2.5e9, 2.5e9),
        (np.int64(7e9), 7e9),
    ],
)
def test_sizes(written: object, size: float) -> None:
    assert parse_bytes(written, "--memory-limit") == size


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("", "such as 14GB"),
        ("much", "such as 14GB"),
        ("14 G B", "such as 14GB"),
        ("1.2.3GB", "such as 14GB"),
        ("14GBit", "the unit 'GBit' is none of"),
        ("0GB", "at least 1 B"),
        ("-1GB", "at least 1 B"),
        ("nan", "at least 1 B"),
        ("inf", "at least 1 B"),
        ("1e400", "at least 1 B"),
        (0, "at least 1 B"),
        (-5, "at least 1 B"),
        (math.nan, "at least 1 B"),
        (10**400, "at least 1 B"),
        ("24", "24, which is 24 bytes: write 24GB or 24GiB, or 24B"),
        (24, "24, which is 24 bytes: write 24GB"),
        (True, "a number of bytes"),
        (None, "a number of bytes"),
        ([14], "a number of bytes"),
    ],
)
def test_what_is_no_size_is_said_in_one_line(written: object, said: str) -> None:
    with pytest.raises(LayerwiseError, match=f"^--memory-limit is .*{said}") as error:
        parse_bytes(written, "--memory-limit")
    assert "\n" not in str(error.value)


def test_ranges() -> None:
    assert parse_bytes_range("8GB..80GB", "--memory-curve") == (8e9, 80e9)
    some = "an end of --memory-curve '1GB.."
    for wrong, said in (
        ("8GB", "the least and the most"),
        ("8GB..8GB", "less than"),
        ("1GB..x", "such as 14GB"),
        ("1GB..", f"{some}' is '': give a number"),
        ("1GB..0", f"{some}0' is '0': it must be at least 1 B"),
    ):
        with pytest.raises(LayerwiseError, match=re.escape(said)):
            parse_bytes_range(wrong, "--memory-curve")
