"""The ONNX importer's table: a row for each operator; "Name-since" for an older form with another meaning.

https://onnx.ai/onnx/operators/. The rows are in their families' files: layers, norms, recurrent, shapes, index,
pointwise.
"""

from __future__ import annotations

from layerwise.importers.onnx.ops.index import INDEXING
from layerwise.importers.onnx.ops.layers import LAYERS
from layerwise.importers.onnx.ops.norms import NORMS
from layerwise.importers.onnx.ops.pointwise import POINTWISE
from layerwise.importers.onnx.ops.recurrent import RECURRENT
from layerwise.importers.onnx.ops.shapes import SHAPES
from layerwise.importers.registry import Build, Table, lookup

TABLE: Table = {**LAYERS, **NORMS, **SHAPES, **INDEXING, **RECURRENT, **POINTWISE}


def row(domain: str, op_type: str, since: int = 0) -> Build | None:
    """The row that builds an operator's layer, in its form at that opset; a user's own row has priority."""
    if (own := lookup(f"{domain or 'ai.onnx'}::{op_type}")) is not None:
        return own
    if domain not in ("", "ai.onnx"):
        return None
    return TABLE.get(f"{op_type}-{since}", TABLE.get(op_type))
