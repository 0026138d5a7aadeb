"""Mixed precision: the types that autocast gives, of a CPU and of CUDA, without either being there."""

from __future__ import annotations

import re
from dataclasses import replace
from unittest import mock

import pytest
import torch
from layerwise.models import names
from torch import Tensor, nn
from torch.nn import functional as F

from layerwise.graph import mixed as module
from layerwise.graph.fuse import fuse
from layerwise.graph.layer import LayerGraph
from layerwise.graph.mixed import made_by, mixed
from layerwise.graph.types import TRACED, Region
from layerwise.importers.load import load_model, network_of
from layerwise.ops.base import Op


class Model(nn.Module):
    """What autocast computes in 16 bits, what it leaves as it is, and what it brings to float32."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.ln, self.fc = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.LayerNorm(6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = F.max_pool2d(self.bn(self.conv(x)).relu(), 1)
        return y.sum(1), self.ln(y), y.softmax(1), y.exp(), self.fc(self.ln(y)), x.sin(), y + x[:, :1, 1:7, 1:7]


def graph(*, fused: bool = True) -> LayerGraph:
    torch.manual_seed(0)
    unfused = network_of(Model(), (torch.randn(2, 3, 8, 8),), 2, "test", trusted=True).graph
    return fuse(unfused) if fused else unfused


BF16, F32 = "bfloat16", "float32"
OFF = (Region(TRACED, None),)
OUTPUTS = {
    "cpu": [BF16, BF16, BF16, BF16, BF16, F32, F32],
    "cuda": [F32, F32, F32, F32, BF16, F32, F32],
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("device", OUTPUTS)
def test_types_of_a_device(device: str, fused: bool) -> None:
    plain = graph(fused=fused)
    found = mixed(plain, BF16, device)
    assert [spec.dtype for spec in found.layers[-1].specs] == OUTPUTS[device]
    assert found["conv"].out.dtype == BF16
    assert {item_bytes for layer in found.layers for _, _, item_bytes in layer.held()} == {4}
    assert (found.digest, found.dtype) == (plain.digest, F32)
    assert mixed(found, BF16, device) is found


@pytest.mark.parametrize("device", OUTPUTS)
def test_what_is_known_without_torch_is_what_the_kernels_say(device: str) -> None:
    """Of every kind of operator of the built-in networks, on inputs of either type."""
    graphs = [load_model(name, 2) for name in names()]
    stages = [(stage.op, stage.specs) for g in graphs for layer in g.inner for stage in layer.stages]
    kinds = {(re.sub(r"\d+", "", repr(op)), len(specs[0].shape)): (op, specs) for op, specs in stages}
    known = set[type[Op]]()
    for op, specs in kinds.values():
        for autocast in ("bfloat16", "float16"):
            for dtype in (F32, autocast):
                given = tuple(replace(spec, dtype=dtype) for spec in specs)
                answer = module._known(op, given, F32, autocast, device)
                if answer is not None:
                    known.add(type(op))
                    with mock.patch.object(module, "_known", return_value=None):
                        asked = made_by.__wrapped__(op, given, F32, autocast, device)
                    assert answer == asked, (op, given, autocast)
    assert len(known) == (10 if device == "cuda" else 8)


def test_types_stay_at_another_batch_and_in_float64() -> None:
    plain = graph()
    assert [s.dtype for s in mixed(plain, BF16, "cuda").rebatch(6).layers[-1].specs] == OUTPUTS["cuda"]
    assert {s.dtype for s in mixed(plain, BF16, "cpu", "float64").layers[-1].specs} == {
        F32
    }  # autocast casts no float64


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_the_model_exempts_has_the_types_of_before(device: str) -> None:
    """Also where it is called within autocast."""
    plain = graph()
    products = [layer for layer in mixed(plain, BF16, device).layers if layer.types and layer.out.dtype == BF16]
    first = next(layer for layer in products if all(spec.dtype == F32 for spec in layer.specs))
    with torch.autocast("cpu", torch.bfloat16):
        layers = tuple(replace(one, autocast=OFF) if one.name == first.name else one for one in plain.layers)
        found = mixed(replace(plain, layers=layers), BF16, device)
    assert found[first.name].out.dtype == F32
