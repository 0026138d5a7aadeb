"""A node of an ONNX graph as a Call, bound by the operator's schema; accessors that hide the opset's differences.

Some attributes of old opsets are constant inputs in new ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import AttributeProto, NodeProto

from layerwise.errors import LayerwiseError
from layerwise.importers.onnx.file import standard
from layerwise.importers.registry import Argument, Call, Operand
from layerwise.tensor import TensorSpec

Schema = onnx.defs.OpSchema


def schema_of(node: NodeProto, opset: int) -> Schema | None:
    """The schema of an operator at an opset; None for operators that are not ONNX's own."""
    if not standard(node.domain):
        return None
    try:
        return onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return None


def bind(node: NodeProto, schema: Schema | None, argument: Callable[[str], Argument]) -> dict[str, Argument]:
    """A node's arguments; `argument` looks up a tensor by name."""
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
        raise LayerwiseError(f"attribute {given.name!r} refers to {given.ref_attr_name!r} outside a function")
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
    """The number that the author wrote: 1e-05 is stored as a float32, 9.999999747378752e-06."""
    return float(str(np.float32(value))) if np.isfinite(value) else value


def element_type(code: int) -> str:
    """The name that TensorSpec uses for an ONNX element type."""
    return str(np.dtype(onnx.helper.tensor_dtype_to_np_dtype(code)).name)


def known(call: Call, name: str) -> NDArray[np.generic] | None:
    """The values of an attribute or a constant input; None if it is missing."""
    value = call.get(name)
    if value is None:
        return None
    if isinstance(value, Operand):
        if value.value is None:
            raise LayerwiseError(
                f"{call.target}: {name!r} is computed from the input, but layerwise needs fixed shapes"
            )
        return value.value
    return np.asarray(value)


def integers(call: Call, name: str) -> tuple[int, ...] | None:
    """A list of integers such as axes, sizes or pads."""
    values = known(call, name)
    return None if values is None else tuple(int(v) for v in values.ravel())


def numbers(call: Call, name: str) -> tuple[float, ...] | None:
    """A list of numbers such as scales, ratios or bounds."""
    values = known(call, name)
    return None if values is None else tuple(float(v) for v in values.ravel())


def number(call: Call, name: str, default: float) -> float:
    """A number."""
    values = numbers(call, name)
    return values[0] if values else default


def text(call: Call, name: str, default: str = "") -> str:
    """A string attribute."""
    value = call.get(name, default)
    return value if isinstance(value, str) else default


def weights(call: Call, name: str) -> Operand:
    """An input that must be a parameter or constant."""
    operand = call.operand(name)
    if operand.activation:
        raise LayerwiseError(
            f"{call.target}: {name!r} is computed from the input, but only stored weights are supported"
        )
    return operand


def optional(call: Call, *names: str) -> tuple[Operand, ...]:
    """The stored weights that are present, of these optional ones."""
    return tuple(weights(call, name) for name in names if call.get(name) is not None)


def recast(x: Operand, shape: tuple[int, ...]) -> Operand:
    """A stored weight read in another shape: the same elements in the same order."""
    if x.shape == shape:
        return x
    if prod(x.shape) != prod(shape):
        raise LayerwiseError(f"{x.name!r} of shape {x.shape} cannot be read as {shape}")
    value = None if x.value is None else x.value.reshape(shape)
    return replace(x, spec=TensorSpec(shape, (None,) * len(shape), x.spec.dtype), value=value)


def axis(call: Call, rank: int, name: str = "axis") -> int:
    """A dimension, counted from the front."""
    value = call.integer(name)
    if not -rank <= value < rank:
        raise LayerwiseError(f"{call.target}: axis {value} is out of range for {rank} dimensions")
    return value % rank


def axes(call: Call, rank: int, name: str = "axes") -> tuple[int, ...] | None:
    """Dimensions, counted from the front."""
    values = integers(call, name)
    if values is None:
        return None
    if any(not -rank <= v < rank for v in values):
        raise LayerwiseError(f"{call.target}: axes {values} do not fit {rank} dimensions")
    return tuple(v % rank for v in values)
