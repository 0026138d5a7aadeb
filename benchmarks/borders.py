"""python -m benchmarks.borders: a convolution that waits for its halo, against one whose interior does not.

Parts of the layers of the race's volumes (benchmarks.cluster) on four ranks, split along depth, a slice on each side
from a neighbour. `whole`: as the runtime does it, the slices and the part are copied into one tensor, and the gradients
of the slices are added to that of the part. `alone`: the convolution of that tensor, no copies. `in parts`: three
convolutions, of the interior, which could begin while the slices travel, and of both borders, whose results are put
together. Forward and backward, one thread, in turns; the least CPU time of several.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

# Samples, input and output channels, and extents of a rank's part.
BATCH_2 = ((2, 48, 16, 16, 64, 64), (2, 16, 16, 16, 64, 64), (2, 96, 32, 8, 32, 32), (2, 32, 32, 8, 32, 32))
BATCH_1 = ((1, 48, 16, 16, 64, 128), (1, 16, 16, 16, 64, 128), (1, 96, 32, 8, 32, 64), (1, 32, 32, 8, 32, 64))
DEEP = ((2, 192, 64, 4, 16, 16), (1, 192, 64, 4, 16, 32))
Way = Callable[[], object]


def convolved(x: Tensor, weight: Tensor) -> Tensor:
    """A kernel of 3 x 3 x 3, padded along height and width."""
    return torch.nn.functional.conv3d(x, weight, None, (1, 1, 1), (0, 1, 1))


def ways(
    samples: int, inputs: int, outputs: int, *extents: int, device: torch.device | None = None
) -> tuple[Way, Way, Way]:
    """A step of the convolution: whole, alone, in parts."""
    depth, *others = extents
    random = partial(torch.randn, device=device)
    x, weight = random(samples, inputs, *extents), random(outputs, inputs, 3, 3, 3, requires_grad=True)
    low, high = (random(samples, inputs, 1, *others) for _ in range(2))
    gradient = random(samples, outputs, *extents)
    full = random(samples, inputs, depth + 2, *others, requires_grad=True)

    def alone(room: Tensor = full) -> Tensor:
        made: Tensor = torch.autograd.grad(convolved(room, weight), (room, weight), gradient)[0]
        return made

    def whole() -> None:
        room = x.new_empty(full.shape)
        room[:, :, 1:-1], room[:, :, :1], room[:, :, -1:] = x, low, high
        back = alone(room.requires_grad_())
        own = back[:, :, 1:-1].clone()
        own[:, :, :1] += back[:, :, :1]  # as much as comes from a neighbour
        own[:, :, -1:] += back[:, :, -1:]

    def in_parts() -> None:
        pieces = (torch.cat([low, x[:, :, :2]], 2), x.detach(), torch.cat([x[:, :, -2:], high], 2))
        given = [piece.requires_grad_() for piece in pieces]
        made = torch.cat([convolved(piece, weight) for piece in given], 2)
        first, own, last, _ = torch.autograd.grad(made, (*given, weight), gradient)
        own[:, :, :2] += first[:, :, 1:]
        own[:, :, -2:] += last[:, :, :-1]

    return whole, alone, in_parts


def least(of: tuple[Way, ...], budget_s: float) -> list[float]:
    """CPU seconds of each."""

    def once(way: Way) -> float:
        started = time.process_time()
        way()
        return time.process_time() - started

    found, until = [once(way) for way in of], time.perf_counter() + budget_s
    while time.perf_counter() < until:
        found = [min(known, once(way)) for known, way in zip(found, of, strict=True)]
    return found


def main() -> None:
    """Print a row a layer's part."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seconds", type=float, default=8.0, help="for each (default: %(default)s)")
    args = p.parse_args()
    torch.set_num_threads(1)
    table = Table("samples", "channels", "extents", "alone, ms", "whole", "in parts", "against whole", box=None)
    for samples, inputs, outputs, *extents in (*BATCH_2, *BATCH_1, *DEEP):
        whole, alone, parts = least(ways(samples, inputs, outputs, *extents), args.seconds)
        rest = (
            f"{1e3 * alone:.1f}",
            f"{whole / alone - 1:+.1%}",
            f"{parts / alone - 1:+.1%}",
            f"{parts / whole - 1:+.1%}",
        )
        table.add_row(str(samples), f"{inputs} → {outputs}", "×".join(map(str, extents)), *rest)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
