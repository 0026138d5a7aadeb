"""Runs an imported ONNX graph: what layerwise says that it computes must be what ONNX says; and makes small models."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.onnx.from_onnx import import_onnx
from layerwise.importers.torch.unfused import UnfusedLayers
from layerwise.ops.base import Role

Array = NDArray[np.generic]


def compute(graph: LayerGraph, inputs: Sequence[Array], weights: Mapping[str, Array]) -> list[Array]:
    """The outputs of the graph, as a model gives them in inference: running statistics, no dropout."""
    names = [layer.name for layer in graph.layers if layer.role is Role.INPUT]
    fed = {name: torch.tensor(x) for name, x in zip(names, inputs, strict=False)}
    stored = {name: torch.tensor(value) for name, value in weights.items()}
    made = UnfusedLayers(graph, stored, training=False).run(fed)
    assert all(str(x.dtype) == f"torch.{graph[name].out.dtype}" for name, x in made.items() if name not in names)
    return [made[name].numpy() for name in graph.layers[-1].inputs]


def weights_of(path: Path) -> dict[str, Array]:
    """The values of a file's parameters and constants, by their names in the graph."""
    return {name: value.read() for name, value in import_onnx(path).values.items()}


# ---- small models


def tensor(name: str, array: Array | Sequence[float] | Sequence[int] | float) -> onnx.TensorProto:
    """An initializer; Python integers are int64, other numbers float32."""
    values = np.asarray(array)
    if not isinstance(array, (np.ndarray, np.generic)):
        values = values.astype(np.int64 if values.dtype.kind == "i" else np.float32)
    return numpy_helper.from_array(values, name)


def random(name: str, *shape: int, seed: int = 0) -> onnx.TensorProto:
    """An initializer that looks learned."""
    generator = np.random.default_rng([seed, *name.encode()])
    return tensor(name, generator.standard_normal(shape).astype(np.float32))


def info(
    name: str, shape: Sequence[int | str | None] | None, dtype: int = onnx.TensorProto.FLOAT
) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def write(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto] | Sequence[int | str | None],
    initializers: Sequence[onnx.TensorProto] = (),
    *,
    opset: int = 17,
    outputs: Sequence[str] = (),
    domains: Sequence[str] = (),
    value_info: Sequence[onnx.ValueInfoProto] = (),
    ir: int = 8,
    dtype: int = onnx.TensorProto.FLOAT,
) -> Path:
    """Writes a model. `inputs`: the shape of the only one, x. `outputs`: the last node's, by default, of `dtype`."""
    given = [i for i in inputs if isinstance(i, onnx.ValueInfoProto)] or [info("x", inputs)]  # type: ignore[arg-type]
    names = outputs or [o for o in nodes[-1].output if o]
    undecided = [info(name, ["?"], dtype) for name in names]
    for out in undecided:
        out.type.tensor_type.shape.Clear()  # a scalar, to the checker; inference of ours ignores it
    graph = helper.make_graph(list(nodes), "g", given, undecided, list(initializers), value_info=list(value_info))
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=ir), path)
    return path


def node(op: str, *inputs: str, out: str | Sequence[str] = "y", **attributes: object) -> onnx.NodeProto:
    return helper.make_node(op, list(inputs), [out] if isinstance(out, str) else list(out), **attributes)
