"""The common look of all figures: white paper, fonts, and colours with one meaning each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from layerwise.config import Config
from layerwise.errors import LayerwiseError, shown
from layerwise.graph.layer import Layer
from layerwise.report.figures import check_drawable
from layerwise.search.result import Candidate, SearchResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 7.2  # inches: the width of a page's text, so that it is not scaled down
FONT, SMALL = 9, 8  # points
LETTER = 0.068  # inches per small letter
# Five of Okabe and Ito's colours (2008), which colour-blind people can distinguish, are for configurations; the next
# five configurations are hatched. The other colours are for parts of the step.
CONFIGS = ("#0072B2", "#E69F00", "#009E73", "#56B4E9", "#F0E442")
HATCHES = ("", "////", "....", "xxxx", "||||")
ONE = "#d4d4d4"  # one device
PARTS = {
    "compute": ("computation", "#999999"),
    "transfers": ("transfers", "#D55E00"),
    "sync": ("sums of gradients", "#CC79A7"),
    "statistics": ("statistics", "#222222"),
}
LEGEND: dict[str, Any] = {
    "fontsize": SMALL, "frameon": False, "borderaxespad": 0, "handlelength": 1.2, "handleheight": 1.2
}  # fmt: skip


class Look(NamedTuple):
    """How a configuration is drawn."""

    colour: str
    hatch: str

    @property
    def style(self) -> dict[str, Any]:
        """Arguments of a matplotlib patch, with hatches that are visible on the colour."""
        edge = ink(paler(self.colour, 0)) if self.hatch else "black"
        return {"facecolor": self.colour, "hatch": self.hatch, "edgecolor": edge, "linewidth": 0.4}


def looks(configs: Iterable[Config]) -> dict[Config, Look]:
    """The look of each configuration, in order of appearance."""
    every = dict.fromkeys(configs)
    several = [config for config in every if config.total > 1]
    kinds = [Look(colour, hatch) for hatch in HATCHES for colour in CONFIGS]
    found = {config: kinds[i % len(kinds)] for i, config in enumerate(several)}
    return found | {config: Look(ONE, "") for config in every if config.total == 1}


def legend_of(styles: dict[Config, Look]) -> list[Any]:
    """A handle for each configuration, and one for all on a single device."""
    from matplotlib.patches import Patch

    handles = [Patch(**look.style, label=str(config)) for config, look in styles.items() if config.total > 1]
    one = Patch(**Look(ONE, "").style, label="one device")
    return [*handles, one] if any(config.total == 1 for config in styles) else handles


def paler(colour: str, share: float) -> tuple[float, float, float]:
    """The colour mixed with a fraction of white."""
    from matplotlib.colors import to_rgb

    red, green, blue = (1 - (1 - part) * (1 - share) for part in to_rgb(colour))
    return red, green, blue


def ink(colour: Sequence[float]) -> str:
    """A text colour that is readable on this one."""
    red, green, blue = (part / 12.92 if part <= 0.04 else ((part + 0.055) / 1.055) ** 2.4 for part in colour[:3])
    return "black" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 else "white"


def paper(what: str, height: float, width: float = WIDTH) -> Figure:
    """An empty figure of this size in inches. Raises LayerwiseError if matplotlib is missing."""
    check_drawable(what)
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), facecolor="white", layout="constrained")


def plain(axes: Axes, x: str, y: str = "") -> None:
    """Labels two axes, and removes the frame of empty ones."""
    axes.set_xlabel(x, size=SMALL)
    axes.set_ylabel(y, size=SMALL)
    axes.tick_params(labelsize=SMALL)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def bare(axes: Axes) -> None:
    """Removes the frame and the ticks."""
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_visible(False)


def best_of(result: SearchResult | Candidate) -> Candidate:
    """The strategy to draw."""
    return result.best if isinstance(result, SearchResult) else result


def of_block(layers: Iterable[Layer], block: str) -> list[Layer]:
    """The layers of a block. Raises LayerwiseError if no name begins with it."""
    if found := [layer for layer in layers if layer.name.startswith(block)]:
        return found
    raise LayerwiseError(f"no layer's name begins with {block!r}")


def words(text: str) -> str:
    """Text to be drawn literally: matplotlib reads formulas between dollars."""
    return shown(text).replace("$", r"\$")


def cut(name: str, letters: int) -> str:
    """A name shortened in the middle if it is long."""
    half = max(letters - 1, 2) // 2
    return words(name if len(name) <= letters else f"{name[: letters - 1 - half]}…{name[-half:]}")


def titled(candidate: Candidate) -> str:
    """`vgg16 on 16 × Tesla P100`."""
    return words(f"{candidate.model.graph.name} on {candidate.model.devices.names}")
