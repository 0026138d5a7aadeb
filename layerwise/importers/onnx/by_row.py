"""Nodes of an ONNX model that work row by row, and reshapes that merge a tensor to rows and split it again."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from onnx import NodeProto

from layerwise.importers.onnx.constants import FoldedConstant
from layerwise.importers.registry import Built, Operand, Result
from layerwise.importers.rows import Rows
from layerwise.ops.tensor.view import Reshape

# Each element depends on one element, or each row on one row if the other operands are stored.
ELEMENTWISE = frozenset({
    "Abs", "Cast", "Clip", "Dropout", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "Identity", "LeakyRelu",
    "Log", "Mish", "Neg", "Relu", "Selu", "Sigmoid", "Softplus", "Sqrt", "Swish", "Tanh",
})  # fmt: skip
WITH_STORED = frozenset({"Add", "Div", "Mul", "Pow", "Sub"})


def merged_rows(result: Result) -> tuple[int, ...] | None:
    """The tensor's shape before, if a reshape merges the leading dimensions of a sequence to rows."""
    if not isinstance(result, Built) or not isinstance(result.op, Reshape) or len(result.op.shape) != 2:
        return None
    (x,) = result.inputs
    if not isinstance(x, Operand) or not x.activation:
        return None
    rows, columns = result.op.shape
    kept = max((k for k in range(1, len(x.shape)) if prod(x.shape[:k]) == rows), default=0)
    # A batch of 1 may have lost its label by now: any dimension of size 1 may be the samples.
    lost = "n" not in x.spec.dims
    several = sum(e > 1 or label == "n" or lost for e, label in zip(x.shape[:kept], x.spec.dims, strict=False))
    return (*x.shape[:kept], columns) if several > 1 else None


def takes_rows(node: NodeProto, values: Sequence[FoldedConstant | Operand | Rows | None]) -> bool:
    """True if a node treats all rows of its first input alike (only that input consists of rows)."""
    first, *others = values
    stored = all(v is None or isinstance(v, FoldedConstant) for v in others)
    if node.op_type in WITH_STORED and isinstance(first, FoldedConstant) and len(values) == 2:
        first, stored, others = values[1], True, [first]
    if not isinstance(first, Rows) or not stored:
        return False
    width = first.shape[1]
    if node.op_type in ELEMENTWISE:
        return True
    if node.op_type in WITH_STORED:
        rows = ((), (1,), (width,), (1, 1), (1, width))
        return all(isinstance(v, FoldedConstant) and v.shape in rows for v in others)
    if node.op_type == "MatMul":
        return isinstance(others[0], FoldedConstant) and len(others[0].shape) == 2
    if node.op_type == "Gemm":
        turned = any(a.name == "transA" and a.i for a in node.attribute)
        return not turned and all(isinstance(v, FoldedConstant) and len(v.shape) <= 1 for v in others[1:])
    return False


def split_again(result: Result, rows: Rows, merged: Operand | None) -> tuple[int, ...] | None:
    """The shape to which a reshape splits rows again; None if it does not.

    merged: the rows as the model sees them. A reshape that follows a gather of some rows is not one of these.
    """
    if not isinstance(result, Built) or not isinstance(result.op, Reshape) or result.inputs != (merged,):
        return None
    lead = rows.whole.shape[:-1]
    return result.op.shape if result.op.shape[: len(lead)] == lead else None
