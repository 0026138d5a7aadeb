"""Constants of an ONNX model: initializers, and what nodes compute from them and from activations' shapes.

Weights stay in the file (a `Constant` reads them when their values are needed). Only arithmetic on constants runs on
import, in numpy or onnx's reference implementation, and only operators that are known to be harmless.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod

import numpy as np
import onnx
import onnx.shape_inference
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, helper
from onnx.reference import ReferenceEvaluator

from layerwise.errors import LayerwiseError, first_line
from layerwise.importers.onnx.file import SMALL, extents

Array = NDArray[np.generic]

FOLD_BYTES = 2**30  # largest constant to compute, as a file can ask for any size
GROWTH = 16  # bytes of computed constants per byte of the file, beside FOLD_BYTES: 8-bit weights become floats
NEVER = 1e4  # masks add this magnitude or more (float16's lowest, float32's lowest, -inf) to positions to ignore

# Operators that only rename positions; values are read when needed, so a large model's weights are not.
VIEWS = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
# Each output element depends on the elements at its position; operands broadcast.
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
PARTS = frozenset({"Gather", "Slice", "Split"})  # parts of learned values are learned values


@dataclass(frozen=True, eq=False)
class FoldedConstant:
    """A tensor that does not depend on the values of the model's inputs."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    read: Callable[[], Array] = field(repr=False)
    root: str = ""  # the initializer that it is a view of
    weight: bool = False  # learned, as far as the file shows: floats, more than one, neither computed nor infinite
    literal: bool = True  # does not depend on the inputs' shapes either
    transposed: bool = False  # whether it is the transpose of the matrix `name`
    ready: bool = False  # the values are in memory: reading costs little

    @cached_property
    def value(self) -> Array:
        """The values. Do not write to them: they may be mapped or broadcast."""
        return self.read()

    @property
    def small(self) -> bool:
        """True if reading its values costs little."""
        return prod(self.shape) <= 65536


class FoldingBudget:
    """The memory limit for all constants that one file computes: a file can ask for any number of them."""

    def __init__(self, stored_bytes: int) -> None:
        self.most = self.left = FOLD_BYTES + GROWTH * stored_bytes

    def check(self, name: str, needed: int) -> None:
        """Raises LayerwiseError if the limit does not allow it."""
        if needed > self.left:
            raise LayerwiseError(
                f"computing the model's constants, up to {name!r}, takes more than {self.most >> 20:,} MiB: store "
                "their results as initializers"
            )

    def take(self, name: str, needed: int) -> None:
        """Counts a constant that was computed."""
        self.check(name, needed)
        self.left -= needed

    def value(self, c: FoldedConstant) -> Array:
        """A constant's values, which count once."""
        if "value" not in vars(c):
            self.take(c.name, prod(c.shape) * c.dtype.itemsize)
        return c.value


def constant(name: str, array: Array, *, literal: bool = True) -> FoldedConstant:
    """A constant whose values are in memory."""
    made = FoldedConstant(name, array.shape, array.dtype, lambda: array, name, literal=literal, ready=True)
    vars(made)["value"] = array
    return made


def learned(c: FoldedConstant) -> FoldedConstant:
    """The constant of an initializer, marked as a weight if it looks like one."""
    weight = "float" in c.dtype.name and prod(c.shape) > 1
    square = len(c.shape) > 1 and c.shape[-1] == c.shape[-2] and prod(c.shape) == c.shape[-1] ** 2
    if weight and (c.small or (square and c.shape[-1] <= 4096)):
        weight = bool((np.abs(thin(c.value).astype(np.float64)) < NEVER).all())  # an attention mask is not learned
    return replace(c, weight=weight, root=c.name)


def fold_constants(
    node: NodeProto, inputs: Sequence[FoldedConstant | None], opset: int, budget: FoldingBudget
) -> tuple[FoldedConstant, ...] | None:
    """The outputs of a node whose inputs are all constants; None if the node must stay a layer."""
    kind = node.op_type
    if kind not in FOLDABLE or _scattered(node, inputs, budget):
        return None
    if kind == "Expand" and inputs[0] is not None and inputs[0].weight:
        # A class token: learned once, repeated for every sample.
        shape = _shape(node, inputs[0], [None if c is None else budget.value(c) for c in inputs[1:]], opset)
        return (inputs[0],) if shape == inputs[0].shape else None
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
            if result.weight:  # stands for an initializer, with a value for each element
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
                result = replace(result, name=x.name, root=x.root)  # the full table of positions, say
        results.append(result)
    return tuple(results)


def _scattered(node: NodeProto, inputs: Sequence[FoldedConstant | None], budget: FoldingBudget) -> bool:
    """True if this looks up rows of a learned table out of order: an embedding of constant ids, which stays a layer."""
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
    name, root, transposed = x.name, x.root, x.transposed
    order = next((tuple(a.ints) for a in node.attribute if a.name == "perm"), (1, 0))
    if node.op_type == "Transpose" and len(x.shape) == 2:
        transposed ^= order == (1, 0)
    elif node.op_type in ("Identity", "Transpose") or transposed:
        # PyTorch's exporter stores equal parameters once, and names the others by Identity nodes.
        name = root = node.output[0]
        transposed &= node.op_type in ("Identity", "Transpose")
    return replace(
        x,
        name=name,
        shape=_shape(node, x, others, opset),
        read=lambda: _run(node, [x.value, *others], opset)[0],
        root=root,
        literal=all(c.literal for c in inputs if c is not None),
        transposed=transposed,
    )


