"""onnx's shape inference of a model: a check of ours. For user-defined operators, what the file says."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path

import onnx
import onnx.shape_inference
from onnx import AttributeProto, ModelProto, TensorProto, ValueInfoProto

from layerwise.errors import LayerwiseError
from layerwise.importers.onnx.file import array_of, first_line, standard

SMALL = 4096  # elements; what shapes are computed from has far fewer
NEWEST_IR_WITHOUT_INPUTS = 4  # since then, initializers need not be inputs as well


def inferred(model: ModelProto, folder: Path, sizes: Mapping[str, int]) -> dict[str, ValueInfoProto]:
    """Types and shapes of all tensors, the batch as the model has it. Weights are not copied, and not read."""
    graph = model.graph
    bare = ModelProto(ir_version=max(model.ir_version, NEWEST_IR_WITHOUT_INPUTS), opset_import=model.opset_import)
    bare.graph.name = graph.name or "graph"
    bare.graph.node.extend(graph.node)
    for node in bare.graph.node:
        for branch in (attribute.g for attribute in node.attribute if attribute.type == AttributeProto.GRAPH):
            outputs = [_unshaped(info) for info in branch.output]
            del branch.output[:], branch.value_info[:]
            branch.output.extend(outputs)
    stored = {tensor.name for tensor in graph.initializer}
    bare.graph.input.extend(info for info in graph.input if info.name not in stored)
    for info in bare.graph.input:
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param in sizes:
                dim.dim_value = sizes[dim.dim_param]
            elif dim.dim_value < 0:
                dim.Clear()
    for tensor in graph.initializer:
        if prod(tensor.dims) > SMALL:
            bare.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        elif tensor.data_location == TensorProto.EXTERNAL:
            bare.graph.initializer.append(onnx.numpy_helper.from_array(array_of(tensor, folder), tensor.name))
        else:
            bare.graph.initializer.append(tensor)
    for info in graph.output:
        bare.graph.output.append(_unshaped(info))
    # What the file says of other tensors may be stale (the batch was changed); only user-defined operators need it.
    foreign = {name for node in graph.node if not standard(node.domain) for name in node.output}
    bare.graph.value_info.extend(info for info in graph.value_info if info.name in foreign)
    try:
        # Without data_prop, which would compute constants of whatever size the file asks for.
        result = onnx.shape_inference.infer_shapes(bare, check_type=True, strict_mode=True)
    except (onnx.shape_inference.InferenceError, ValueError, RuntimeError) as error:
        raise LayerwiseError(f"the shapes or types of the model do not fit: {first_line(error)}") from None
    return {info.name: info for info in (*result.graph.value_info, *result.graph.output)}


def extents(info: ValueInfoProto | None) -> tuple[int | None, ...] | None:
    """The shape of a tensor, None where it is not known."""
    if info is None or not info.type.tensor_type.HasField("shape"):
        return None
    return tuple(
        dim.dim_value if dim.WhichOneof("value") == "dim_value" else None for dim in info.type.tensor_type.shape.dim
    )


def _unshaped(info: ValueInfoProto) -> ValueInfoProto:
    copy = ValueInfoProto()
    copy.CopyFrom(info)
    if copy.type.WhichOneof("value") == "tensor_type":
        copy.type.tensor_type.ClearField("shape")
    return copy
