"""python -m benchmarks.im2col: a small 3-D convolution of one sample by PyTorch, and as a rank's part of a layer.

Forward and backward, one thread, in turns; the least of several. What `layerwise.ops.nn.onednn` leaves to
PyTorch takes as long both ways. --transposed: transposed ones by PyTorch and by oneDNN, to which layerwise sends none.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from typing import Any

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
# Of transposed ones, stride 2: a kernel as large as the stride, as in U-Nets, and larger ones.
KERNELS, UP_EXTENTS = (2, 3), ((4, 4, 16), (4, 8, 32), (4, 16, 64), (16, 16, 16))
Convolve = Callable[..., Tensor]
Pair = tuple[float, float]


class TransposedByOneDNN(torch.autograd.Function):
    """PyTorch always gives oneDNN what is in its layout."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, *how: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = how
        made: Tensor = torch.ops.aten.convolution(x.to_mkldnn(), weight, bias, *how).to_dense()
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        mask, biases = [True] * 3, [weight.shape[1]]
        made = torch.ops.aten.convolution_backward(gradient, x.to_mkldnn(), weight, biases, *ctx.how, mask)
        return (*made, *[None] * len(ctx.how))


def seconds(
    inputs: int, outputs: int, extents: tuple[int, ...], kernel: tuple[int, ...], stride: int, budget_s: float
) -> tuple[float, float]:
    """Of a forward and a backward pass: by PyTorch's choice, and by `onednn.convolve`."""
    x = torch.randn(1, inputs, *extents, requires_grad=True)
    weight = torch.randn(outputs, inputs, *kernel, requires_grad=True)
    bias = torch.randn(outputs, requires_grad=True)
    how = (stride,) * 3, tuple(k // 2 for k in kernel), (1,) * 3, 1
    return in_turns((functional.conv3d, onednn.convolve), (x, weight, bias), how, budget_s)


def seconds_transposed(
    inputs: int, outputs: int, extents: tuple[int, ...], kernel: int, budget_s: float
) -> tuple[float, float]:
    """Of a forward and a backward pass: by PyTorch's choice, and by oneDNN."""
    x = torch.randn(1, inputs, *extents, requires_grad=True)
    weight = torch.randn(inputs, outputs, *[kernel] * 3, requires_grad=True)
    bias = torch.randn(outputs, requires_grad=True)
    odd = [kernel % 2] * 3  # of which the output is twice as large, too
    how = ([2] * 3, odd, [1] * 3, True, odd, 1)
    return in_turns((torch.ops.aten.convolution, TransposedByOneDNN.apply), (x, weight, bias), how, budget_s)


def in_turns(
    ways: tuple[Convolve, Convolve], given: tuple[Tensor, ...], how: tuple[object, ...], budget_s: float
) -> tuple[float, float]:
    """The least seconds that each way takes. AssertionError where their results differ."""
    first, second = (convolve(*given, *how) for convolve in ways)
    torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-3)
    gradient = torch.randn_like(first)

    def once(convolve: Convolve) -> float:
        started = time.process_time()
        torch.autograd.grad(convolve(*given, *how), given, gradient)
        return time.process_time() - started

    least, until = [once(way) for way in ways], time.perf_counter() + budget_s
    while time.perf_counter() < until:
        least = [min(known, once(way)) for known, way in zip(least, ways, strict=True)]
    return least[0], least[1]


def main() -> None:
    """Print a row a convolution."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seconds", type=float, default=1.0, help="for each convolution (default: 1)")
    p.add_argument("--transposed", action="store_true", help="transposed ones, by PyTorch and by oneDNN")
    args = p.parse_args()
    torch.set_num_threads(1)
    other = "oneDNN, µs" if args.transposed else "part, µs"
    table = Table("channels", "extents", "kernel", "stride", "PyTorch, µs", other, "as fast", box=None)

    def add(ends: tuple[int, int], extents: tuple[int, ...], kernel: tuple[int, ...], stride: int, took: Pair) -> None:
        sizes = ("×".join(map(str, row)) for row in (extents, kernel))
        times = (f"{1e6 * took[0]:.0f}", f"{1e6 * took[1]:.0f}", f"{took[0] / took[1]:.2f}×")
        table.add_row(f"{ends[0]} → {ends[1]}", *sizes, str(stride), *times)

    if args.transposed:
        for c, kernel, extents in itertools.product(CHANNELS, KERNELS, UP_EXTENTS):
            took = seconds_transposed(c, c // 2, extents, kernel, args.seconds)
            add((c, c // 2), extents, (kernel,) * 3, 2, took)
        Console(width=120).print(table)
        return
    cases = [
        (c, c, extents, (3, 3, 3), 1) for c in CHANNELS for extents in EXTENTS if c * extents[0] * extents[1] <= 20480
    ]
    for inputs, outputs, extents, kernel, stride in (*cases, *OTHERS):
        add((inputs, outputs), extents, kernel, stride, seconds(inputs, outputs, extents, kernel, stride, args.seconds))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
