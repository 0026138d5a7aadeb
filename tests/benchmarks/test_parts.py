"""Predicted beside measured seconds of a step's parts."""

import pytest
import torch
from torch import nn

from benchmarks.ranks.parts import PARTS, parts_of, together
from layerwise.graph.fuse import fuse
from layerwise.importers.load import load_network
from layerwise.run.load import load
from layerwise.run.parallel import of
from layerwise.trace import Trace
from tests.comm.thread import ThreadComm, run_threads
from tests.run.plans import optimised_plan


def test_what_ranks_do_together_begins_when_the_last_has_come() -> None:
    ranks = {0: [(0.0, 5.0), (10.0, 15.0)], 2: [(3.0, 5.5), (14.0, 16.0)]}
    assert together(ranks, alone=False) == {"measured_s": (2.5 + 2.0) / 2, "waiting_s": (3.0 + 4.0) / 2}
    assert together(ranks, alone=True) == {"measured_s": 5.0}


def test_every_rank_gets_every_part_that_the_plan_predicts() -> None:
    network = load_network("lenet5", 16, None)
    plan = optimised_plan(fuse(network.graph), 2)

    def train(comm: ThreadComm) -> dict[str, object]:
        module = load(plan, network, comm=comm)
        trace = of(module).trace = Trace()
        y = torch.randint(0, 10, (16,))
        x = torch.randn(16, *network.graph.layers[0].out.shape[1:])
        share = module.share(16)
        for _ in range(4):
            nn.functional.cross_entropy(module(x[share]), y[share]).backward()
        return parts_of(trace, module, [1.0, 1.0, 0.4, 0.2], comm)

    first, second = run_threads(2, train)
    assert first == second
    assert first["step"] == {"predicted_s": plan.predicted["timeline_s"], "measured_s": pytest.approx(0.3)}
    totals = first["totals"]
    assert isinstance(totals, dict)
    planned = {part: [times[part] for times in plan.predicted_layers.values() if part in times] for part in PARTS}
    for part, seconds in planned.items():
        assert (part in totals) == bool(seconds)
        if seconds:
            assert totals[part]["predicted_s"] == pytest.approx(sum(seconds))
            assert totals[part]["measured_s"] > 0
