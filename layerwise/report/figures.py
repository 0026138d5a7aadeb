"""Figures of matplotlib in files. It is an extra, and imported where a figure is wanted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from layerwise.errors import LayerwiseError
from layerwise.files import writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: str | os.PathLike[str], flag: str = "--plot") -> None:
    """LayerwiseError where `save_plot` would fail for want of a known format or of matplotlib."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise LayerwiseError(f"{flag} {os.fspath(path)!r}: the file's name must end in {', '.join(SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise LayerwiseError(f"{flag} needs matplotlib: pip install 'layerwise[plot]'") from None


def save_plot(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Writes the figure, whole or not at all."""
    with writing(path) as temporary:
        figure.savefig(temporary, format=Path(path).suffix[1:].lower(), dpi=150)
