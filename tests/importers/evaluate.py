"""Runs a LayerGraph on one device, layer by layer, by its operators' kernels: what the importers say a model computes.

Against the model itself, or what ONNX says of it, that tests the importers and the kernels at once.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from layerwise.geometry import Box
from layerwise.graph.layer import Layer
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.registry import Operand
from layerwise.importers.torch.exported import read_program
from layerwise.importers.torch.patterns import rewrite
from layerwise.importers.torch.program import _Importer
from layerwise.ops.base import Role
from layerwise.ops.fused import local_stages, needed_box, run_stages
from layerwise.ops.random import combine


def evaluate(
    graph: LayerGraph,
    inputs: Mapping[str, Tensor],
    stored: Mapping[str, Tensor],
    *,
    training: bool = True,
    typed: bool = False,
) -> list[Tensor]:
    """The tensors that go into the sink. stored: parameters, buffers and constants by name; typed: types must fit."""
    values: dict[str, Tensor] = {}
    for number, layer in enumerate(graph.layers):
        if layer.role is Role.SINK:
            return [values[name] for name in layer.inputs]
        if layer.role is Role.INPUT:
            out = inputs[layer.name]
        elif layer.role in (Role.TIED, Role.CONSTANT):
            out = stored[layer.name if layer.name in stored else layer.name.partition(":")[0]]
        else:
            out = _computed(layer, number, [values[name] for name in layer.inputs], stored, training)
        assert tuple(out.shape) == layer.out.shape, f"{layer.name}: {tuple(out.shape)} for {layer.out.shape}"
        assert not typed or layer.role is Role.INPUT or str(out.dtype) == f"torch.{layer.out.dtype}", layer.name
        values[layer.name] = out
    raise AssertionError("a graph ends with its sink")


def _computed(layer: Layer, number: int, inputs: list[Tensor], stored: Mapping[str, Tensor], training: bool) -> Tensor:
    count, where = len(layer.specs), layer.space
    edges = dict(zip(layer.tied, inputs[count:], strict=True))
    parameters = [
        (edges[i] if i in edges else stored[name].clone()).reshape(p.shape)  # cloned: statistics are written to
        for i, (p, name) in enumerate(zip(where.parameters, layer.parameters, strict=True))
    ]
    cell = Box((0,) * len(where.dims), tuple(dim.extent for dim in where.dims))
    stages = local_stages(layer.stages, layer.specs, cell, cell)
    needs = (needed_box(maps, cell) for maps in where.needs)
    given = [x[box.slices()] for x, box in zip(inputs, needs, strict=False)]
    return run_stages(
        stages, given, parameters, training=training, seed=lambda stage: combine(0, number, stage), reduce=None
    )


def imported(
    model: torch.nn.Module, inputs: tuple[Tensor, ...], kwargs: Mapping[str, Tensor] | None = None, times: int = 2
) -> LayerGraph:
    """The model's graph, after checking that it computes what the model does, also with `times` as many samples."""
    program = rewrite(read_program(torch.export.export(model, inputs, dict(kwargs or {})), "model"))
    importer = _Importer(program, "model")
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
