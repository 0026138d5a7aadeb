"""python -m benchmarks.oracle_gamma: the memory reuse factor gamma, from our own runtime's peak on one device.

gamma is the peak of a training step over what a closed form counts (layers' inputs, outputs and their gradients, all at
once), as ParaDL has it (`benchmarks.paradl`, `project(case, gamma=G)`). The peak is counted as
benchmarks.memory_prediction counts it: CUDA's allocator, or on a CPU the storages that are alive at once.

    python -m benchmarks.oracle_gamma --networks vgg16 resnet50 --batch 8
"""

from __future__ import annotations

import argparse

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common.live import step_bytes
from benchmarks.common.networks import NETWORKS
from benchmarks.paradl.facts import facts_of
from benchmarks.paradl.memory import reuse_factor
from benchmarks.paradl.project import Formulas, case_of, project
from layerwise.comm.solo import SoloComm
from layerwise.config import Config
from layerwise.cost.model import CostModel, CostOptions
from layerwise.cost.price import price
from layerwise.graph.fuse import fuse
from layerwise.importers.load import Network, load_network, network_of
from layerwise.machine import load
from layerwise.measure.conditions import device_of
from layerwise.plan import Plan
from layerwise.quantities import units

FORMS: tuple[Formulas, ...] = ("published", "as-run")


def gammas(name: str, batch: int, optimizer: str, device: torch.device) -> tuple[float, float, list[float]]:
    """Bytes that the cost tables predict, and of the peak; gamma of each closed form."""
    whole, options = network(name, batch), CostOptions(io="free", optimizer=optimizer)
    graph = fuse(whole.graph)
    serial = {layer.name: Config() for layer in graph.inner}
    predicted = price(CostModel(graph, load("cpu").device_graph(1), options), serial).memory_bytes
    plan = Plan(name, graph.digest, batch, 1, 1, "free", fused=True, strategy=serial)
    peak = step_bytes(whole, plan, SoloComm(device), optimizer)
    facts = facts_of(graph, load("cpu"), options=options)
    counted = [project(case_of("serial", facts, 1, batch), form).phases.memory_bytes for form in FORMS]
    return predicted, peak, [reuse_factor(peak, each) for each in counted]


def network(name: str, batch: int) -> Network:
    """A small network of this folder, or a built-in one."""
    if name not in NETWORKS:
        return load_network(name, batch, None)
    known = NETWORKS[name]
    torch.manual_seed(0)
    return network_of(known.build(), (torch.empty(2, *known.input_shape),), batch, name)


def main() -> None:
    """Print a row a network and optimizer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["lenet5", "alexnet", "resnet18", "vgg16"])
    parser.add_argument("--device", choices=["cuda", "cpu"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--optimizers", nargs="+", default=["sgd", "adam"])
    args = parser.parse_args()
    device = device_of(args.device)
    table = Table("", "optimizer", "peak", "cost tables / peak", *(f"γ {form}" for form in FORMS), box=None)
    for name in args.networks:
        for optimizer in args.optimizers:
            predicted, peak, counted = gammas(name, args.batch, optimizer, device)
            ratios = (f"{value:.3f}" for value in (predicted / peak, *counted))
            table.add_row(name, optimizer, units(peak, "B"), *ratios)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
