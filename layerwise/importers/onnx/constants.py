"""Constants of an ONNX model: initializers, and what nodes compute from them and from the shapes of activations.

Weights stay where they are (a `Constant` reads them when asked for values); only arithmetic on constants is computed
on import, by numpy or by onnx's reference implementation, and only by operators that are known to be harmless.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import ceil, prod

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto
from onnx.reference import ReferenceEvaluator

from layerwise.errors import LayerwiseError
from layerwise.importers.onnx.file import first_line

Array = NDArray[np.generic]

FOLD_BYTES = 2**30  # the largest constant that is computed; a file can ask for any size
GROWTH = 16  # bytes of computed constants for each byte of the file, beside FOLD_BYTES: weights in 8 bits become floats
NEVER = 1e4  # masks add this or more (float16's lowest, float32's lowest, -inf) to what must not be attended to

# Renaming positions: values are read only when they are needed, so the weights of a large model are not.
VIEWS = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
# Each output element from those at its place; operands broadcast.
ELEMENTWISE = frozenset({
    "Abs", "Add", "And", "Cast", "Ceil", "Clip", "Cos", "Div", "Equal", "Erf", "Exp", "Floor", "Greater",
    "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "Log", "Max", "Mean", "Min", "Mod", "Mul", "Neg", "Not",
    "Or", "Pow", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sin", "Softplus", "Sqrt", "Sub", "Sum", "Tanh",
    "Where", "Xor",
})  # fmt: skip
OTHERS = frozenset({
    "ArgMax", "ArgMin", "CastLike", "Concat", "Constant", "ConstantOfShape", "CumSum", "Expand", "EyeLike", "Gather",
    "GatherElements", "GatherND", "MatMul", "NonZero", "OneHot", "Pad", "Range", "ReduceL1", "ReduceL2", "ReduceMax",
    "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare", "ScatterElements", "ScatterND", "Size",
    "Slice", "Softmax", "Split", "Tile", "Trilu",
})  # fmt: skip
FOLDABLE = VIEWS | ELEMENTWISE | OTHERS
PARTS = frozenset({"Gather", "Slice", "Split"})  # of learned values, they are learned values


@dataclass(frozen=True, eq=False)
class FoldedConstant:
    """A tensor that does not depend on the model's inputs' values."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    read: Callable[[], Array] = field(repr=False)
    root: str = ""  # the initializer that it is a view of
    weight: bool = False  # learned, as far as the file tells: floating point, several, neither computed nor infinite
    literal: bool = True  # does not depend on the inputs' shapes either
    transposed: bool = False  # this is the transpose of the matrix `name`
    ready: bool = False  # the values are at hand: nothing large is read for them

    @cached_property
    def value(self) -> Array:
        """The values. Treat as read-only: they may be mapped or broadcast."""
        return self.read()

    @property
    def small(self) -> bool:
        """True if reading it costs nothing worth mentioning."""
        return prod(self.shape) <= 65536


class FoldingBudget:
    """The memory that all constants of one file may take which it does not store: it can ask for any number of them."""

    def __init__(self, stored_bytes: int) -> None:
        self.most = self.left = FOLD_BYTES + GROWTH * stored_bytes

    def check(self, name: str, needed: int) -> None:
        """LayerwiseError where that is no more to be had."""
        if needed > self.left:
            raise LayerwiseError(
                f"the constants that the model computes, up to {name!r}, take more than {self.most >> 20:,} MiB in "
                "all; make their results initializers"
            )

    def take(self, name: str, needed: int) -> None:
        """Counts what has been made."""
        self.check(name, needed)
        self.left -= needed

    def value(self, c: FoldedConstant) -> Array:
        """Its values, which count once."""
        if "value" not in vars(c):
            self.take(c.name, prod(c.shape) * c.dtype.itemsize)
        return c.value


def constant(name: str, array: Array, *, literal: bool = True) -> FoldedConstant:
    """A constant whose values are at hand."""
    made = FoldedConstant(name, array.shape, array.dtype, lambda: array, name, literal=literal, ready=True)
    vars(made)["value"] = array
    return made


def learned(c: FoldedConstant) -> FoldedConstant:
    """The constant of an initializer, marked as weight where it looks like one."""
    weight = "float" in c.dtype.name and prod(c.shape) > 1
    square = len(c.shape) > 1 and c.shape[-1] == c.shape[-2] and prod(c.shape) == c.shape[-1] ** 2
    if weight and (c.small or (square and c.shape[-1] <= 4096)):
        weight = bool((np.abs(thin(c.value).astype(np.float64)) < NEVER).all())  # an attention mask is not learned
    return replace(c, weight=weight, root=c.name)


