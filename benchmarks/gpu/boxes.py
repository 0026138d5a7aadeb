"""Boxes: the step of one rank of a plan, without its network, against what is predicted; and what a halo costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

import torch
from torch import Tensor, nn

from benchmarks import borders
from benchmarks.gpu.layers import in_order
from benchmarks.gpu.rows import Found, Row, Setting
from layerwise.comm.base import Done, Handle
from layerwise.comm.solo import SoloComm
from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel, CostOptions
from layerwise.cost.price import price
from layerwise.graph.fuse import fuse
from layerwise.importers.load import Network, load_network
from layerwise.machine import load as load_profile
from layerwise.machine.layer_times import LayerTimes
from layerwise.measure.bench import Mode, optimizer_of
from layerwise.measure.cells import wanted_cells
from layerwise.measure.conditions import conditions, modes
from layerwise.measure.job import Measuring
from layerwise.measure.timing import Stopwatch
from layerwise.plan import Plan
from layerwise.run.load import load
from layerwise.search.baselines import baseline
from layerwise.search.find import search

NETWORKS = {"vgg16": 128, "inception_v3": 128, "unet3d:64": 8}  # and samples of all devices together
SIZES = (1, 2, 4, 8, 16)


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


def rows(setting: Setting) -> list[Row]:
    """A row a network, then the convolutions of volumes."""
    networks = {"lenet5": 4} if setting.tiny else NETWORKS
    taken = [Row(name, partial(steps, setting, name, batch), 240.0) for name, batch in networks.items()]
    return [*taken, Row("halos of volumes", partial(halos, setting))]


def steps(setting: Setting, name: str, batch: int) -> Found:
    """Plans for several sizes, in float32: predicted by the roofline and by measured layers, and measured."""
    network, profile, mode = (
        load_network(name, batch, None),
        load_profile(setting.base()),
        Mode(setting.where, torch.float32),
    )
    graph, found = fuse(network.graph), list[Found]()
    with modes("float32", "off", False) as tf32:
        where = conditions(mode, "float32", tf32, False)
        known = next((one for one in profile.layers if one.conditions == where), LayerTimes(where))
        measuring = Measuring(known, mode, lambda _: None, 1.0 if setting.tiny else 90.0)
        for size in (2,) if setting.tiny else SIZES:
            io = "sample" if batch >= size else "free"
            devices = replace(profile, layers=()).device_graph(size, min(size, profile.gpus_per_node))
            model = CostModel(graph, devices, CostOptions(io=io))
            kinds = {"searched": search(model, SearchSpace(size)).best.strategy}
            kinds |= {"data": baseline(model, "data")} if io == "sample" else {}
            for kind, best in kinds.items():
                strategy = {layer.name: best[layer.name] for layer in graph.inner}
                cells = wanted_cells(model, {key: (config,) for key, config in strategy.items()})
                measuring.measure(measuring.left(cells.values()))
                measured = CostModel(graph, replace(devices, layers=(measuring.times,)), model.options)
                plan = Plan(name, graph.digest, batch, size, size, io, True, strategy)
                one: Found = {"devices": size, "plan": kind, "s": step_s(plan, network, setting)}
                for how, by in (("roofline_s", model), ("layers_s", measured)):
                    layers = price(by, strategy).layers.values()
                    one[how] = sum(layer.seconds["compute"] for layer in layers)
                found.append(one)
    off = [fmean(abs(one[how] / one["s"] - 1) for one in found) for how in ("roofline_s", "layers_s")]
    share, pairs = in_order([[(one["layers_s"], one["s"]) for one in found]])
    told = f"{len(found)} plans: roofline {off[0]:.0%}, measured layers {off[1]:.0%} off (mean), "
    return {"plans": found, "told": told + f"{share:.0%} of {pairs} pairs in order"}


def step_s(plan: Plan, network: Network, setting: Setting) -> float:
    """Of rank 0, with nobody to wait for."""
    loss = nn.functional.cross_entropy if plan.io == "free" else None
    module = load(plan, network, comm=Mute(plan.gpus, setting.where), loss=loss)
    update, share = optimizer_of("sgd", list(module.parameters())), module.share()
    entry, (out,) = next(layer.out for layer in module.graph.layers if layer.end), module.graph.layers[-1].specs
    x = torch.randn(share.stop - share.start, *entry.shape[1:], device=setting.where)
    target = torch.randint(out.shape[1], (len(x), *out.shape[2:]), device=setting.where)

    def step() -> None:
        update.zero_grad()
        (module(x, target) if loss else nn.functional.cross_entropy(module(x), target)).backward()
        update.step()

    return Stopwatch(setting.where, 0.02 if setting.tiny else 2.0)([step]).seconds[0]


def halos(setting: Setting) -> Found:
    """What the copies of a halo add to a convolution, and what three convolutions in its place do."""
    watch, found = Stopwatch(setting.where, 0.01 if setting.tiny else 0.5), []
    for shape in [(1, 4, 4, 4, 8, 8)] if setting.tiny else (*borders.BATCH_1, *borders.BATCH_2, *borders.DEEP):
        whole, alone, parts = (watch([way]).seconds[0] for way in borders.ways(*shape, device=setting.where))
        found.append({"shape": shape, "alone_s": alone, "whole_s": whole, "in_parts_s": parts})
    added = [fmean(one[how] / one["alone_s"] - 1 for one in found) for how in ("whole_s", "in_parts_s")]
    return {"convolutions": found, "told": f"copies add {added[0]:+.0%}, three convolutions {added[1]:+.0%} (mean)"}
