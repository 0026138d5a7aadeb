"""The roofline on this device: its constants, the pieces that plans cut layers into, one rank's step of a plan.

Predicted against measured, and what is measured goes into a profile.
"""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean, median

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.rows import Found, Results, Row, Setting, printed
from benchmarks.host_time import step_of
from benchmarks.published.records import order
from layerwise.comm.base import Done, Handle
from layerwise.comm.solo import SoloComm
from layerwise.config import SearchSpace
from layerwise.cost.compute.measured import groups
from layerwise.cost.compute.roofline import gemm_s
from layerwise.cost.model import CostModel, CostOptions
from layerwise.cost.price import price
from layerwise.graph.fuse import fuse
from layerwise.importers.load import Network, load_model, load_network
from layerwise.machine import Processor, load, save
from layerwise.machine.layer_times import LayerTimes
from layerwise.measure.__main__ import main as measure
from layerwise.measure.bench import Mode
from layerwise.measure.cells import layer_cells, wanted_cells
from layerwise.measure.conditions import base_profile, conditions, modes, provenance
from layerwise.measure.measuring import Measuring, timed
from layerwise.measure.measuring import measure as measure_cells
from layerwise.measure.timing import Stopwatch
from layerwise.ops.facts import Gemm
from layerwise.plan import Plan
from layerwise.run.load import load as load_module
from layerwise.search.baselines import baseline
from layerwise.search.find import search