def fold(
    node: NodeProto, inputs: Sequence[FoldedConstant | None], opset: int, budget: FoldingBudget
) -> tuple[FoldedConstant, ...] | None:
    """The outputs of a node of which all inputs are constants; None where the node is a layer all the same."""
    kind = node.op_type
    if kind not in FOLDABLE or _scattered(node, inputs, budget):
        return None
    if kind == "Expand" and inputs[0] is not None and inputs[0].weight:
        # A class token: learned once, repeated for every sample.
        blank = np.broadcast_to(np.zeros((), np.bool_), inputs[0].shape)
        (expanded,) = _run(node, [blank, *(budget.value(c) for c in inputs[1:] if c is not None)], opset)
        return (inputs[0],) if expanded.shape == inputs[0].shape else None
    given = [c for c in inputs if c is not None]
    literal = all(c.literal for c in given)
    if kind in VIEWS:
        return (_view(node, inputs, opset, budget),)
    for c in given:
        if not c.ready and prod(c.shape) * c.dtype.itemsize > FOLD_BYTES:
            raise LayerwiseError(too_large(node, prod(c.shape)))
    arrays = [None if c is None else budget.value(c) for c in inputs]
    outputs = _run(node, arrays, opset, budget)
    results = []
    for name, array in zip(node.output, outputs, strict=False):
        if not any(a is not None and np.may_share_memory(array, a) for a in arrays):
            budget.take(name, thin(array).nbytes)
        result = constant(name, array, literal=literal)
        if kind == "ConstantOfShape" and literal:
            result = learned(result)
            if result.weight:  # stands for an initializer: each element is a value of its own
                result = replace(result, read=partial(np.array, array), ready=False)
        elif kind == "Constant":
            result = learned(result)
        elif kind == "Cast" and given[0].weight and "float" in array.dtype.name:
            x = given[0]
            result = replace(result, name=x.name, root=x.root, weight=True, transposed=x.transposed)
        elif kind in PARTS and given[0].weight:
            result = replace(result, weight=True)
            x = given[0]
            if array.size == prod(x.shape) and not x.transposed and (array.ravel() == x.value.ravel()).all():
                result = replace(result, name=x.name, root=x.root)  # all of a table of positions, say
        results.append(result)
    return tuple(results)


def _scattered(node: NodeProto, inputs: Sequence[FoldedConstant | None], budget: FoldingBudget) -> bool:
    """True if this looks up rows of a learned table in no plain order: an embedding of constant ids, still a layer."""
    if node.op_type != "Gather" or len(inputs) < 2 or inputs[0] is None or inputs[1] is None or not inputs[0].weight:
        return False
    ids = thin(budget.value(inputs[1])).ravel()
    axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
    if axis != 0 or len(inputs[0].shape) != 2 or ids.size < 2:
        return False
    return bool((np.diff(ids.astype(np.int64)) != 1).any() and (ids != ids[0]).any())


def _view(
    node: NodeProto, inputs: Sequence[FoldedConstant | None], opset: int, budget: FoldingBudget
) -> FoldedConstant:
    x = inputs[0]
    assert x is not None
    others = [None if c is None else budget.value(c) for c in inputs[1:]]
    # A stand-in of the same shape that holds a single element tells the shape.
    blank = np.broadcast_to(np.zeros((), np.bool_), x.shape)
    shape = _run(node, [blank, *others], opset)[0].shape
    name, root, transposed = x.name, x.root, x.transposed
    if node.op_type == "Identity":
        # PyTorch's exporter writes parameters of equal values once, and so gives each of the others its own name.
        name = root = node.output[0]
    elif node.op_type == "Transpose" and len(x.shape) == 2:
        order = next((tuple(a.ints) for a in node.attribute if a.name == "perm"), (1, 0))
        transposed ^= order == (1, 0)
    elif node.op_type == "Transpose":
        name = root = node.output[0]
    elif transposed:
        name, root, transposed = node.output[0], node.output[0], False
    literal = all(c.literal for c in inputs if c is not None)
    return FoldedConstant(
        name,
        shape,
        x.dtype,
        lambda: _run(node, [x.value, *others], opset)[0],
        root,
        x.weight,
        literal,
        transposed,
        x.ready,
    )


def thin(array: Array) -> Array:
    """The array with one element of each dimension along which it is broadcast (all are the same in memory)."""
    index = tuple(
        slice(0, 1) if stride == 0 and extent > 1 else slice(None)
        for stride, extent in zip(array.strides, array.shape, strict=True)
    )
    return array[index]


def _run(
    node: NodeProto, inputs: Sequence[Array | None], opset: int, budget: FoldingBudget | None = None
) -> list[Array]:
    """The values that the node computes. Sizes are checked beforehand, broadcast results stay broadcast."""
    with np.errstate(all="ignore"):
        try:
            needed = _within(node, inputs)
            if budget is not None:
                budget.check(node.name or node.output[0], needed)
            special = _NUMPY.get(node.op_type)
            if special is not None:
                return special(node, inputs)
            if node.op_type not in ELEMENTWISE:
                return _reference(node, inputs, opset)
            shape = np.broadcast_shapes(*(a.shape for a in inputs if a is not None))
            (result,) = _reference(node, [None if a is None else thin(a) for a in inputs], opset)
            return [np.broadcast_to(result, shape)]
        except LayerwiseError:
            raise
        except Exception as error:  # whatever numpy or onnx's reference says of a malformed node
            name = node.name or node.output[0]
            raise LayerwiseError(f"layer {name!r}: cannot compute this {node.op_type}: {first_line(error)}") from None


