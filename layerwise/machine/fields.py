"""Reads JSON: every value knows its document and its path, so that an error can name both."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from layerwise.errors import LayerwiseError

Name = TypeVar("Name", bound=str)


@dataclass(frozen=True, slots=True)
class Field:
    """A value in a JSON document. A number is an object `{"value": x, "source": "where it came from"}`.

    All methods raise LayerwiseError that names the document and the path.
    """

    document: str  # its description and file
    path: str  # the path shown to people (`levels[1].latency_s`); the document's own is ""
    value: object
    sources: dict[str, str] = field(default_factory=dict)  # by path, for each number that has been read

    def error(self, message: str) -> LayerwiseError:
        """Returns an error about this field."""
        text = f"{self.document}: {self.path + ': ' if self.path else ''}{message}"
        return LayerwiseError(" ".join(text.split()))  # one line, whatever a key contains

    def members(self, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Field]:
        """The members of an object. Raises an error for a missing or an unknown one."""
        if not isinstance(self.value, dict):
            raise self.error(f"expected an object with {', '.join(required)}, found {kind(self.value)}")
        for name in self.value:
            if name not in required and name not in optional:
                near = difflib.get_close_matches(name, [*required, *optional], n=1)
                meant = f"; did you mean {near[0]!r}?" if near else f"; known here: {', '.join([*required, *optional])}"
                raise self.member(name).error(f"unknown field{meant}")
        for name in required:
            if name not in self.value:
                raise self.member(name).error("missing")
        return {name: self.member(name) for name in self.value}

    def items(self, *, least: Literal[0, 1] = 1) -> Iterator[Field]:
        """The items of a list of at least so many."""
        if not isinstance(self.value, list) or len(self.value) < least:
            raise self.error(f"expected a list{' of at least one item' * least}, found {kind(self.value)}")
        for i, item in enumerate(self.value):
            yield Field(self.document, f"{self.path}[{i}]", item, self.sources)

    def text(self) -> str:
        """A string that is not blank."""
        if not isinstance(self.value, str) or not self.value.strip():
            raise self.error(f"expected a non-empty string, found {kind(self.value)}")
        return self.value

    def choice(self, allowed: Sequence[Name]) -> Name:
        """Returns the string, which must be one of `allowed`."""
        found = next((name for name in allowed if name == self.value), None)
        if found is None:
            raise self.error(f"expected one of {', '.join(allowed)}, found {kind(self.value)}")
        return found

    def number(self) -> float:
        """A sourced number above zero; it and its inverse are finite."""
        value = self._sourced()
        number = value.value
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise value.error(f"expected a number, found {kind(number)}")
        # A huge integer compares with a float but does not convert; a bandwidth's inverse must be finite too.
        if not (0 < number <= sys.float_info.max and 1 / number < math.inf):
            raise value.error(f"expected a finite number above 0, found {str(number)[:40]}")
        return float(number)

    def whole(self) -> int:
        """A sourced whole number above zero (`16e9` is one)."""
        number = self.number()
        if number != int(number):
            raise self._sourced().error(f"expected a whole number, found {number}")
        return int(number)

    def whole_or_name(self, choices: Sequence[str]) -> int | str:
        """A sourced whole number above zero, or one of the names in `choices`."""
        value = self._sourced()
        if not isinstance(value.value, str):
            return self.whole()
        if value.value not in choices:
            allowed = " or ".join(["a whole number", *map(repr, choices)])
            raise value.error(f"expected {allowed}, found {value.value!r}")
        return value.value

    def plain_number(self) -> float:
        """A finite number of at least 0 without its own source: one of many measurements."""
        number = self.value
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise self.error(f"expected a number, found {kind(number)}")
        if not 0 <= number <= sys.float_info.max:
            raise self.error(f"expected a finite number of at least 0, found {str(number)[:40]}")
        return float(number)

    def plain_whole(self) -> int:
        """An integer of at least 0 without its own source."""
        number = self.plain_number()
        if number != int(number):
            raise self.error(f"expected a whole number, found {number}")
        return int(number)

    def count(self, most: int) -> int:
        """An integer from 1 to `most`, without its own source."""
        number = self.plain_whole()
        if not 1 <= number <= most:
            raise self.error(f"expected a whole number from 1 to {most:,}, found {str(number)[:40]}")
        return number

    def plain_numbers(self, count: int) -> tuple[float, ...]:
        """A list of `count` plain numbers."""
        if not isinstance(self.value, list) or len(self.value) != count:
            raise self.error(f"expected a list of {count} numbers, found {kind(self.value)}")
        return tuple(item.plain_number() for item in self.items())

    def wholes(self) -> tuple[int, ...]:
        """A list of plain whole numbers, possibly empty."""
        return tuple(item.plain_whole() for item in self.items(least=0))

    def flag(self) -> bool:
        """true or false."""
        if not isinstance(self.value, bool):
            raise self.error(f"expected true or false, found {kind(self.value)}")
        return self.value

    def _sourced(self) -> Field:
        members = self.members(("value", "source"))
        self.sources[self.path] = members["source"].text()
        return members["value"]

    def member(self, name: str) -> Field:
        """The member of an object; null if there is none of that name."""
        assert isinstance(self.value, dict)
        return Field(self.document, f"{self.path}.{name}" if self.path else name, self.value.get(name), self.sources)


def kind(value: object) -> str:
    """The kind of a JSON value, in words for a message."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return f"the string {value[:40]!r}"
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'}{'' if value else ' with nothing in it'}"
    return f"the number {value}"