SHAPES = [  # rows, columns, depth: cubes, linear and convolution layers
    *((size, size, size) for size in (256, 512, 1024, 2048, 4096, 8192)),
    *((32, 4096, 25088), (32, 4096, 4096), (32, 1000, 4096), (32, 1000, 2048), (1568, 512, 4608), (1568, 2048, 512)),
    *((6272, 256, 2304), (6272, 512, 4608), (25088, 128, 1152), (25088, 512, 128), (100352, 64, 576)),
]
TORCH = {"float32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
LAYERS = {"vgg16": 128, "resnet50": 128, "inception_v3": 128, "unet3d:64": 16}  # and samples on 16 devices
MODES = {  # flags of `layerwise measure layers`
    "float32": ("--dtype", "float32", "--tf32", "off"),
    "tf32": ("--dtype", "tf32"),
    "bf16": ("--dtype", "bf16"),
    "bf16, channels last": ("--dtype", "bf16", "--channels-last"),
}
NUMBERS = {"a convolution early": 1, "a convolution late": 10, "a linear layer": -3}  # among layers with weights
EQUAL = 0.05  # times that are closer are in no order
Times = tuple[float, float]  # seconds, predicted and measured
BOXES = {"vgg16": 128, "inception_v3": 128, "unet3d:64": 8}  # and samples of all devices together
SIZES = (1, 2, 4, 8, 16)
Product = tuple[str, int, int, int, float]  # dtype, rows, columns, depth, seconds


def layers(setting: Setting) -> list[Row]:
    """A row a network and mode, then the fit over all of them."""
    networks, modes = ({"lenet5": 8}, ["float32"]) if setting.tiny else (LAYERS, MODES)
    taken = [Row(f"{n}, {mode}", partial(measured, setting, n, networks[n], mode)) for mode in modes for n in networks]
    return [*taken, Row("fit on most of the layers", partial(fit, setting))]


def boxes(setting: Setting) -> list[Row]:
    """A row a network."""
    networks = {"lenet5": 4} if setting.tiny else BOXES
    return [Row(name, partial(steps, setting, name, batch), 400.0) for name, batch in networks.items()]


def figure(setting: Setting) -> list[Row]:
    """The paper's Figure 1: a layer's time under each configuration, for three layers of VGG-16."""
    return [Row(name, partial(layer, setting, name)) for name in NUMBERS]


def profile(setting: Setting) -> Found:
    """The roofline's constants, measured on copies and matrix products, into the profile and profiles/NAME.json."""
    where = conditions(Mode(setting.where, torch.float32), "float32", "off", False)
    known, budget_s = base_profile(None, None, where, setting.where), 0.002 if setting.tiny else 0.1
    found, measured = constants(setting.where, budget_s), products(setting.where, budget_s, tiny=setting.tiny)
    kind = where.device if setting.device == "cuda" else f"cpu: {where.device}"  # what has no CPU's name is a GPU
    processor = fitted(measured, replace(known.processor, name=kind, **found))
    source = (
        f"python -m benchmarks.gpu, torch {torch.__version__} on {where.device}, {provenance(setting.where)['date']}"
    )
    paths = [f"device.{name}" for name in found]
    paths += [f"device.tiles[{i}].{n}" for i in range(len(processor.tiles)) for n in ("rows", "columns", "efficiency")]
    name = re.sub(r"\W+", "_", where.device.lower()).strip("_")
    known = replace(known, name=name, processor=processor, sources={**known.sources, **dict.fromkeys(paths, source)})
    (Path(setting.out) / "profiles").mkdir(exist_ok=True)
    for path in (setting.profile, f"{setting.out}/profiles/{name}.json"):
        save(known, path)
    told = f"{found['memory_bandwidth_bytes_per_s'] / 1e12:.3g} TB/s, floor {found['kernel_floor_s'] * 1e6:.1f} µs, "
    tiles = {f"{t.rows}x{t.columns}": t.efficiency for t in processor.tiles}
    off = error((product_s(processor, *row[:4]), row[4]) for row in measured)
    return found | {"products": measured, "tiles": tiles, "told": f"{told}products {off:.0%} off (median)"}


def seconds(device: torch.device, call: Callable[[], object], budget_s: float, calls: int = 20) -> float:
    """Of a call amid others: of kernels as short as their launch, too."""
    return Stopwatch(device, budget_s, ahead=True)([lambda: [call() for _ in range(calls)]]).seconds[0] / calls


def constants(device: torch.device, budget_s: float) -> dict[str, float]:
    """The floor of a kernel in seconds, and the bandwidth of a copy, read and written, in bytes/s."""
    one, source = torch.ones(1, device=device), torch.randn(2**28 if device.type == "cuda" else 2**22, device=device)
    target = torch.empty_like(source)
    floor_s, copy_s = (seconds(device, do, budget_s) for do in (lambda: one.add_(1), lambda: target.copy_(source)))
    return {"kernel_floor_s": floor_s, "memory_bandwidth_bytes_per_s": 2 * source.nbytes / copy_s}


def products(device: torch.device, budget_s: float, *, tiny: bool) -> list[Product]:
    """Measured matrix products of SHAPES in each type that the device has."""
    found = []
    for dtype in TORCH if device.type == "cuda" else ("float32",):
        with modes(dtype, "all" if dtype == "tf32" else "off", False):
            for m, n, k in [(64, 64, 64), (32, 1000, 512)] if tiny else SHAPES:
                a, b = (torch.randn(shape, device=device, dtype=TORCH[dtype]) for shape in ((m, k), (k, n)))
                found.append((dtype, m, n, k, seconds(device, lambda a=a, b=b: a @ b, budget_s)))
    return found


def product_s(processor: Processor, dtype: str, m: int, n: int, k: int) -> float:
    """What the roofline says of a matrix product."""
    gemm = Gemm(*(np.atleast_1d(np.float64(x)) for x in (m, n, k, 1)))
    moved_s = (m * k + k * n + m * n) * TORCH[dtype].itemsize / processor.memory_bandwidth_bytes_per_s
    return max(float(gemm_s(gemm, processor, processor.peak(dtype))[0]), moved_s, processor.kernel_floor_s)


def fitted(measured: Sequence[Product], processor: Processor) -> Processor:
    """With the efficiencies of its tiles, in steps of 0.05 and no larger for smaller tiles, that predict best."""

    def off(device: Processor) -> float:
        return fmean(abs(math.log(product_s(device, *row[:4]) / row[4])) for row in measured)

    best = replace(processor, tiles=tuple(sorted(processor.tiles, key=lambda tile: -tile.rows * tile.columns)))
    for i, step in product([*range(len(best.tiles))] * 3, range(1, 21)):  # three times over all of them
        tiles = (*best.tiles[:i], replace(best.tiles[i], efficiency=step / 20), *best.tiles[i + 1 :])
        if all(a.efficiency >= b.efficiency for a, b in pairwise(tiles)):
            best = min(best, replace(best, tiles=tiles), key=off)
    return best


def roofline(setting: Setting, name: str, batch: int, gpus: int, dtype: str = "float32") -> CostModel:
    """The cost model of a network that rests on no measured times of layers."""
    profile, graph = load(setting.base()), fuse(load_model(name, batch))
    devices = replace(profile, layers=()).device_graph(gpus, min(gpus, profile.gpus_per_node))
    return CostModel(graph, devices, CostOptions(dtype=dtype, io="sample" if batch >= gpus else "free"))


def measured(setting: Setting, name: str, batch: int, mode: str) -> Found:
    """Measures into the profile; how far the roofline is off, by kind of layer, and whether its order is right."""
    gpus = 2 if setting.tiny else 16
    flags = ["--gpus", str(gpus), "--global-batch", str(batch), "--device", setting.device, "--out", setting.profile]
    flags += [*MODES[mode], "--profile", setting.base(), "--budget", "2s" if setting.tiny else "10s", "--json"]
    reported = printed(measure, ["layers", name, *flags])
    cells = load(setting.profile).layers[-1].cells  # the latest is the last
    model = roofline(setting, name, batch, gpus, MODES[mode][1])
    configs = {layer.name: SearchSpace(gpus).configurations(layer.space.dims) for layer in model.graph.inner}
    by_kind, by_layer = defaultdict[str, list[Times]](list), defaultdict[str, list[Times]](list)
    for (operator, extents), cell in wanted_cells(model, configs).items():
        time = cells.get(operator, {}).get(extents)
        if time is not None and cell.predicted_s > 0 and (real_s := time.forward_s + time.backward_s) > 0:
            by_kind[groups(operator)[:2][-1]].append((cell.predicted_s, real_s))  # updates are a kind, too
            by_layer[operator].append((cell.predicted_s, real_s))
    every, (share, compared) = [one for some in by_kind.values() for one in some], in_order(by_layer.values())
    assert every, reported["failed"] or "nothing was measured"
    told = f"{len(every)} cells, roofline {error(every):.0%} off (median), {share:.1%} of {compared} pairs in order"
    kinds = {kind: {"cells": len(some), "median_error": error(some)} for kind, some in by_kind.items()}
    found = {"kinds": kinds, "order": share, "pairs": compared, "cells": dict(by_layer), "told": told}
    return found | {key: reported[key] for key in ("held_out_error", "failed", "spread")}


def error(times: Iterable[Times]) -> float:
    """The median relative error."""
    return median(abs(predicted / real - 1) for predicted, real in times)


def in_order(groups_of: Iterable[Iterable[Times]]) -> tuple[float, int]:
    """Of all pairs within a group whose measured times differ, the share that is predicted in that order; how many."""
    found = [0, 0]
    for some in groups_of:
        predicted, real = ({str(i): time[of] for i, time in enumerate(some)} for of in (0, 1))
        found = [a + len(b) for a, b in zip(found, order(predicted, real, EQUAL), strict=True)]
    return found[0] / max(1, sum(found)), sum(found)


def fit(setting: Setting) -> Found:
    """The roofline's terms with factors fitted to most cells, judged on those left out, by mode: errors (medians)."""
    rows = [row for (stage, _), row in Results(setting).rows.items() if stage == "layers" and "cells" in row]
    before, after = dict[str, float](), dict[str, float | None]()
    for mode in MODES:
        if some := [row for row in rows if row["row"].endswith(f", {mode}")]:
            before[mode] = error(pair for row in some for pairs in row["cells"].values() for pair in pairs)
            after[mode] = some[-1]["held_out_error"]  # of all networks so far; None: fewer than 10 cells
    told = "; ".join(f"{mode}: {before[mode]:.0%} → {after[mode] or math.nan:.0%} off" for mode in before)
    return {"before": before, "after": after, "told": told}


def layer(setting: Setting, name: str) -> Found:
    """Forward and backward of the fullest cell of each configuration, in float32."""
    network, batch, gpus = ("lenet5", 4, 2) if setting.tiny else ("vgg16", 128, 16)
    model = roofline(setting, network, batch, gpus)
    weighted = [one for one in model.graph.inner if one.space.parameters]
    which = weighted[NUMBERS[name] % len(weighted)]
    watch, mode = (
        Stopwatch(setting.where, 0.01 if setting.tiny else 0.2, ahead=True),
        Mode(setting.where, torch.float32),
    )
    cells = {
        str(config): next(one for one in layer_cells(model, which, [config]) if one.name.startswith("{"))
        for config in SearchSpace(gpus).configurations(which.space.dims)
    }
    with modes("float32", "off", False):
        times = {key: timed(cell, mode, watch) for key, cell in {cell.key: cell for cell in cells.values()}.items()}
    found = {
        config: (cell.predicted_s, times[cell.key].forward_s + times[cell.key].backward_s)
        for config, cell in cells.items()
    }
    share, pairs = in_order([found.values()])
    fastest = min(found, key=lambda config: found[config][1])
    told = f"{which.name}: {len(found)} configurations, {share:.0%} of {pairs} pairs in order, fastest {fastest}"
    if find_spec("matplotlib"):
        picture(which.name, found, f"{setting.out}/figure-{name.replace(' ', '-')}.png")
    return {"layer": which.name, "configurations": found, "told": told}


def picture(title: str, found: Mapping[str, Times], path: str) -> None:
    """The times of configurations, as a picture."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 6))
    names = sorted(found, key=lambda config: found[config][1])
    axis.barh(names, [1e3 * found[name][1] for name in names], color="#9bbbd6", label="measured")
    axis.plot([1e3 * found[name][0] for name in names], names, "k.", label="predicted")
    axis.set(title=title, xlabel="forward and backward, ms", xscale="log")
    axis.tick_params(axis="y", labelsize=5)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


class Mute(SoloComm):
    """One rank of several, alone: what it sends goes nowhere, what it is to receive is zeros."""

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__(device)
        self.size = size

    def exchange(self, sends: object, receives: Sequence[tuple[int, Tensor]], *_: object) -> Handle:
        """In the time that it takes to write what a network would have written."""
        for _, tensor in receives:
            tensor.detach().zero_()
        return Done()

    def all_reduce(self, *_: object) -> Handle:
        """Its own part."""
        return Done()

    def all_gather_text(self, text: str) -> list[str]:
        """Everybody says the same."""
        return [text] * self.size


def steps(setting: Setting, name: str, batch: int) -> Found:
    """Plans for several sizes, in float32: predicted by the roofline and by measured layers, and measured."""
    network, mode, found = load_network(name, batch, None), Mode(setting.where, torch.float32), list[Found]()
    with modes("float32", "off", False):
        known = LayerTimes(conditions(mode, "float32", "off", False))
        measuring = Measuring(known, mode, lambda _: None, 0.0, SoloComm(setting.where))
        for size in (2,) if setting.tiny else SIZES:
            model = roofline(setting, name, batch, size)
            graph, io = model.graph, model.options.io
            strategies = {"searched": search(model, SearchSpace(size)).best.strategy}
            strategies |= {"data": baseline(model, "data")} if io == "sample" else {}
            for kind, best in strategies.items():
                strategy = {layer.name: best[layer.name] for layer in graph.inner}
                cells = wanted_cells(model, {key: (config,) for key, config in strategy.items()})
                measuring.deadline_s = time.monotonic() + (0.5 if setting.tiny else 4.0)
                measure_cells([(measuring, measuring.left(cells.values()))])
                layers = CostModel(graph, replace(model.devices, layers=(measuring.times,)), model.options)
                plan = Plan(name, graph.digest, batch, size, size, io, True, strategy)
                predicted = [
                    sum(layer.seconds["compute"] for layer in price(by, strategy).layers.values())
                    for by in (model, layers)
                ]
                times = {"s": step_s(plan, network, setting), "roofline_s": predicted[0], "layers_s": predicted[1]}
                found.append({"devices": size, "plan": kind} | times)
    off = [fmean(abs(one[by] / one["s"] - 1) for one in found) for by in ("roofline_s", "layers_s")]
    share, pairs = in_order([[(one["layers_s"], one["s"]) for one in found]])
    told = f"{len(found)} plans: roofline {off[0]:.0%}, measured layers {off[1]:.0%} off (mean), "
    return {"plans": found, "told": told + f"{share:.0%} of {pairs} pairs in order"}


def step_s(plan: Plan, network: Network, setting: Setting) -> float:
    """Of rank 0, with nobody to wait for."""
    module = load_module(plan, network, comm=Mute(plan.gpus, setting.where))
    share, graph = module.share(), module.layer_graph
    entry, (out,) = next(layer.out for layer in graph.layers if layer.end), graph.layers[-1].specs
    x = torch.randn(share.stop - share.start, *entry.shape[1:], device=setting.where)
    target = torch.randint(out.shape[1], (len(x), *out.shape[2:]), device=setting.where)
    step = step_of(module, x, target)
    return Stopwatch(setting.where, 0.02 if setting.tiny else 0.3)([step]).seconds[0]
