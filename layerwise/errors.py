"""The one error that a user of layerwise can cause."""

from __future__ import annotations

import re
from typing import Final

MOST: Final = 260  # characters that are repeated of one thing that a user gave: a path may have 255, and quotes
MOST_IN_ALL: Final = 2000

# Short quotations, too: else the sentence from the end of one to the beginning of the next would look like a long one.
_ONE_THING: Final = re.compile(rf"(?<!\w)'[^']*'(?!\w)|(?<!\w)\"[^\"]*\"|\S{{{MOST + 1},}}")


class LayerwiseError(ValueError):
    """Bad input: a model, plan, profile, strategy or flag that cannot be used.

    The message is one line that says what is wrong, where (layer, dimension, sizes), and what to do. What it repeats of
    the input is cut: of a quotation or a word, 260 characters are left.
    Command lines print it and exit with code 2; anything else that is raised is a bug in layerwise.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(shortened(message))


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
