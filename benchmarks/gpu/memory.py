"""Memory: predicted for a step on one device, against the peak of CUDA's allocator and by what the device has lost."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common.live import step_bytes
from benchmarks.gpu.rows import Found, Results, Row, Setting, absent
from layerwise.comm.solo import SoloComm
from layerwise.config import Config
from layerwise.cost.model import CostModel, CostOptions
from layerwise.cost.price import price
from layerwise.graph.fuse import fuse
from layerwise.importers.load import Network, load_network
from layerwise.machine import load
from layerwise.machine.devices import reserved_bytes
from layerwise.measure.conditions import TYPES
from layerwise.partition.blocks import recomputable
from layerwise.plan import Plan

# And their samples.
NETWORKS = {"lenet5": 256, "alexnet": 128, "vgg16": 32, "resnet18": 64, "resnet50": 32, "resnet152": 16}
NETWORKS |= {"densenet121": 32, "mobilenet_v2": 64, "inception_v3": 32, "unet2d": 8, "unet3d:64": 4, "cosmoflow": 4}
RESERVES = (1.0e9, 1.25e9, 1.5e9, 2e9, 3e9)
KINDS = ("training", "recompute", "bf16", "inference")


def rows(setting: Setting) -> list[Row]:
    """A row a network, then the verdict."""
    networks = {"lenet5": 4, "mlp3": 4} if setting.tiny else NETWORKS
    taken = [Row(name, partial(compared, setting, name, batch)) for name, batch in networks.items()]
    return [*taken, Row("reserve", partial(reserve, setting))]


def compared(setting: Setting, name: str, batch: int) -> Found:
    """Of all kinds, each by itself: one that does not fit says so."""
    network, found, told = load_network(name, batch, None), dict[str, Any](), []
    for kind in KINDS:
        try:
            found[kind] = one = taken(setting, network, batch, kind)
        except torch.OutOfMemoryError:
            told.append(f"{kind} does not fit")
            continue
        beyond = f" (+{(one['enough'] or math.inf) / 1e9:g} GB do)" if "enough" in one else ""
        told.append(f"{kind} {one['predicted'] / one['measured']:.3f}{beyond}")
    return found | {"told": "predicted / measured: " + ", ".join(told)}


def taken(setting: Setting, network: Network, batch: int, kind: str) -> Found:
    """Bytes: predicted and measured. On a GPU also `beyond`: what it has lost besides.

    That is of CUDA's context, of cuDNN's workspaces, and of what the allocator cannot use.
    """
    gpu, graph = setting.device == "cuda", fuse(network.graph)
    dtype = "bf16" if kind == "bf16" and gpu else "float32"  # a CPU's profile has no rate of bf16
    optimizer = None if kind == "inference" else "adam"
    options = CostOptions(optimizer=optimizer, dtype=dtype) if optimizer else CostOptions(kind="inference")
    again = recomputable(graph) if kind == "recompute" else frozenset()
    strategy = {layer.name: Config(recompute=layer.name in again) for layer in graph.inner}
    plan = Plan(graph.name, graph.digest, batch, 1, 1, "sample", True, strategy)
    predicted = price(CostModel(graph, load(setting.base()).device_graph(1), options), strategy).memory_bytes
    measure = partial(step_bytes, network, plan, SoloComm(setting.where), optimizer, TYPES[dtype][1])
    gc.collect()
    if not gpu:
        return {"predicted": predicted, "measured": measure()}
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    measured, reserved = measure() - before, torch.cuda.max_memory_reserved() - before
    free, total = torch.cuda.mem_get_info()
    context = total - free - torch.cuda.memory_reserved()
    with Workspaces() as workspaces:
        measure()
    enough = least_reserve(predicted, context, measure)
    found = {"predicted": predicted, "measured": measured, "before": before, "reserved": reserved, "context": context}
    return found | {"workspace": workspaces.most, "beyond": reserved + context - predicted, "enough": enough}


def least_reserve(predicted: float, context: float, measure: Callable[[], float]) -> float | None:
    """The least of RESERVES that a step runs in beside what is predicted of it; None: none.

    It includes the context. cuDNN takes other algorithms where a workspace does not fit, and the allocator gives back
    what it keeps, so that this is less than what a step takes where it may.
    """
    total = torch.cuda.mem_get_info()[1]
    for reserve in RESERVES:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((predicted + reserve - context) / total)
        try:
            measure()
            return reserve
        except RuntimeError:  # out of memory, or cuDNN has no algorithm that does with what is left
            continue
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    return None


def reserve(setting: Setting) -> Found:
    """Whether what plans leave of a GPU's memory is enough beside what they predict."""
    rows = [row for (stage, _), row in Results(setting).rows.items() if stage == "memory"]
    enough = {
        f"{row['row']}, {k}": row[k]["enough"] or math.inf for row in rows for k in KINDS if "enough" in row.get(k, {})
    }
    if not enough:
        return absent("what GPUs lose")
    reserved = reserved_bytes(torch.cuda.mem_get_info()[1], "cuda")
    short = [name for name, most in enough.items() if most > reserved]
    told = f"{reserved / 1e9:.2f} GB are enough for {len(enough) - len(short)} of {len(enough)}"
    return {"reserved": reserved, "told": told + (f", not for {'; '.join(short)}" if short else "")}


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
