"""What command lines of benchmarks share: lists with commas, and files of rows that are not made twice."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from layerwise.files import write_text

KEPT = "keeps every row; what it has is not made again"


def some_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """The type of an option: some of these, with commas."""

    def parse(text: str) -> list[str]:
        asked = text.split(",")
        if unknown := [word for word in asked if word not in known]:
            raise ArgumentTypeError(f"no {unknown[0]!r}, there are {', '.join(known)}")
        return asked

    return parse


def words(text: str) -> list[str]:
    """The type of an option: any words, with commas."""
    return text.split(",")


def numbers(text: str) -> list[int]:
    """The type of an option: whole numbers above 0, with commas."""
    found = [int(word) for word in text.split(",")]
    if min(found) < 1:
        raise ArgumentTypeError(f"{min(found)} is not above 0")
    return found


class Kept:
    """Rows of JSON, in a file where there is one; what it has already is not made again."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.rows: list[dict[str, Any]] = json.loads(file.read_text()) if file and file.exists() else []

    def find(self, **key: object) -> dict[str, Any] | None:
        """The row that has these values."""
        return next((row for row in self.rows if key.items() <= row.items()), None)

    def add(self, row: dict[str, Any]) -> dict[str, Any]:
        """Adds a row, and writes all of them, whole or not at all; returns it."""
        self.rows.append(row)
        self.write()
        return row

    def write(self) -> None:
        """Writes all rows."""
        if self.file:
            write_text(self.file, json.dumps(self.rows, indent=1) + "\n")
