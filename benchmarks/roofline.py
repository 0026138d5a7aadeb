"""python -m benchmarks.roofline: the analytic roofline (`cost.compute.roofline`) against this device, layer by layer.

First what a profile states: the kernel floor, the memory bandwidth, the rates of matrix products, and the tile
efficiencies that would fit these products best. Then every distinct fused layer of the networks, forward and backward,
as eager PyTorch; and VGG-16's convolutions with a quarter of the work, cut along n, c, h or w (the paper's Figure 1).

Times are of back-to-back calls (CUDA events; a clock and one thread on a CPU), medians, after a warm-up; a layer finds
in the cache what its last call left there. Convolutions obey --dtype: PyTorch itself lets cuDNN use TF32.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from layerwise.config import Config
from layerwise.cost.compute.roofline import ComputeTime, compute_time, gemm_s
from layerwise.graph.fuse import fuse
from layerwise.graph.layer import Layer, LayerGraph
from layerwise.importers.load import load_model
from layerwise.machine import Processor, load
from layerwise.ops.base import Op
from layerwise.ops.facts import Gemm
from layerwise.ops.fused import Fused
from layerwise.ops.nn.conv import Conv
from layerwise.ops.nn.norm import BatchNorm
from layerwise.ops.tensor.pointwise import Dropout
from layerwise.partition.layout import layout
from layerwise.partition.volumes import intervals, largest_extents
from layerwise.quantities import units
from layerwise.tensor import TensorSpec
from tests.importers.evaluate import run

NETWORKS = {"vgg16": 32, "alexnet": 32, "resnet50": 32, "inception_v3": 32, "unet3d": 2}  # and their batches
CUBES = {"cuda": (256, 512, 1024, 2048, 4096, 8192), "cpu": (64, 128, 256, 512, 1024)}
LAYERS = [  # rows, columns, depth: linear and convolution layers
    *((32, 4096, 25088), (32, 4096, 4096), (32, 1000, 4096), (32, 1000, 2048), (1568, 512, 4608), (1568, 2048, 512)),
    *((6272, 256, 2304), (6272, 512, 4608), (25088, 128, 1152), (25088, 512, 128), (100352, 64, 576)),
]
TORCH = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16}
Row = dict[str, str | float]


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Times calls on one device."""

    device: torch.device
    budget_s: float  # about what one of them gets

    def __call__(self, call: Callable[[], object]) -> tuple[float, float]:
        """Median seconds of a call, and the spread of the middle 80 % of the samples as a share of it."""
        for _ in range(2):
            call()
        estimate = self._sample(call, 1)
        calls = max(1, math.ceil(min(1e-3, self.budget_s / 5) / estimate))
        count = min(max(int(self.budget_s / (calls * estimate)), 5), 30)
        samples = sorted(self._sample(call, calls) for _ in range(count))
        median = statistics.median(samples)
        return median, (samples[-1 - count // 10] - samples[count // 10]) / median

    def _sample(self, call: Callable[[], object], calls: int) -> float:
        if self.device.type == "cpu":
            started = time.perf_counter()
            for _ in range(calls):
                call()
            return (time.perf_counter() - started) / calls
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        for _ in range(calls):
            call()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3 / calls


def limits(watch: Stopwatch) -> dict[str, float]:
    """The floor of a kernel in seconds, and the bandwidth of a copy, read and written, in bytes/s."""
    one = torch.ones(1, device=watch.device)
    source = torch.randn(2**28 if watch.device.type == "cuda" else 2**25, device=watch.device)
    target = torch.empty_like(source)
    return {
        "kernel_floor_s": watch(lambda: one.add_(1))[0],
        "memory_bandwidth_bytes_per_s": 2 * source.nbytes / watch(lambda: target.copy_(source))[0],
    }


def products(watch: Stopwatch, processor: Processor, dtype: str) -> list[Row]:
    """Matrix products, cubes and layers, against the roofline."""
    rows: list[Row] = []
    for m, n, k in [(size,) * 3 for size in CUBES[watch.device.type]] + LAYERS:
        a, b = (torch.randn(shape, device=watch.device, dtype=TORCH[dtype]) for shape in ((m, k), (k, n)))
        measured, spread = watch(lambda a=a, b=b: a @ b)  # type: ignore[misc]
        row: Row = {"dtype": dtype, "rows": m, "columns": n, "depth": k, "measured_s": measured, "spread": spread}
        rows.append(row | {"predicted_s": product_s(row, processor), "tflops": 2e-12 * m * n * k / measured})
    return rows


def product_s(row: Row, processor: Processor) -> float:
    """What the roofline says of a row of `products`."""
    m, n, k = (np.float64(row[key]) for key in ("rows", "columns", "depth"))
    dtype = str(row["dtype"])
    gemm = Gemm(*(np.atleast_1d(x) for x in (m, n, k, np.float64(1))))
    moved = (m * k + k * n + m * n) * TORCH[dtype].itemsize / processor.memory_bandwidth_bytes_per_s
    return max(float(gemm_s(gemm, processor, processor.peak(dtype))[0]), float(moved), processor.kernel_floor_s)


def fitted(rows: Sequence[Row], processor: Processor) -> Processor:
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


def forward(op: Op, inputs: list[Tensor], p: dict[str, Tensor]) -> Tensor:
    """As tests.importers.evaluate, but as a model runs it: padding by the convolution, dropout, running statistics."""
    match op:
        case Fused():
            for i, chain in enumerate(op.views):
                for view in chain:
                    inputs = [*inputs[:i], run(view, [inputs[i]], {}), *inputs[i + 1 :]]
            count = len(inputs) - sum(f.extras for f in op.epilogue)
            out, extras = forward(op.main, inputs[:count], p), inputs[count:]
            for i, f in enumerate(op.epilogue):
                given, extras = extras[: f.extras], extras[f.extras :]
                own = {name.removeprefix(f"{i}."): value for name, value in p.items() if name.startswith(f"{i}.")}
                out = forward(f.op, [*given[: f.slot], out, *given[f.slot :]], own)
            return out
        case Conv() if all(low == high for low, high in op.padding):
            low = [a for a, _ in op.padding]
            conv: Callable[..., Tensor] = getattr(F, f"conv{len(op.kernel)}d")
            return conv(inputs[0], p["weight"], p.get("bias"), op.stride, low, op.dilation, op.groups)
        case Dropout():
            return F.dropout(inputs[0], op.p)
        case BatchNorm():
            mean, var, weight, bias = (p.get(n) for n in ("running_mean", "running_var", "weight", "bias"))
            return F.batch_norm(inputs[0], mean, var, weight, bias, True, op.momentum or 0.1, op.eps)
    return run(op, inputs, p)


def measure(watch: Stopwatch, layer: Layer, wanted: Sequence[bool]) -> Row:
    """Forward and backward time of a layer as it is, random data."""

    def tensor(shape: tuple[int, ...], grad: bool, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=watch.device) * scale).requires_grad_(grad)

    inputs = [tensor(s.shape, grad) for s, grad in zip(layer.specs, wanted, strict=True)]
    own = layer.space.parameters
    p = {q.name: tensor(q.shape, q.trainable, max(math.prod(q.shape[1:]), 1) ** -0.5) for q in own}
    for name in p:
        if name.endswith("running_var"):
            p[name].abs_()
    out = forward(layer.op, inputs, p)
    assert tuple(out.shape) == layer.out.shape, f"{layer.name}: {tuple(out.shape)} for {layer.out.shape}"
    row: Row = dict(zip(("forward_s", "spread"), watch(lambda: forward(layer.op, inputs, p)), strict=True))
    needed = [t for t in (*inputs, *p.values()) if t.requires_grad]
    if needed:
        upper = torch.randn_like(out)
        row["backward_s"], spread = watch(lambda: torch.autograd.grad(out, needed, upper, retain_graph=True))
        row["spread"] = max(float(row["spread"]), spread)
    return {"forward_s": 0.0, "backward_s": 0.0} | row


def compared(watch: Stopwatch, graph: LayerGraph, processor: Processor, dtype: str) -> list[Row]:
    """A row for every distinct layer of a network; `count`: how often it comes."""
    flows = graph.has_gradient
    keys = [(layer.op, layer.specs, tuple(flows[name] for name in layer.inputs)) for layer in graph.inner]
    counts, rows = Counter(keys), []
    for layer, key in zip(graph.inner, keys, strict=True):
        if key in counts:
            row: Row = {"layer": layer.name, "kind": kind(layer), "count": counts.pop(key)}
            row |= predicted(layer, Config(), key[2], processor, dtype) | measure(watch, layer, key[2])
            rows.append(row | {"ratio": total(row, "predicted_") / total(row)})
    return rows


def predicted(layer: Layer, config: Config, wanted: Sequence[bool], processor: Processor, dtype: str) -> Row:
    """What the roofline says of the largest cell."""
    cells = layout([config], layer.space, config.total)
    cost: ComputeTime = compute_time(layer, cells, wanted, processor, dtype, "sgd")
    return {"predicted_forward_s": float(cost.forward[0]), "predicted_backward_s": float(cost.backward[0])}


def kind(layer: Layer) -> str:
    """`conv 3x3+batch_norm+relu`."""
    names = [stage.label for stage in layer.stages]
    if isinstance(layer.main, Conv):
        names[0] += " " + "x".join(map(str, layer.main.kernel))
    return "+".join(names)


def figure_1(watch: Stopwatch, graph: LayerGraph, processor: Processor, dtype: str) -> list[Row]:
    """Each distinct convolution on a quarter of its work: how much faster than whole, forward and backward?"""
    flows, rows, done = graph.has_gradient, [], set()
    for layer in graph.inner:
        wanted = tuple(flows[name] for name in layer.inputs)
        if not isinstance(layer.main, Conv) or (layer.op, layer.specs) in done:
            continue
        done.add((layer.op, layer.specs))
        row: Row = {"layer": layer.name}
        whole = predicted(layer, Config(), wanted, processor, dtype), measure(watch, layer, wanted)
        for label in "nchw":
            config = Config.of({label: 4})
            parts = predicted(layer, config, wanted, processor, dtype), measure(watch, cell(layer, config), wanted)
            row[f"predicted_{label}"], row[f"measured_{label}"] = (
                total(a, p) / total(b, p) for a, b, p in zip(whole, parts, ("predicted_", ""), strict=True)
            )
        rows.append(row)
    return rows


def cell(layer: Layer, config: Config) -> Layer:
    """The largest cell of a convolution as a layer of its own: padded only where its input ends short of its needs."""
    degrees, dims = layout([config], layer.space, config.total).computed.degrees, layer.space.dims
    extents = largest_extents(dims, degrees)[0].tolist()
    shape = tuple(int(intervals(axis, dims, degrees)[0][0]) for axis in layer.space.needs[0])
    conv = layer.op.main if isinstance(layer.op, Fused) else layer.op
    assert isinstance(conv, Conv)
    sizes = zip(extents[2:], shape[2:], conv.kernel, conv.stride, conv.dilation, strict=False)
    missing = [(out - 1) * s + d * (k - 1) + 1 - extent for out, extent, k, s, d in sizes]
    part = replace(conv, out_channels=extents[1], padding=tuple((m - m // 2, m // 2) for m in missing))
    op = replace(layer.op, main=part) if isinstance(layer.op, Fused) else part
    return replace(layer, op=op, specs=(TensorSpec(shape, layer.specs[0].dims),))


def total(row: Row, prefix: str = "") -> float:
    """Forward and backward seconds of a row."""
    return float(row[f"{prefix}forward_s"]) + float(row[f"{prefix}backward_s"])


def summary(rows: Sequence[Row]) -> Row:
    """Predicted over measured of the whole network, and how far off its layers are: |log ratio|."""
    result: Row = {}
    for part in ("forward_s", "backward_s"):
        sums = [sum(float(r[p + part]) * float(r["count"]) for r in rows) for p in ("predicted_", "")]
        result |= {f"predicted_{part}": sums[0], part: sums[1]}
    result["ratio"] = total(result, "predicted_") / total(result)
    errors = np.abs([math.log(total(r, "predicted_") / total(r)) for r in rows])
    return result | {"median_error": float(np.median(errors)), "p90_error": float(np.percentile(errors, 90))}


def table(title: str, rows: Sequence[Row]) -> Table:
    """Rows as they are; seconds with their unit."""
    result = Table(*(key.removesuffix("_s").replace("_", " ") for key in rows[0]), title=title, box=None)
    for row in rows:
        shown = [units(float(v), "s") if k.endswith("_s") else v for k, v in row.items()]
        result.add_row(*(f"{v:.3g}" if isinstance(v, float) else str(v) for v in shown))
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="h100")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "tf32"], default="float32", help="of the layers")
    parser.add_argument("--models", nargs="*", choices=NETWORKS, default=[*NETWORKS])
    parser.add_argument("--batch", type=int, help=f"default: {NETWORKS}")
    parser.add_argument("--budget", type=float, default=0.1, metavar="SECONDS", help="a measurement (default 0.1)")
    parser.add_argument("--no-figure-1", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    device, console = torch.device(args.device), Console(width=160)
    watch, processor = Stopwatch(device, args.budget), load(args.profile).processor
    if device.type == "cpu":
        torch.set_num_threads(min(processor.processors, torch.get_num_threads()))
    torch.manual_seed(0)

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    report: dict[str, object] = {"device": name, "torch": torch.__version__, "date": date.today().isoformat()}
    report |= {"profile": args.profile, "dtype": args.dtype, "limits": limits(watch)}
    console.print(report)
    for dtype in (d for d in TORCH if d in processor.peak_flops):
        tensor_cores(dtype == "tf32")
        rows = products(watch, processor, dtype)
        console.print(table(f"matrix products, {dtype}", rows))
        tiles = {f"{t.rows}x{t.columns}": t.efficiency for t in fitted(rows, processor).tiles}
        console.print("efficiencies that fit best:", tiles)
        report |= {f"products {dtype}": rows, f"fitted {dtype}": tiles}

    tensor_cores(args.dtype == "tf32")
    sums: list[Row] = []
    for model in args.models:
        graph = fuse(load_model(model, args.batch or NETWORKS[model]))
        rows = compared(watch, graph, processor, args.dtype)
        sums.append({"network": model, "batch": graph.batch} | summary(rows))
        console.print(table(f"{model}, batch {graph.batch}", rows))
        report[model] = rows
    if sums:
        console.print(table("predicted over measured", sums))
    report["networks"] = sums
    if not args.no_figure_1:
        graph = fuse(load_model("vgg16", args.batch or NETWORKS["vgg16"]))
        report["figure 1"] = rows = figure_1(watch, graph, processor, args.dtype)
        console.print(table("Figure 1: speed-up on a quarter of the work", rows))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def tensor_cores(allowed: bool) -> None:
    """Whether float32 may be computed in TF32, by cuBLAS and by cuDNN."""
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


if __name__ == "__main__":
    main()
