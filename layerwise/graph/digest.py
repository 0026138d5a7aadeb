"""The digest of a graph, by which a plan identifies the graph that it was made for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

from layerwise.ops.base import Op
from layerwise.tensor import TensorSpec

if TYPE_CHECKING:
    from layerwise.graph.layer import Layer


def digest_of(layers: Iterable[Layer]) -> str:
    """SHA-256 of everything that a plan depends on: names, operators, shapes, edges."""
    rows = [
        {
            "name": layer.name,
            "op": layer.op.rows(),
            "inputs": layer.inputs,
            "parameters": layer.parameters,
            "followers": layer.epilogue,
            "shape": layer.out.shape,
            "dims": layer.out.dims,
            "dtype": layer.all_types.plain[-1],
        }
        | ({"frozen": layer.frozen} if layer.frozen else {})
        | ({"autocast": layer.autocast} if layer.autocast else {})
        for layer in layers
    ]
    return hashlib.sha256(json.dumps(rows, sort_keys=True, default=_values).encode()).hexdigest()


def _values(value: object) -> object:
    if isinstance(value, Op):
        return value.rows()
    if isinstance(value, TensorSpec):
        return [value.shape, value.dims, value.dtype, value.units]
    return str(value)
