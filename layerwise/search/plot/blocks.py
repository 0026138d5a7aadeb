"""Blocks of layers: neighbours whose names begin alike, such as `layer1.0`; consecutive equal ones are one block."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from layerwise.config import Config

FEW, MOST = 10, 24  # blocks: fewer are divided, longest first; more are not
LARGE = 1 / 6  # fraction of the time above which a block is divided anyway
EQUAL = 0.05  # by which times of equal blocks may differ


@dataclass(frozen=True, slots=True)
class LayerBlock:
    """Neighbouring layers; corresponding layers of equal blocks are together."""

    title: str
    layers: tuple[tuple[str, ...], ...]  # in order; for each, its names in the first, second, ... repeat
    depth: int  # components of the names in the title

    @property
    def names(self) -> list[str]:
        """All layers, block after block."""
        return [name for repeat in zip(*self.layers, strict=True) for name in repeat]

    def seconds(self, of: Mapping[str, float]) -> float:
        """The sum over the layers."""
        return sum(of.get(name, 0.0) for name in self.names)


def blocks(strategy: Mapping[str, Config], seconds: Mapping[str, float]) -> list[LayerBlock]:
    """The blocks of a network, in order. seconds: of each layer, which determine the longest block."""
    layers, large = [(name,) for name in strategy], LARGE * sum(seconds.values())
    found = _grouped(layers, 0, strategy, seconds)
    while True:
        divisible = [block for block in found if block.depth < len(_components(block.layers[0][0]))]
        for block in sorted(divisible, key=lambda block: (block.depth, -block.seconds(seconds))):
            wanted = len(found) < FEW or (len(block.layers[0]) == 1 and block.seconds(seconds) > large)
            parts = _grouped(block.layers, block.depth, strategy, seconds)
            if wanted and len(block.layers) > 1 and len(found) - 1 + len(parts) <= MOST:
                at = found.index(block)
                found[at : at + 1] = parts
                break
        else:
            return found


def _grouped(
    layers: Sequence[tuple[str, ...]], depth: int, strategy: Mapping[str, Config], seconds: Mapping[str, float]
) -> list[LayerBlock]:
    """Runs of layers with `depth + 1` components in common; consecutive equal ones are one block."""
    runs = [tuple(run) for _, run in groupby(layers, key=lambda names: _components(names[0])[: depth + 1])]
    folded: list[tuple[object, float, list[tuple[str, ...]]]] = []
    for run in runs:
        shape = [(_components(names[0])[depth + 1 :], strategy[names[0]]) for names in run]
        run_s = sum(seconds.get(names[0], 0.0) for names in run)
        if len(run) > 1 and folded and folded[-1][0] == shape and abs(folded[-1][1] - run_s) <= EQUAL * run_s:
            folded[-1] = shape, run_s, [one + more for one, more in zip(folded[-1][2], run, strict=True)]
        else:
            folded.append((shape, run_s, list(run)))
    return [LayerBlock(_title(run, depth + 1), tuple(run), depth + 1) for *_, run in folded]


def _title(run: Sequence[tuple[str, ...]], depth: int) -> str:
    """`layer1.0`, `h.0…11.mlp (12 ×)`; a layer alone has its full name."""
    pieces = [re.split(r"([./])", name) for name in (run[0][0], run[0][-1])]
    first, last = pieces if len(run) == 1 else [each[: 2 * depth - 1] for each in pieces]
    if first == last:
        return "".join(first)
    return "".join(a if a == b else f"{a}…{b}" for a, b in zip(first, last, strict=False)) + f" ({len(run[0])} ×)"


def _components(name: str) -> list[str]:
    """The parts between dots and slashes, without the number of a module's repeated call."""
    return re.split(r"[./]", re.sub(r":\d+$", "", name))
