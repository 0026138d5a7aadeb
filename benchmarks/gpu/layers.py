"""t_C: measured times of the pieces that plans for 16 devices cut layers into, against the roofline."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu.rows import Found, Results, Row, Setting, printed
from layerwise.config import SearchSpace
from layerwise.cost.compute.measured import fitted, groups
from layerwise.cost.model import CostModel, CostOptions
from layerwise.graph.fuse import fuse
from layerwise.importers.load import load_model
from layerwise.machine import load
from layerwise.machine.layer_times import LayerTimes
from layerwise.measure.__main__ import main as measure
from layerwise.measure.bench import Mode
from layerwise.measure.cells import Key, layer_cells, wanted_cells
from layerwise.measure.conditions import modes
from layerwise.measure.job import timed
from layerwise.measure.timing import Stopwatch

NETWORKS = {"vgg16": 128, "resnet50": 128, "inception_v3": 128, "unet3d:64": 16}  # and samples on 16 devices
MODES = {  # flags of `layerwise measure layers`
    "float32": ("--dtype", "float32", "--tf32", "off"),
    "tf32": ("--dtype", "tf32"),
    "bf16": ("--dtype", "bf16"),
    "bf16, channels last": ("--dtype", "bf16", "--channels-last"),
}
NUMBERS = {"a convolution early": 1, "a convolution late": 10, "a linear layer": -3}  # among layers with weights
EQUAL = 0.05  # times that are closer are in no order
Pair = tuple[float, float]  # seconds, predicted and measured


def rows(setting: Setting) -> list[Row]:
    """A row a network and mode, then the fit over all of them."""
    networks, modes = ({"lenet5": 8}, ("float32",)) if setting.tiny else (NETWORKS, tuple(MODES))
    taken = [
        Row(f"{name}, {mode}", partial(measured, setting, name, batch, mode), 120.0)
        for mode in modes
        for name, batch in networks.items()
    ]
    return [*taken, Row("fit on half of the layers", partial(fit, setting))]


def figure(setting: Setting) -> list[Row]:
    """The paper's Figure 1: a layer's time under each configuration, for three layers of VGG-16; then the picture."""
    return [*(Row(name, partial(layer, setting, name)) for name in NUMBERS), Row("picture", partial(picture, setting))]


def measured(setting: Setting, name: str, batch: int, mode: str) -> Found:
    """Measures into the profile; how far the roofline is off, by kind of layer, and whether its order is right."""
    gpus = 2 if setting.tiny else 16
    flags = ["--gpus", str(gpus), "--global-batch", str(batch), "--device", setting.device, "--out", setting.profile]
    flags += [*MODES[mode], "--profile", setting.base(), "--budget", "2s" if setting.tiny else "15s", "--json"]
    said = printed(measure, ["layers", name, *flags])
    profile = load(setting.profile)
    times, dtype = profile.layers[-1], MODES[mode][1]  # the latest is the last
    devices = replace(profile, layers=()).device_graph(gpus, min(gpus, profile.gpus_per_node))
    graph = fuse(load_model(name, batch))
    model = CostModel(graph, devices, CostOptions(dtype=dtype))
    configs = {layer.name: SearchSpace(gpus).configurations(layer.space.dims) for layer in graph.inner}
    by_kind, by_layer = defaultdict[str, list[Pair]](list), defaultdict[str, list[Pair]](list)
    for (operator, extents), cell in wanted_cells(model, configs).items():
        time = times.cells.get(operator, {}).get(extents)
        if time is not None and operator.startswith("{"):
            pair = cell.predicted_s, time.forward_s + time.backward_s
            by_kind[groups(operator)[1]].append(pair)
            by_layer[operator].append(pair)
    pairs, share, compared = [p for some in by_kind.values() for p in some], *in_order(by_layer.values())
    assert pairs, said["failed"] or "nothing was measured"
    told = f"{len(pairs)} cells, roofline {error(pairs):.0%} off (median), {share:.1%} of {compared} pairs in order"
    kinds = {kind: {"cells": len(some), "median_error": error(some)} for kind, some in by_kind.items()}
    found = {"kinds": kinds, "order": share, "pairs": compared, "cells": dict(by_layer), "told": told}
    return found | {"held_out_error": said["held_out_error"], "failed": said["failed"], "spread": said["spread"]}


def error(pairs: Iterable[Pair]) -> float:
    """The median relative error."""
    return statistics.median(abs(predicted / real - 1) for predicted, real in pairs)


def in_order(groups_of: Iterable[Iterable[Pair]]) -> tuple[float, int]:
    """Of all pairs within a group whose measured times differ, the share that is predicted in that order; how many."""
    right = [
        (a[0] - b[0]) * (a[1] - b[1]) > 0
        for some in groups_of
        for a, b in combinations(some, 2)
        if abs(a[1] - b[1]) > EQUAL * max(a[1], b[1])
    ]
    return (sum(right) / len(right) if right else 1.0), len(right)


def fit(setting: Setting) -> Found:
    """The roofline's terms with factors fitted to every second operator, judged on the others, by mode."""
    floor_s = load(setting.profile).processor.kernel_floor_s
    modes = {f"{s.conditions.dtype} {s.conditions.channels_last}": s for s in load(setting.profile).layers}
    found = {mode: judged(times, floor_s) for mode, times in modes.items()}
    told = "; ".join(f"{mode}: {a:.0%} → {b:.0%} off" for mode, (a, b) in found.items())
    return {"before_after": found, "told": told}