def thin(array: Array) -> Array:
    """The array with one element for each dimension along which it is broadcast (they are the same memory)."""
    index = tuple(
        slice(0, 1) if stride == 0 and extent > 1 else slice(None)
        for stride, extent in zip(array.strides, array.shape, strict=True)
    )
    return array[index]


def _run(
    node: NodeProto, inputs: Sequence[Array | None], opset: int, budget: FoldingBudget | None = None
) -> list[Array]:
    """The values that a node computes. Sizes are checked first; broadcast results stay broadcast."""
    x, kind = inputs[0] if inputs else None, node.op_type
    if kind == "Identity" and x is not None:
        return [x]
    thinned = range(len(inputs)) if kind in ELEMENTWISE else (1,) if kind == "Gather" else ()
    with _refused(node), np.errstate(all="ignore"):
        if kind == "Range":  # ONNX's own functions pass one-element tensors to it
            inputs = [None if a is None else a.reshape(()) for a in inputs]
        few = [thin(a) if i in thinned and a is not None else a for i, a in enumerate(inputs)]
        if kind == "ConstantOfShape":
            x = next((onnx.numpy_helper.to_array(a.t) for a in node.attribute), np.zeros(1, np.float32)).reshape(())
        if kind in ("ConstantOfShape", "Expand") and x is not None:
            return [np.broadcast_to(x, _outputs(_alone(node, inputs, opset))[0][0])]
        model = _alone(node, few, opset)
        if kind not in VIEWS:
            # An unknown size, as of NonZero, is at most that of an input.
            most = max((a.size for a in few if a is not None), default=1)
            counts = [(prod(shape), size) for shape, size in _outputs(model, most)]
            needed = sum(count * size for count, size in counts)
            if needed > FOLD_BYTES:
                raise LayerwiseError(too_large(node, sum(count for count, _ in counts)))
            if budget is not None:
                budget.check(node.name or node.output[0], needed)
        feeds = {f"i{i}": a for i, a in enumerate(few) if a is not None}
        made = ReferenceEvaluator(model).run(None, {info.name: feeds[info.name] for info in model.graph.input})
        results = [np.asarray(a) for a in made]
        if all(a is b for a, b in zip(few, inputs, strict=True)):
            return results
        shapes = [shape for shape, _ in _outputs(_alone(node, inputs, opset))]
        return [np.broadcast_to(a, shape) for a, shape in zip(results, shapes, strict=True)]


@contextmanager
def _refused(node: NodeProto) -> Iterator[None]:
    """A context that turns numpy's and onnx's errors about a malformed node into a LayerwiseError that names it."""
    try:
        yield
    except LayerwiseError:
        raise
    except Exception as error:
        name, said = node.name or node.output[0], first_line(error, 500)
        raise LayerwiseError(f"layer {name!r}: cannot compute this {node.op_type}: {said}") from None


def _shape(node: NodeProto, x: FoldedConstant, others: Sequence[Array | None], opset: int) -> tuple[int, ...]:
    """The shape of the node's result from x, whose values are not read."""
    blank = np.broadcast_to(np.zeros((), np.bool_), x.shape)
    with _refused(node):
        return _outputs(_alone(node, [blank, *others], opset))[0][0]


def _alone(node: NodeProto, inputs: Sequence[Array | None], opset: int) -> ModelProto:
    """A model of one node: inputs i0, i1, ..., with small ones stored in it, and outputs o0, o1, ..."""
    alone, typed, stored = NodeProto(), list[onnx.ValueInfoProto](), list[onnx.TensorProto]()
    alone.CopyFrom(node)
    del alone.input[:], alone.output[:]
    for i, array in enumerate(inputs):
        alone.input.append("" if array is None else f"i{i}")
        if array is not None and array.size <= SMALL:
            stored.append(onnx.numpy_helper.from_array(np.array(array), f"i{i}"))
        elif array is not None:
            code = helper.np_dtype_to_tensor_dtype(array.dtype)
            typed.append(helper.make_tensor_value_info(f"i{i}", code, array.shape))
    alone.output.extend(f"o{i}" for i in range(len(node.output)))
    outputs = [helper.make_empty_tensor_value_info(name) for name in alone.output]
    graph = helper.make_graph([alone], "constant", typed, outputs, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


def _outputs(model: ModelProto, unknown: int = 0) -> list[tuple[tuple[int, ...], int]]:
    """Shape and bytes per element of each output, by onnx's shape inference; unknown: the value for unknown extents."""
    found = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph.output
    types = [helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type or 1) for info in found]
    shapes = [tuple(unknown if n is None else n for n in extents(info) or ()) for info in found]
    return [(shape, dtype.itemsize) for shape, dtype in zip(shapes, types, strict=True)]


def too_large(node: NodeProto, count: int) -> str:
    """The message for a constant that would be too large."""
    name = node.name or node.output[0]
    return (
        f"layer {name!r} ({node.op_type}) computes with a constant of {count:,} elements, more than {FOLD_BYTES >> 20} "
        "MiB: store the result as an initializer"
    )
