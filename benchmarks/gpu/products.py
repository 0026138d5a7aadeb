"""Products: the constants of a roofline as they are on this device, and the tiles that fit its matrix products best."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from layerwise.cost.compute.roofline import gemm_s
from layerwise.machine import Processor
from layerwise.measure.timing import Stopwatch
from layerwise.ops.facts import Gemm

SHAPES = [  # rows, columns, depth: cubes, linear and convolution layers
    *((size, size, size) for size in (256, 512, 1024, 2048, 4096, 8192)),
    *((32, 4096, 25088), (32, 4096, 4096), (32, 1000, 4096), (32, 1000, 2048), (1568, 512, 4608), (1568, 2048, 512)),
    *((6272, 256, 2304), (6272, 512, 4608), (25088, 128, 1152), (25088, 512, 128), (100352, 64, 576)),
]
TORCH = {"float32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
Product = dict[str, str | float]


def seconds(device: torch.device, call: Callable[[], object], budget_s: float) -> float:
    """Of a call, amid others: of kernels as short as their launch, too."""
    watch = Stopwatch(device, budget_s / 2)
    count = math.ceil(min(1e-3, budget_s / 10) / watch([call]).seconds[0])
    return watch([lambda: [call() for _ in range(count)]]).seconds[0] / count


def constants(device: torch.device, budget_s: float) -> dict[str, float]:
    """The floor of a kernel in seconds, and the bandwidth of a copy, read and written, in bytes/s."""
    one, source = torch.ones(1, device=device), torch.randn(2**28 if device.type == "cuda" else 2**24, device=device)
    target = torch.empty_like(source)
    floor_s, copy_s = (seconds(device, do, budget_s) for do in (lambda: one.add_(1), lambda: target.copy_(source)))
    return {"kernel_floor_s": floor_s, "memory_bandwidth_bytes_per_s": 2 * source.nbytes / copy_s}


def products(device: torch.device, dtype: str, budget_s: float, shapes: Sequence[Sequence[int]]) -> list[Product]:
    """Matrix products of these rows, columns and depths."""
    rows: list[Product] = []
    for m, n, k in shapes:
        a, b = (torch.randn(shape, device=device, dtype=TORCH[dtype]) for shape in ((m, k), (k, n)))
        measured_s = seconds(device, lambda a=a, b=b: a @ b, budget_s)
        rows.append({"dtype": dtype, "rows": m, "columns": n, "depth": k, "measured_s": measured_s})
    return rows


def product_s(row: Product, processor: Processor) -> float:
    """What the roofline says of a row of `products`."""
    m, n, k = (np.float64(row[key]) for key in ("rows", "columns", "depth"))
    dtype = str(row["dtype"])
    gemm = Gemm(*(np.atleast_1d(x) for x in (m, n, k, np.float64(1))))
    moved = (m * k + k * n + m * n) * TORCH[dtype].itemsize / processor.memory_bandwidth_bytes_per_s
    return max(float(gemm_s(gemm, processor, processor.peak(dtype))[0]), float(moved), processor.kernel_floor_s)


def fitted(rows: Sequence[Product], processor: Processor) -> Processor:
    """The tile efficiencies, in steps of 0.05 and larger for larger tiles, that predict `rows` best."""
    tiles = sorted(processor.tiles, key=lambda t: -t.rows * t.columns)
    error = math.inf
    while True:
        before = error
        for i in range(len(tiles)):
            for step in range(1, 21):
                tried = [*tiles[:i], replace(tiles[i], efficiency=step / 20), *tiles[i + 1 :]]
                candidate = replace(processor, tiles=tuple(tried))
                if all(a.efficiency >= b.efficiency for a, b in pairwise(tried)):
                    ratios = [math.log(product_s(row, candidate) / float(row["measured_s"])) for row in rows]
                    if statistics.fmean(map(abs, ratios)) < error - 1e-9:
                        error, tiles = statistics.fmean(map(abs, ratios)), tried
        if error == before:
            return replace(processor, tiles=tuple(tiles))
