"""A node of an ONNX graph as a Call: inputs and attributes bound by the names of the operator's schema."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import AttributeProto, NodeProto

from layerwise.errors import LayerwiseError
from layerwise.importers.onnx.file import standard
from layerwise.importers.registry import Argument, Operand
from layerwise.tensor import TensorSpec

Schema = onnx.defs.OpSchema


def schema_of(node: NodeProto, opset: int) -> Schema | None:
    """The schema of an operator in a version; None of operators that are not ONNX's own."""
    if not standard(node.domain):
        return None
    try:
        return onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return None


def bind(node: NodeProto, schema: Schema | None, argument: Callable[[str], Argument]) -> dict[str, Argument]:
    """All arguments; `argument` finds a tensor."""
    bound: dict[str, Argument] = {}
    values = [argument(name) if name else None for name in node.input]
    if schema is None:
        bound.update((str(i), value) for i, value in enumerate(values))
    else:
        for i, formal in enumerate(schema.inputs):
            if formal.option == Schema.FormalParameterOption.Variadic:
                bound[formal.name] = tuple(values[i:])
            else:
                bound[formal.name] = values[i] if i < len(values) else None
        for name, declared in schema.attributes.items():
            default = declared.default_value
            bound.setdefault(name, None if default.type == AttributeProto.UNDEFINED else attribute(default))
    for given in node.attribute:
        bound[given.name] = attribute(given)
    if node.op_type == "Split" and bound.get("num_outputs") is None:
        bound["num_outputs"] = len(node.output)
    return bound


def attribute(given: AttributeProto) -> Argument:
    """The value of an attribute."""
    if given.ref_attr_name:
        raise LayerwiseError(f"attribute {given.name!r} refers to {given.ref_attr_name!r} outside of a function")
    value = onnx.helper.get_attribute_value(given)
    if isinstance(value, onnx.TensorProto):
        array = onnx.numpy_helper.to_array(value)
        return Operand("constant", value.name, TensorSpec(array.shape, (None,) * array.ndim, array.dtype.name), array)
    return _plain(value, given.name)


def _plain(value: object, name: str) -> Argument:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, float):
        return shortest(value)
    if isinstance(value, (int, str)):
        return value
    try:
        return tuple(_plain(item, name) for item in value)  # type: ignore[attr-defined]
    except TypeError:
        raise LayerwiseError(f"attribute {name!r} is a {type(value).__name__}, which is not supported") from None


def shortest(value: float) -> float:
    """The number that somebody wrote: 1e-05 is stored as a float32, 9.999999747378752e-06."""
    return float(str(np.float32(value))) if np.isfinite(value) else value
