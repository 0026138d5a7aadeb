"""The one error that a user of layerwise can cause."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

MOST: Final = 260  # characters that are repeated of one thing that a user gave: a path may have 255, and quotes
MOST_IN_ALL: Final = 2000

_UNSEEN: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# Short quotations, too: else the sentence from the end of one to the beginning of the next would look like a long one.
_ONE_THING: Final = re.compile(rf"(?<!\w)'[^']*'(?!\w)|(?<!\w)\"[^\"]*\"|\S{{{MOST + 1},}}")


class LayerwiseError(ValueError):
    """Bad input: a model, plan, profile, strategy or flag that cannot be used.

    The message is one line that says what is wrong, where (layer, dimension, sizes), and what to do. What it repeats of
    the input is cut: of a quotation or a word, 260 characters are left.
    Command lines print it and exit with code 2; anything else that is raised is a bug in layerwise.

    Examples:
        >>> import layerwise
        >>> try:
        ...     layerwise.load_profile("p10")
        ... except LayerwiseError as error:
        ...     print(str(error).split('?')[0])
        unknown profile 'p10': did you mean p100
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(shown(shortened(message)))


def shown(text: str) -> str:
    """A text as it is shown to people: what would not be seen, but do something to a terminal, is written out.

    Names of layers, of nodes and of files are whatever somebody wrote: escape codes, another direction of writing, and
    halves of characters (surrogates), which no terminal takes.
    """
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shortened(message: str) -> str:
    """The message without the middle of what is too long in it."""
    if len(message) <= MOST:
        return message
    return _cut(_ONE_THING.sub(lambda found: _cut(found[0], MOST), message), MOST_IN_ALL)


def _cut(text: str, most: int) -> str:
    """The beginning and the end, which often tells more than the middle."""
    if len(text) <= most:
        return text
    note = f"…({len(text) - most:,} characters)…"
    return text[: most * 3 // 4] + note + text[len(text) - most // 4 :]


def first_line(error: BaseException, most: int = 120) -> str:
    """The message of another library's error on one line, or the error's name where it has none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:most]


@contextmanager
def foreign(what: str) -> Iterator[None]:
    """Returns a context that turns errors of user code or of other libraries into a LayerwiseError.

    It catches all classes, as a parser may raise anything for a damaged file. `what`: what failed.
    """
    try:
        yield
    except LayerwiseError:
        raise
    except Exception as error:
        raise LayerwiseError(f"{what}: {first_line(error, 200)}") from error


def nearest(name: str, names: Iterable[str]) -> str:
    """` (did you mean 'x'?)`, or nothing."""
    near = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
