"""Matplotlib figures in files. Matplotlib is an extra, and imported only when needed."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from layerwise.errors import LayerwiseError
from layerwise.files import writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: str | os.PathLike[str], flag: str = "--plot") -> None:
    """Raises LayerwiseError if `save_plot` would fail: unknown format, or no matplotlib."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise LayerwiseError(f"{flag} {os.fspath(path)!r}: the file's name must end in {', '.join(SUFFIXES)}")
    check_drawable(flag)


def check_drawable(what: str) -> None:
    """Raises LayerwiseError if there is no matplotlib, which this needs."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise LayerwiseError(f"{what} needs matplotlib: pip install 'layerwise[plot]'") from None


def save_plot(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Writes the figure, atomically."""
    kind = Path(path).suffix[1:].lower()
    with writing(path) as temporary:
        if kind == "svg":
            temporary.write_text(svg(figure) + "\n", encoding="utf-8")
        else:
            figure.savefig(temporary, format=kind, dpi=150)


def svg(figure: Figure) -> str:
    """The figure as an SVG element with its texts as text; equal figures give equal SVGs."""
    import matplotlib

    file, nothing = io.StringIO(), dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "layerwise"}):
        figure.savefig(file, format="svg", metadata=nothing)
    text = file.getvalue()
    text = re.sub(r"\s*\n\s*", " ", text[text.index("<svg") :].rstrip())
    return text.replace(' target="_blank"', ' tabindex="-1"')  # links: tables are for keyboard users
