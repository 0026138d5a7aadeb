"""ParaDL's figures 4 and 5, CosmoFlow 512³ as data+spatial on 4 to 1,024 V100: `python -m benchmarks.paradl.cosmoflow`.

Beside the published runs and projections stand the closed form of the software that ran them, with the constants of
`chainermnx.json` (of CosmoFlow that file has the time of a sample on one GPU alone), and `layerwise oracle`, which
predicts `layerwise.run` and no run of theirs.
"""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.paradl.chainermnx import chainermnx
from benchmarks.paradl.facts import facts_of
from benchmarks.paradl.framework import framework
from benchmarks.paradl.project import case_of
from layerwise.graph.fuse import fuse
from layerwise.importers.load import load_model
from layerwise.machine import load
from layerwise.oracle.question import Oracle, Question
from layerwise.oracle.runs import accuracy
from layerwise.oracle.strategies import Wishes

PUBLISHED = Path(__file__).parent.parent / "published" / "cosmoflow.json"
GPUS = tuple(4 << n for n in range(9))
MODEL, NODE = "cosmoflow:512", 4


def chainer_s(model: str, gpus: int) -> float:
    """Seconds an iteration by the closed form of ChainerMNX."""
    chainer = framework("chainermnx", "bars")
    facts = facts_of(load_model(model, 1), load("v100"), seconds_per_sample=chainer.single_s(model))
    wishes = Wishes(inside=NODE, gather_after=chainer.gathers_after(model))
    name = "spatial" if gpus == NODE else "ds"
    return chainermnx(case_of(name, facts, gpus, gpus // NODE, wishes=wishes), chainer).total_s


def oracle_of(model: str) -> Oracle:
    """With a sample a node, split as the published runs were."""
    wishes = Wishes(NODE, framework("chainermnx", "bars").gathers_after(model))
    return Oracle(Question(fuse(load_model(model, 1)), load("v100"), Fraction(1, NODE), wishes=wishes))


def ours(gpus: int, oracle: Oracle) -> tuple[float, float]:
    """Seconds an iteration with overlap, and bytes of the fullest device."""
    answer = oracle.answer("spatial" if gpus == NODE else "ds", gpus)
    return answer.overlapped_s, answer.projection.phases.memory_bytes


def main() -> None:
    published: dict[str, Any] = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    oracle = oracle_of(MODEL)
    print("      layerwise.run    ChainerMNX, s an iteration    accuracy    speed-up over 4 GPUs")
    print(" GPUs       s     GB    form  ParaDL measured   form ParaDL    run   form ParaDL's run")
    scores: dict[str, list[float]] = {"form": [], "ParaDL": []}
    first: dict[str, float] = {}
    for gpus in GPUS:
        (run_s, size), form_s, key = ours(gpus, oracle), chainer_s(MODEL, gpus), str(gpus)
        projected_s, measured_s = published["projected_s"].get(key), published["measured_s"].get(key)
        cells = [f"{gpus:5} {run_s:7.3f} {size / 1e9:6.2f} {form_s:7.2f} {projected_s:7.2f}"]
        cells.append(f"{measured_s:8.2f}" if measured_s else " " * 8)
        for name, forecast_s in (("form", form_s), ("ParaDL", projected_s)):
            if measured_s:
                scores[name].append(accuracy(forecast_s, measured_s))
            cells.append(f"{scores[name][-1]:6.2f}" if measured_s else " " * 6)
        first = first or {"run": run_s, "form": form_s}
        groups = gpus / NODE
        cells += [f"{groups * first['run'] / run_s:6.1f}", f"{groups * first['form'] / form_s:6.1f}"]
        cells.append(f"{published['speed_up'][key]:11.1f}" if key in published["speed_up"] else "")
        print(" ".join(cells).rstrip())
    means = ", ".join(f"{name} {fmean(values):.2f}" for name, values in scores.items())
    print(f"accuracy on average: {means}; the paper's figure 4 says {published['claimed_accuracy']:.2f}")
    smaller = oracle_of("cosmoflow:256")
    for gpus, (measured_s, projected_s) in published["smaller"].items():
        (run_s, _), form_s = ours(int(gpus), smaller), chainer_s("cosmoflow:256", int(gpus))
        print(
            f"256³ on {gpus} GPUs: layerwise.run {run_s:.3f} s; form {form_s:.3f}, ParaDL {projected_s}, measured "
            f"{measured_s} s: accuracy {accuracy(form_s, measured_s):.2f} and {accuracy(projected_s, measured_s):.2f}"
        )


if __name__ == "__main__":
    main()
