"""Halstead's measures of the lines that a program has more than another, by the rules of TorchAD-NN.

Grabaskas, Automated Parallelization to Improve Usability and Efficiency of Distributed Neural Network Training, 2018,
tables 3.6, 3.7 and 4.9 to 4.12. Operators are keywords, calls (a dot before the called name belongs to it), operators,
single brackets and separators; operands are all other names, attributes too, and literals. Comments, docstrings,
indentation and line ends are neither.
"""

from __future__ import annotations

import difflib
import io
import keyword
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import log2

STROUD = 18  # elementary discriminations a second, by Halstead
LITERALS = ("True", "False", "None")
SILENT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
F_START, F_END = (getattr(tokenize, name, None) for name in ("FSTRING_START", "FSTRING_END"))  # from Python 3.12 on


@dataclass(frozen=True, slots=True)
class Halstead:
    """lines: that hold any of it. n1, n2: distinct operators and operands; N1, N2: all of them."""

    lines: int
    n1: int
    n2: int
    N1: int
    N2: int

    @property
    def vocabulary(self) -> int:
        return self.n1 + self.n2

    @property
    def length(self) -> int:
        return self.N1 + self.N2

    @property
    def volume(self) -> float:
        return self.length * log2(self.vocabulary) if self.vocabulary else 0.0

    @property
    def difficulty(self) -> float:
        return self.n1 / 2 * self.N2 / self.n2 if self.n2 else 0.0

    @property
    def effort(self) -> float:
        return self.volume * self.difficulty

    @property
    def time_s(self) -> float:
        return self.effort / STROUD


@dataclass(frozen=True, slots=True)
class Symbol:
    """An operator or operand at a line (from 1)."""

    line: int
    text: str
    operator: bool


def symbols(source: str) -> Iterator[Symbol]:
    """All operators and operands of a Python file."""
    tokens = list(_merged(tokenize.generate_tokens(io.StringIO(source).readline)))
    loud = [t for t in tokens if t.type not in (tokenize.COMMENT, tokenize.NL)]
    for before, token, after in zip([None, *loud], loud, [*loud[1:], None], strict=False):
        if token.type in SILENT or _docstring(before, token, after):
            continue
        called = after is not None and after.string == "("
        if token.type == tokenize.NAME and token.string not in LITERALS:
            yield Symbol(token.start[0], token.string, keyword.iskeyword(token.string) or called)
        elif token.type == tokenize.OP:
            if token.string == "." and _calls(loud, token):
                continue
            yield Symbol(token.start[0], token.string, True)
        else:
            yield Symbol(token.start[0], token.string, False)


def _merged(tokens: Iterable[tokenize.TokenInfo]) -> Iterator[tokenize.TokenInfo]:
    """Formatted strings as one literal, as Python had them before 3.12."""
    depth, first, parts = 0, None, list[str]()
    for token in tokens:
        if F_START is not None and token.type == F_START:
            first = first or token
            depth += 1
        if not depth:
            yield token
            continue
        parts.append(token.string)
        if token.type == F_END:
            depth -= 1
            if not depth:
                assert first is not None
                yield first._replace(type=tokenize.STRING, string="".join(parts))
                first, parts = None, []


def _docstring(before: tokenize.TokenInfo | None, token: tokenize.TokenInfo, after: tokenize.TokenInfo | None) -> bool:
    begins = before is None or before.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    return token.type == tokenize.STRING and begins and (after is None or after.type == tokenize.NEWLINE)


def _calls(tokens: list[tokenize.TokenInfo], dot: tokenize.TokenInfo) -> bool:
    """Whether the name after this dot is called."""
    at = tokens.index(dot)
    return at + 2 < len(tokens) and tokens[at + 2].string == "("


def measure(found: Iterable[Symbol]) -> Halstead:
    """Counts symbols."""
    operators, operands, lines = Counter[str](), Counter[str](), set[int]()
    for symbol in found:
        (operators if symbol.operator else operands)[symbol.text] += 1
        lines.add(symbol.line)
    return Halstead(len(lines), len(operators), len(operands), operators.total(), operands.total())


def added_lines(before: str, after: str) -> set[int]:
    """Lines of `after` (from 1) that `before` does not have, changed ones included; indentation does not count."""
    old, new = ([line.strip() for line in text.splitlines()] for text in (before, after))
    changes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return {
        line + 1 for kind, _, _, start, end in changes if kind in ("insert", "replace") for line in range(start, end)
    }


def added(before: str, after: str) -> Halstead:
    """The measures of what `after` has more than `before`."""
    lines = added_lines(before, after)
    return measure(symbol for symbol in symbols(after) if symbol.line in lines)
