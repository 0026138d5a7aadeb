"""python -m benchmarks.inference_zoo: the zoo's networks without a backward pass: memory, and the time to plan.

A row a network: the peak of one device, of an answer and of a training step without an optimizer,
64 samples; and the CPU seconds of a search for 8 GPUs, on one core. Both have the parameters.

    PYTHONPATH=.venv/zoo python -m benchmarks.inference_zoo --only 'monai/*' 'decoders/*'
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from fnmatch import fnmatch
from pathlib import Path

import torch

from benchmarks.zoo.example import SAMPLES
from benchmarks.zoo.networks import build, names
from benchmarks.zoo.trial import GPUS, PER_GPU, PROFILE, one_line
from layerwise.config import Config, SearchSpace
from layerwise.cost.model import CostModel, CostOptions
from layerwise.cost.price import price
from layerwise.graph.fuse import fuse
from layerwise.importers.load import network_of
from layerwise.machine import load
from layerwise.search.find import search

Row = dict[str, float]


def row(name: str) -> Row:
    """Of one network."""
    torch.manual_seed(0)
    example = build(name)
    inputs, named = example.call(example.inputs)
    network = network_of(example.model.eval(), inputs, SAMPLES, name, named)
    graph = fuse(network.graph.rebatch(GPUS * PER_GPU))
    one, strategy = load(PROFILE).device_graph(1), {layer.name: Config() for layer in graph.inner}
    stored = sum(p.numel() * p.element_size() for p in example.model.parameters())
    answer = price(CostModel(graph, one, CostOptions(kind="inference")), strategy).memory_bytes
    step = price(CostModel(graph, one, CostOptions(optimizer="sgd")), strategy).memory_bytes
    model = CostModel(graph, load(PROFILE).device_graph(GPUS), CostOptions(kind="inference"))
    began = time.process_time()
    search(model, SearchSpace(GPUS))
    planned_s = time.process_time() - began
    return {"parameters": stored, "answer": answer, "step": step, "share": answer / step, "planned_s": planned_s}


def main() -> None:
    """Run and print."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", nargs="+", default=["*"], metavar="GLOB", help="such as 'timm/*'")
    p.add_argument("--json", type=Path, metavar="FILE", help="keeps every row; what it has is not tried again")
    args = p.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, Row] = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    refused = 0
    for name in names():
        if name in rows or not any(fnmatch(name, glob) for glob in args.only):
            continue
        try:
            rows[name] = row(name)
        except Exception as error:  # whatever it is: the others go on
            refused += 1
            print(f"{name}: {one_line(error)}", flush=True)
            continue
        print(name, *(f"{key} {value:.3g}" for key, value in rows[name].items()), flush=True)
        if args.json:
            args.json.write_text(json.dumps(rows))
    shares, seconds = ([r[key] for r in rows.values()] for key in ("share", "planned_s"))
    print(
        f"{len(rows)} networks, {refused} not: memory over a training step's {statistics.median(shares):.2f} in the "
        f"median, at most 0.4 in {sum(s <= 0.4 for s in shares)}; planned in {statistics.median(seconds):.2f} s in the "
        f"median, at most {max(seconds):.1f} s, within 2 s in {sum(s <= 2 for s in seconds)}"
    )


if __name__ == "__main__":
    main()
