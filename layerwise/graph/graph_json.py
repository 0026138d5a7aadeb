"""A LayerGraph as JSON: the stored graphs of the built-in networks (`models/graphs`), a line for each layer.

Only what cannot be inferred is written: shapes follow from the inputs', and defaults are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields

from layerwise.errors import LayerwiseError
from layerwise.files import parse_json
from layerwise.graph.layer import Layer
from layerwise.graph.layer_graph import LayerGraph
from layerwise.ops.base import Op
from layerwise.ops.ends import Input, Sink
from layerwise.ops.nn.conv import Conv, ConvTranspose
from layerwise.ops.nn.linear import Linear
from layerwise.ops.nn.norm import BatchNorm, LocalResponseNorm
from layerwise.ops.nn.pool import AdaptivePool, Pool
from layerwise.ops.tensor.along import Concat
from layerwise.ops.tensor.pointwise import Binary, Dropout, Unary
from layerwise.ops.tensor.view import Reshape, Slice
from layerwise.tensor import TensorSpec

OPERATORS = {
    op.kind: op
    for op in (
        AdaptivePool, BatchNorm, Binary, Concat, Conv, ConvTranspose, Dropout, Input, Linear, LocalResponseNorm, Pool,
        Reshape, Sink, Slice, Unary,
    )
}  # fmt: skip
NAMES = ("inputs", "parameters", "frozen")  # of a layer


def write(graph: LayerGraph) -> str:
    """Returns the text. Raises LayerwiseError if `read` could not restore the graph: other operators or types."""
    rows = [json.dumps(_layer(layer), separators=(",", ":")) for layer in graph.layers]
    text = "\n".join(['{"name":' + json.dumps(graph.name) + ',"layers":[', ",\n".join(rows), "]}", ""])
    if read(text, graph.name) != graph:
        raise LayerwiseError(f"the graph of {graph.name!r} contains more than layers, operators and parameters")
    return text


def read(text: str, where: str) -> LayerGraph:
    """Returns the graph from `write`'s text; `where` names the text in errors."""
    value = parse_json(text, where)
    try:
        done: dict[str, Layer] = {}
        for row in value["layers"]:
            inputs, parameters, frozen = (tuple(row.get(names, ())) for names in NAMES)
            tied = tuple(row.get("tied", ()))
            specs = tuple(done[name].out for name in inputs[: len(inputs) - len(tied)])
            done[row["name"]] = Layer(row["name"], _operator(row["op"]), inputs, specs, parameters, tied, frozen=frozen)
        return LayerGraph(tuple(done.values()), value["name"])
    except (AttributeError, AssertionError, IndexError, KeyError, TypeError) as error:
        raise LayerwiseError(f"{where} is not a graph of layers ({type(error).__name__}: {error})") from None


def _layer(layer: Layer) -> dict[str, object]:
    if layer.op.kind not in OPERATORS:
        raise LayerwiseError(f"layer {layer.name!r}: {layer.op.kind} cannot be written as JSON: add it to OPERATORS")
    named = {name: value for name in (*NAMES, "tied") if (value := getattr(layer, name))}
    return {"name": layer.name, "op": {"kind": layer.op.kind, **dict(_attributes(layer.op))}, **named}


def _attributes(described: Op | TensorSpec) -> Iterator[tuple[str, object]]:
    """Attributes that are not the default."""
    for field in fields(described):  # type: ignore[arg-type]  # every operator is a dataclass
        value = getattr(described, field.name)
        if field.default is MISSING or value != field.default:
            yield field.name, dict(_attributes(value)) if isinstance(value, TensorSpec) else value


def _operator(row: Mapping[str, object]) -> Op:
    attributes = {name: _plain(value) for name, value in row.items() if name != "kind"}
    return OPERATORS[str(row["kind"])](**attributes)  # type: ignore[arg-type]


def _plain(value: object) -> object:
    """Lists become tuples, objects TensorSpecs."""
    if isinstance(value, Mapping):
        return TensorSpec(**{name: _plain(member) for name, member in value.items()})  # type: ignore[arg-type]
    return tuple(map(_plain, value)) if isinstance(value, list) else value
