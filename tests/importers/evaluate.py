"""Runs a LayerGraph layer by layer, by the operators' own kernels (which `tests/ops` holds to PyTorch's, bit for bit):
what the importers say a model computes must be what it computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from layerwise.geometry import Box
from layerwise.graph.layer import Layer, LayerGraph
from layerwise.importers.registry import Operand
from layerwise.importers.torch.build import _Importer
from layerwise.importers.torch.exported import read_program
from layerwise.importers.torch.patterns import rewrite
from layerwise.ops.base import Op, Role
from layerwise.ops.stages import local_stages, needed_box, run_stages
from layerwise.tensor import TensorSpec
from tests.ops.whole import whole


def evaluate(graph: LayerGraph, inputs: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> list[Tensor]:
    """The tensors that go into the sink. `stored`: parameters, buffers and constants by name."""
    values: dict[str, Tensor] = {}
    for layer in graph.layers:
        if layer.role is Role.SINK:
            return [values[name] for name in layer.inputs]
        if layer.role is Role.INPUT:
            out = inputs[layer.name]
        elif layer.role in (Role.TIED, Role.CONSTANT):
            out = stored[layer.name.partition(":")[0]]
        else:
            given = [values[name] for name in layer.inputs[: len(layer.specs)]]
            out = _run(layer, given, _parameters(layer, values, stored))
        assert tuple(out.shape) == layer.out.shape, f"{layer.name}: {tuple(out.shape)} for {layer.out.shape}"
        values[layer.name] = out
    raise AssertionError("a graph ends with its sink")


def _parameters(layer: Layer, values: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> list[Tensor]:
    edges = dict(zip(layer.tied, layer.inputs[len(layer.specs) :], strict=True))
    pairs = enumerate(zip(layer.space.parameters, layer.parameters, strict=True))
    return [(values[edges[i]] if i in edges else stored[name]).reshape(p.shape) for i, (p, name) in pairs]


def _run(layer: Layer, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    cell = Box((0,) * len(layer.space.dims), tuple(dim.extent for dim in layer.space.dims))
    owned = Box((0,) * len(layer.out.shape), layer.out.shape)
    stages = local_stages(layer.stages, layer.specs, cell, owned)
    needed = [x[needed_box(maps, cell).slices()] for x, maps in zip(inputs, layer.space.needs, strict=True)]
    return run_stages(stages, needed, parameters, training=True, seed=lambda _: 0, reduce=None)


def run(op: Op, inputs: list[Tensor], p: dict[str, Tensor]) -> Tensor:
    """One operator, in evaluation."""
    specs = [TensorSpec(tuple(t.shape), (None,) * t.dim(), str(t.dtype).removeprefix("torch.")) for t in inputs]
    local = whole(op, specs, training=False)
    return op.run(local, [x[box.slices()] for x, box in zip(inputs, local.needs, strict=True)], p)


def imported(
    model: torch.nn.Module, inputs: tuple[Tensor, ...], kwargs: Mapping[str, Tensor] | None = None, times: int = 2
) -> LayerGraph:
    """The model's graph, after checking that it computes what the model does, also with `times` as many samples."""
    program = rewrite(read_program(torch.export.export(model, inputs, dict(kwargs or {})), "model"))
    importer = _Importer(program, "model", None)
    graph = importer.graph()
    stored: dict[str, Tensor] = {s.target: t for s in program.sources if (t := s.read()) is not None}
    for value in (*importer.values.values(), *importer.placer.standing.values()):
        if isinstance(value, Operand) and value.role == "constant" and value.value is not None:
            stored[value.name] = torch.tensor(value.value)
            stored[f"{value.name}.not"] = torch.tensor(np.logical_not(value.value))
    names = [s.target for s in program.sources if s.kind == "input"]
    given = [*inputs, *(kwargs or {}).values()]
    for count, samples in ((1, graph), (times, graph.rebatch(times * graph.batch))):
        fed = [torch.cat([t] * count) for t in given]  # every input has samples, in these tests
        repeated = {
            layer.name: torch.cat([stored[layer.name]] * count)
            for layer in samples.layers
            if layer.role is Role.CONSTANT and layer.out.index("n") == 0
        }
        got = evaluate(samples, dict(zip(names, fed, strict=True)), stored | repeated)
        torch.manual_seed(0)
        wanted = tree_leaves(model(*fed[: len(inputs)], **dict(zip(kwargs or {}, fed[len(inputs) :], strict=True))))
        assert len(got) == len(wanted)
        for ours, theirs in zip(got, wanted, strict=True):
            ours = ours.mean() if theirs.dim() == 0 and ours.dim() == 1 else ours  # a loss: one number a sample
            torch.testing.assert_close(ours, theirs, check_dtype=False)
    return graph