def _reference(node: NodeProto, inputs: Sequence[Array | None], opset: int) -> list[Array]:
    copy = NodeProto()
    copy.CopyFrom(node)
    feeds: dict[str, Array] = {}
    for i, array in enumerate(inputs):
        copy.input[i] = f"i{i}" if array is not None else ""
        if array is not None:
            feeds[f"i{i}"] = array
    names = [f"o{i}" for i in range(len(node.output))]
    del copy.output[:]
    copy.output.extend(names)
    graph = onnx.helper.make_graph(
        [copy], "constant",
        [onnx.helper.make_empty_tensor_value_info(name) for name in feeds],
        [onnx.helper.make_empty_tensor_value_info(name) for name in names],
    )  # fmt: skip
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    return [np.asarray(a) for a in ReferenceEvaluator(model).run(None, feeds)]


def _constant_of_shape(node: NodeProto, inputs: Sequence[Array | None]) -> list[Array]:
    fill = next((onnx.numpy_helper.to_array(a.t) for a in node.attribute if a.name == "value"), np.zeros(1, np.float32))
    return [np.broadcast_to(fill.reshape(()), _sizes(inputs[0]))]


def _expand(node: NodeProto, inputs: Sequence[Array | None]) -> list[Array]:
    x = inputs[0]
    assert x is not None
    return [np.broadcast_to(x, np.broadcast_shapes(x.shape, _sizes(inputs[1])))]


def _identity(node: NodeProto, inputs: Sequence[Array | None]) -> list[Array]:
    assert inputs[0] is not None
    return [inputs[0]]


def _gather(node: NodeProto, inputs: Sequence[Array | None]) -> list[Array]:
    data, ids = inputs
    assert data is not None
    assert ids is not None
    axis = next((a.i for a in node.attribute if a.name == "axis"), 0) % data.ndim
    few = thin(ids).astype(np.int64)
    rows = np.take(data, few, axis=axis)
    return [np.broadcast_to(rows, (*data.shape[:axis], *ids.shape, *data.shape[axis + 1 :]))]


_NUMPY: dict[str, Callable[[NodeProto, Sequence[Array | None]], list[Array]]] = {
    "ConstantOfShape": _constant_of_shape,
    "Expand": _expand,
    "Gather": _gather,
    "Identity": _identity,
}


def _sizes(array: Array | None) -> tuple[int, ...]:
    assert array is not None
    sizes = tuple(int(s) for s in array.ravel())
    if min(sizes, default=1) < 0:
        raise LayerwiseError(f"a shape of {sizes} is no shape")
    return sizes


def _within(node: NodeProto, inputs: Sequence[Array | None]) -> int:
    """Bytes of the result, at most. Refuses what would not fit, before it is computed."""
    arrays = [a for a in inputs if a is not None]
    if not arrays or node.op_type in ("ConstantOfShape", "Expand", *VIEWS):
        return 0
    first, itemsize = arrays[0], max(a.itemsize for a in arrays)
    if node.op_type in ("ArgMax", "ArgMin", "Cast", "EyeLike", "NonZero"):  # of any type, into another
        itemsize = 8
    if node.op_type in ELEMENTWISE:
        count = prod(np.broadcast_shapes(*(thin(a).shape for a in arrays)))
    elif node.op_type == "Concat":
        count = sum(a.size for a in arrays)
    elif node.op_type == "Gather":
        axis = next((a.i for a in node.attribute if a.name == "axis"), 0) % max(first.ndim, 1)
        count = thin(arrays[1]).size * first.size // max(first.shape[axis], 1)
    elif node.op_type == "GatherND":
        count = arrays[1].size * first.size
    elif node.op_type == "MatMul":
        count = first.size // max(first.shape[-1], 1) * arrays[1].size
    elif node.op_type == "OneHot":
        count = first.size * int(arrays[1].ravel()[0])
    elif node.op_type == "Range":
        start, limit, delta = (a.ravel()[0].item() for a in arrays)
        count = max(ceil((limit - start) / delta), 0)
    elif node.op_type == "Tile":
        count = first.size * prod(int(r) for r in arrays[1].ravel())
    elif node.op_type == "Pad":
        pads = arrays[1].ravel() if len(arrays) > 1 else np.array(
            next((a.ints for a in node.attribute if a.name == "pads"), []), np.int64)  # fmt: skip
        count = prod(extent + int(np.abs(pads).max(initial=0)) * 2 for extent in first.shape)
    elif node.op_type == "NonZero":
        count = first.size * first.ndim
    else:
        count = max(a.size for a in arrays)
    if count * itemsize > FOLD_BYTES:
        raise LayerwiseError(too_large(node, count))
    return int(count * itemsize)


def too_large(node: NodeProto, count: int) -> str:
    """The message on a constant that would not fit."""
    name = node.name or node.output[0]
    return (
        f"layer {name!r} ({node.op_type}) computes with a constant of {count:,} elements, more than "
        f"{FOLD_BYTES >> 20} MiB; make the result an initializer"
    )
