"""What lies in the cache when a part is timed: only what a step would just have made."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from layerwise.config import Config
from layerwise.cost.model import CostModel
from layerwise.graph.builder import GraphBuilder
from layerwise.measure import bench as cold
from layerwise.measure import job as layers
from layerwise.measure.bench import Bench, Mode
from layerwise.measure.cells import wanted_cells
from layerwise.measure.timing import Stopwatch
from layerwise.ops.nn.linear import Linear
from layerwise.tensor import TensorSpec
from tests.cost import brute


@pytest.mark.parametrize(("text", "size"), [("2048K\n", 2**21), ("odd", cold.USUAL_BYTES), (None, cold.USUAL_BYTES)])
def test_the_size_of_a_cores_own_cache(tmp_path: Path, text: str | None, size: int) -> None:
    if text is not None:
        (tmp_path / "index2").mkdir()
        (tmp_path / "index2" / "size").write_text(text)
    assert cold.own_cache_bytes(tmp_path) == size


def test_forward_finds_the_inputs_and_backward_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    b = GraphBuilder("linear")
    x = b.input("x", TensorSpec((4, 6), ("n", None)))
    graph = b.finish([b.add("linear", Linear(3), [x], ["weight", "bias"])])
    (cell,) = (
        c
        for c in wanted_cells(CostModel(graph, brute.machine((1,))), {"linear": (Config(),)}).values()
        if "linear" in c.name
    )
    seen: list[str] = []

    def leave_only(recent: Sequence[Tensor] | None, device: torch.device) -> None:
        seen.append("all" if recent is None else str([tuple(x.shape) for x in recent]))

    class Told(Bench):
        def forward(self) -> None:
            seen.append("forward")
            super().forward()

        def backward(self) -> None:
            seen.append("backward")
            super().backward()

    monkeypatch.setattr(layers, "leave_only", leave_only)
    monkeypatch.setattr(layers, "Bench", Told)
    layers.timed(cell, Mode(torch.device("cpu"), torch.float32), Stopwatch(torch.device("cpu"), 0.0, least=1, warm=1))
    assert seen[:5] == ["[(4, 6)]", "forward", "[(4, 3)]", "backward", "all"]
    assert len(seen) % 5 == 0