def judged(times: LayerTimes, floor_s: float) -> tuple[float, float]:
    """Median errors on the operators that are not fitted to: of the terms' largest, and of the fit."""
    names = sorted(name for name in times.cells if name.startswith("{"))
    factors = fitted({name: times.cells[name] for name in names[::2]})
    before, after = list[Pair](), list[Pair]()
    for name in names[1::2]:
        for time in times.cells[name].values():
            real = time.forward_s + time.backward_s
            rows = [
                np.array([[w.kernels * floor_s, w.arithmetic_s, w.memory_s]]) for w in (time.forward, time.backward)
            ]
            before.append((sum(float(row.max()) for row in rows), real))
            made = [factors(name, i, row) for i, row in enumerate(rows)]
            after.append((sum(float(t[0]) for t in made if t is not None), real))
    return error(before), error(after)


def layer(setting: Setting, name: str) -> Found:
    """Forward and backward of the fullest cell of each configuration, in float32."""
    model, batch, gpus = ("lenet5", 4, 2) if setting.tiny else ("vgg16", 128, 16)
    graph, profile = fuse(load_model(model, batch)), load(setting.base())
    devices = profile.device_graph(gpus, min(gpus, profile.gpus_per_node))
    cost = CostModel(graph, replace(devices, layers=()), CostOptions())
    weighted = [one for one in graph.inner if one.space.parameters]
    which = weighted[NUMBERS[name] % len(weighted)]
    known, found, mode = dict[Key, float](), list[Found](), Mode(setting.where, torch.float32)
    watch = Stopwatch(setting.where, 0.01 if setting.tiny else 0.2)
    with modes("float32", "off", False):
        for config in SearchSpace(gpus).configurations(which.space.dims):
            (cell,) = (one for one in layer_cells(cost, which, [config]) if one.name.startswith("{"))
            if cell.key not in known:
                time = timed(cell, mode, watch)
                known[cell.key] = time.forward_s + time.backward_s
            found.append({"config": str(config), "predicted_s": cell.predicted_s, "s": known[cell.key]})
    share, pairs = in_order([[(one["predicted_s"], one["s"]) for one in found]])
    fastest = min(found, key=lambda one: one["s"])["config"]
    told = f"{which.name}: {len(found)} configurations, {share:.0%} of {pairs} pairs in order, fastest {fastest}"
    return {"layer": which.name, "configurations": found, "told": told}


def picture(setting: Setting) -> Found:
    """figure.png, of what is there."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    kept = Results(Path(setting.out) / "results.jsonl", setting).rows
    there = [row for name in NUMBERS if "layer" in (row := kept.get(("figure", name), {}))]
    assert there, "no layer was measured"
    figure, axes = pyplot.subplots(1, len(there), figsize=(6 * len(there), 6), squeeze=False)
    for axis, row in zip(axes[0], there, strict=True):
        found = sorted(row["configurations"], key=lambda one: one["s"])
        names = [one["config"] for one in found]
        axis.barh(names, [1e3 * one["s"] for one in found], color="#9bbbd6", label="measured")
        axis.plot([1e3 * one["predicted_s"] for one in found], names, "k.", label="predicted")
        axis.set(title=row["layer"], xlabel="forward and backward, ms", xscale="log")
        axis.tick_params(axis="y", labelsize=5)
        axis.legend()
    path = Path(setting.out) / "figure.png"
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return {"told": f"{len(there)} layers in {path.name}"}
