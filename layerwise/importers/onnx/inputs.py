"""Inputs of an ONNX model: which dimension is the batch, what the others are called, and that none is left open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnx import GraphProto, NodeProto, ValueInfoProto

from layerwise.errors import LayerwiseError
from layerwise.importers.labels import usual_labels
from layerwise.importers.onnx.call import element_type
from layerwise.tensor import TensorSpec

Extent = int | str | None  # fixed, named or simply open

SIGNALS = ("Conv", "ConvTranspose", "MaxPool", "AveragePool", "LpPool", "GlobalAveragePool", "GlobalMaxPool",
           "BatchNormalization", "InstanceNormalization", "GroupNormalization", "LRN")  # fmt: skip
PASSED = ("Cast", "Dropout", "Identity", "Pad")  # on the way to the first use


@dataclass(frozen=True, slots=True)
class OnnxInputs:
    """The inputs that are fed. `fixed`: the model is written for this batch only."""

    specs: Mapping[str, TensorSpec]
    batch: int
    fixed: bool


def model_inputs(graph: GraphProto, batch: int | None) -> OnnxInputs:
    """Shapes and labels of what the model is fed, at `batch` samples where the model leaves that open."""
    stored = {tensor.name for tensor in graph.initializer}
    infos = [info for info in graph.input if info.name not in stored]
    if not infos:
        raise LayerwiseError("the model has no inputs: there is nothing to split")
    shapes = {info.name: _extents(info) for info in infos}
    labels = {info.name: _labels(graph, info, len(shapes[info.name])) for info in infos}
    sampled = {name: shapes[name][labels[name].index("n")] for name in shapes if "n" in labels[name]}
    first = next(iter(sampled.values()), None)
    fixed = isinstance(first, int)
    own = first if isinstance(first, int) else batch or 1
    specs = {}
    for info in infos:
        shape, named = list(shapes[info.name]), list(labels[info.name])
        for i, extent in enumerate(shape):
            if named[i] == "n" and isinstance(extent, int) and not (fixed and extent == own):
                named[i] = None  # a table that is fed beside the samples
            elif not isinstance(extent, int) and (named[i] == "n" or (extent and extent == first)):
                shape[i] = own
        specs[info.name] = _spec(info, shape, named)
    return OnnxInputs(specs, own, fixed)


def _extents(info: ValueInfoProto) -> tuple[Extent, ...]:
    kind = info.type.WhichOneof("value")
    if kind != "tensor_type":
        raise LayerwiseError(f"input {info.name!r} is no tensor ({kind or 'no type'}); layerwise takes tensors only")
    if not info.type.tensor_type.HasField("shape"):
        raise LayerwiseError(f"input {info.name!r} has no shape; export the model with fixed sizes")
    extents: list[Extent] = []
    for dim in info.type.tensor_type.shape.dim:
        if dim.dim_param:
            extents.append(dim.dim_param)
        else:
            extents.append(dim.dim_value if dim.dim_value > 0 else None)
    return tuple(extents)


def _spec(info: ValueInfoProto, shape: Sequence[Extent], labels: Sequence[str | None]) -> TensorSpec:
    numbers = []
    for i, extent in enumerate(shape):
        if not isinstance(extent, int):
            raise LayerwiseError(
                f"input {info.name!r}: dimension {i} is left open ({extent or 'unnamed'}); only the batch may be: "
                "export the model with a fixed size for it"
            )
        numbers.append(extent)
    code = info.type.tensor_type.elem_type
    try:
        return TensorSpec(tuple(numbers), tuple(labels), element_type(code))
    except (LayerwiseError, KeyError, TypeError) as error:
        raise LayerwiseError(f"input {info.name!r}: {error}") from None


def _labels(graph: GraphProto, info: ValueInfoProto, rank: int) -> tuple[str | None, ...]:
    """The labels by rank and first use."""
    use = _first_use(graph, info.name)
    signal = use is not None and use.op_type in SIGNALS
    labels = usual_labels(rank, element_type(info.type.tensor_type.elem_type), signal=signal)
    if rank >= 4 and use is not None and use.op_type == "Transpose":
        order = next((tuple(a.ints) for a in use.attribute if a.name == "perm"), ())
        if order == (0, rank - 1, *range(1, rank - 1)):  # channels last, as TensorFlow has them
            labels = ("n", *labels[2:], "c")
    return labels


def _first_use(graph: GraphProto, name: str) -> NodeProto | None:
    """The first node that does something with a tensor."""
    nodes: Sequence[NodeProto] = graph.node
    for node in nodes:
        if name in node.input:
            if node.op_type not in PASSED:
                return node
            name = node.output[0]
    return None
