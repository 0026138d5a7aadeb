"""python -m benchmarks.im2col: a small 3-D convolution of one sample by PyTorch, and as a rank's part of a layer.

Forward and backward, one thread, in turns; the least of several. What `layerwise.ops.nn.onednn` leaves to
PyTorch takes as long both ways.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from layerwise.ops.nn import onednn

CHANNELS = (8, 16, 32, 64)
EXTENTS = ((4, 4, 4), (4, 4, 16), (4, 4, 64), (8, 8, 8), (4, 16, 16), (4, 16, 64), (16, 16, 16), (8, 16, 64))
# Input and output channels, extents, kernel, stride: a first layer, up, down, anisotropic, pointwise, the lowest level.
OTHERS = (
    (1, 16, (8, 16, 64), (3, 3, 3), 1),
    (4, 16, (8, 16, 64), (3, 3, 3), 1),
    (32, 16, (8, 16, 64), (3, 3, 3), 1),
    (16, 32, (8, 16, 64), (3, 3, 3), 2),
    (16, 16, (8, 16, 32), (1, 3, 3), 1),
    (32, 32, (8, 16, 64), (1, 1, 1), 1),
    (128, 128, (4, 4, 4), (3, 3, 3), 1),
    (256, 256, (2, 2, 2), (3, 3, 3), 1),
)
Convolve = Callable[..., Tensor]


def seconds(
    inputs: int, outputs: int, extents: tuple[int, ...], kernel: tuple[int, ...], stride: int, budget_s: float
) -> tuple[float, float]:
    """Of a forward and a backward pass: by PyTorch's choice, and by `onednn.convolve`."""
    x = torch.randn(1, inputs, *extents, requires_grad=True)
    weight = torch.randn(outputs, inputs, *kernel, requires_grad=True)
    bias = torch.randn(outputs, requires_grad=True)
    how = (stride,) * 3, tuple(k // 2 for k in kernel), (1,) * 3, 1
    gradient = torch.randn_like(functional.conv3d(x, weight, bias, *how))

    def once(convolve: Convolve) -> float:
        started = time.perf_counter()
        torch.autograd.grad(convolve(x, weight, bias, *how), (x, weight, bias), gradient)
        return time.perf_counter() - started

    ways = (functional.conv3d, onednn.convolve)
    least, until = [once(way) for way in ways], time.perf_counter() + budget_s
    while time.perf_counter() < until:
        least = [min(known, once(way)) for known, way in zip(least, ways, strict=True)]
    return least[0], least[1]


def main() -> None:
    """Print a row a convolution."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seconds", type=float, default=1.0, help="for each convolution (default: 1)")
    args = p.parse_args()
    torch.set_num_threads(1)
    table = Table("channels", "extents", "kernel", "stride", "PyTorch, µs", "part, µs", "as fast", box=None)
    cases = [
        (c, c, extents, (3, 3, 3), 1) for c in CHANNELS for extents in EXTENTS if c * extents[0] * extents[1] <= 20480
    ]
    for inputs, outputs, extents, kernel, stride in (*cases, *OTHERS):
        whole, part = seconds(inputs, outputs, extents, kernel, stride, args.seconds)
        sizes = ("×".join(map(str, row)) for row in (extents, kernel))
        times = (f"{1e6 * whole:.0f}", f"{1e6 * part:.0f}", f"{whole / part:.2f}×")
        table.add_row(f"{inputs} → {outputs}", *sizes, str(stride), *times)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
