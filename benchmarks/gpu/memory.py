"""Memory: predicted for a step on one device, against the peak of CUDA's allocator and by what the device has lost."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common.live import step_bytes
from benchmarks.gpu.rows import Found, Row, Setting
from layerwise.comm.solo import SoloComm
from layerwise.config import Config
from layerwise.cost.model import CostModel, CostOptions
from layerwise.cost.price import price
from layerwise.graph.fuse import fuse
from layerwise.importers.load import Network, load_network
from layerwise.machine import load
from layerwise.measure.conditions import TYPES
from layerwise.partition.blocks import recomputable
from layerwise.plan import Plan
from layerwise.run.load import load as load_module

# And their samples.
NETWORKS = {"lenet5": 256, "alexnet": 128, "vgg16": 32, "resnet18": 64, "resnet50": 32, "resnet152": 16}
NETWORKS |= {"densenet121": 32, "mobilenet_v2": 64, "inception_v3": 32, "unet2d": 8, "unet3d:64": 4, "cosmoflow": 4}
KINDS = ("training", "recompute", "bf16", "inference")


def rows(setting: Setting) -> list[Row]:
    """A row a network."""
    networks = {"lenet5": 4, "mlp3": 4} if setting.tiny else NETWORKS
    return [Row(name, partial(compared, setting, name, batch)) for name, batch in networks.items()]


def compared(setting: Setting, name: str, batch: int) -> Found:
    """Of all kinds, each by itself: one that does not fit says so."""
    network, found, told = load_network(name, batch, None), dict[str, Any](), []
    for kind in KINDS:
        try:
            found[kind] = one = taken(setting, network, batch, kind)
        except torch.OutOfMemoryError:
            told.append(f"{kind} does not fit")
            continue
        ratio = f"{one['predicted'] / one['measured']:.3f}" if one["predicted"] else f"{one['measured'] / 1e9:.2f} GB"
        told.append(f"{kind} {ratio}" + (f" (+{one['beyond'] / 1e9:.2f} GB)" if "beyond" in one else ""))
    return found | {"told": ", ".join(told)}


def taken(setting: Setting, network: Network, batch: int, kind: str) -> Found:
    """Bytes: predicted (of inference nothing is) and measured. On a GPU also `beyond`: what it has lost besides.

    That is of CUDA's context, of cuDNN's workspaces, and of what the allocator cannot use.
    """
    gpu, graph = setting.device == "cuda", fuse(network.graph)
    dtype = "bf16" if kind == "bf16" and gpu else "float32"  # a CPU's profile has no rate of bf16
    again = recomputable(graph) if kind == "recompute" else frozenset()
    strategy = {layer.name: Config(recompute=layer.name in again) for layer in graph.inner}
    plan, comm = Plan(graph.name, graph.digest, batch, 1, 1, "sample", True, strategy), SoloComm(setting.where)
    if gpu:
        torch.cuda.empty_cache()
    if kind == "inference":
        return {"predicted": None, "measured": inference_bytes(network, plan, comm) if gpu else 0.0}
    machine = load(setting.base()).device_graph(1)
    predicted = price(CostModel(graph, machine, CostOptions(optimizer="adam", dtype=dtype)), strategy).memory_bytes
    found: Found = {"predicted": predicted, "before": torch.cuda.memory_allocated() if gpu else 0}
    found["measured"] = step_bytes(network, plan, comm, "adam", TYPES[dtype][1])
    if gpu:
        (free, total), reserved = torch.cuda.mem_get_info(), torch.cuda.max_memory_reserved()
        found |= {"reserved": reserved, "context": total - free - torch.cuda.memory_reserved()}
        with Workspaces() as workspaces:
            step_bytes(network, plan, comm, "adam", TYPES[dtype][1])
        found |= {"workspace": workspaces.most, "beyond": reserved + found["context"] - predicted}
    return found


def inference_bytes(network: Network, plan: Plan, comm: SoloComm) -> float:
    """The peak of a forward pass without gradients."""
    module = load_module(plan, network, comm=comm).eval()
    x = torch.randn(next(layer for layer in network.graph.layers if layer.end).out.shape, device=comm.device)
    with torch.no_grad():
        module(x)
        torch.cuda.reset_peak_memory_stats()
        module(x)
    return float(torch.cuda.max_memory_allocated())


class Workspaces(TorchDispatchMode):
    """Sees what a convolution's kernels allocate beyond what they return: `most` bytes at once."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "convolution" not in func.name():
            return func(*args, **(kwargs or {}))
        torch.cuda.reset_peak_memory_stats()
        out = func(*args, **(kwargs or {}))
        self.most = max(self.most, torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated())
        return out
