"""Reads .onnx files, which may come from anywhere: each is checked first, and nothing outside its folder is opened.

https://onnx.ai/onnx/repo-docs/IR.html, https://onnx.ai/onnx/repo-docs/ExternalData.html
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from math import prod
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import onnx
import onnx.checker
import onnx.inliner
import onnx.shape_inference
from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped]
from numpy.typing import NDArray
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

from layerwise.errors import LayerwiseError, first_line

OLDEST_OPSET = 7  # older opsets have other broadcasting and batch norm under the same names
PROTOBUF_BYTES = 2**31 - 1  # https://protobuf.dev/programming-guides/proto-limits/
MAX_NODES = 1_000_000  # after inlining: nested function calls can grow exponentially
MAX_DEPTH = 100  # of nested function calls


def read_onnx(path: str | Path) -> ModelProto:
    """The checked model of a file, with local functions inlined and external data not loaded."""
    file = Path(path)
    model = _parsed(file)
    opset_of(model, str(file))
    for message in _messages(model):
        if not all(isinstance(name, str) for name in _names(message)):  # bytes: protobuf could not decode the name
            raise LayerwiseError(f"{file} is damaged: it contains names that are not UTF-8")
        if isinstance(message, TensorProto) and message.data_location == TensorProto.EXTERNAL:
            locate(message, file.parent)
    _check(file)
    if model.graph.sparse_initializer:
        raise LayerwiseError(f"{file}: sparse initializers are not supported: convert them to dense ones")
    if not model.functions:
        return model
    if (count := _inlined_size(model)) > MAX_NODES:
        raise LayerwiseError(
            f"{file}: its functions expand to {count:,} nodes, but at most {MAX_NODES:,} are supported"
        )
    return onnx.inliner.inline_local_functions(model)


def standard(domain: str) -> bool:
    """True if a domain is that of ONNX's own operators."""
    return domain in ("", "ai.onnx")


def opset_of(model: ModelProto, where: str) -> int:
    """The version of the standard operators that the model uses."""
    newest = onnx.defs.onnx_opset_version()
    version = next((o.version for o in model.opset_import if standard(o.domain)), 1)
    if model.opset_import and not any(standard(o.domain) for o in model.opset_import):
        return newest  # a model of custom operators only
    if not OLDEST_OPSET <= version <= newest:
        raise LayerwiseError(
            f"{where}: opset {version} is not supported: convert it to {OLDEST_OPSET} to {newest} (onnx "
            f"{onnx.__version__}) with onnx.version_converter"
        )
    return int(version)


def array_of(tensor: TensorProto, folder: Path) -> NDArray[np.generic]:
    """A tensor's values; external data is memory-mapped, and read only where accessed."""
    if tensor.data_location != TensorProto.EXTERNAL:
        try:
            return onnx.numpy_helper.to_array(tensor)
        except (ValueError, TypeError) as error:
            raise LayerwiseError(f"tensor {tensor.name!r} is damaged: {first_line(error, 500)}") from None
    file, offset = locate(tensor, folder)
    return np.memmap(file, dtype_of(tensor), "r", offset, tuple(tensor.dims))


def dtype_of(tensor: TensorProto) -> np.dtype[np.generic]:
    """numpy's element type (bfloat16 and smaller types come from ml_dtypes)."""
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))


def locate(tensor: TensorProto, folder: Path) -> tuple[Path, int]:
    """The file and offset of external data, which must lie complete in the model's own folder."""
    entries = {e.key: e.value for e in tensor.external_data}
    name = f"external data of tensor {tensor.name!r}"
    location = entries.get("location", "")
    parts = PurePosixPath(location.replace("\\", "/")).parts
    if not parts or "\0" in location or ".." in parts or parts[0] == "/" or PureWindowsPath(location).anchor:
        raise LayerwiseError(f"{name}: {location!r} is not a path inside the model's own folder")
    home = folder.resolve()
    file = (home / location).resolve()
    if not file.is_relative_to(home):
        raise LayerwiseError(f"{name}: {location!r} leads outside the model's own folder")
    if not file.is_file():
        raise LayerwiseError(f"{name}: there is no file {location!r} beside the model")
    try:
        offset = int(entries.get("offset", "0"))
        length = int(entries["length"]) if "length" in entries else None
        itemsize = dtype_of(tensor).itemsize
    except (ValueError, KeyError):
        raise LayerwiseError(f"{name}: the offset, length or element type is invalid") from None
    if tensor.data_type in _PACKED:
        raise LayerwiseError(f"{name}: elements of less than a byte are not supported")
    need = prod(tensor.dims) * itemsize
    if offset < 0 or min(tensor.dims, default=1) < 0 or offset + need > file.stat().st_size:
        raise LayerwiseError(f"{name}: {location!r} has no {need:,} bytes at offset {offset:,}; it is truncated")
    if length is not None and length != need:
        raise LayerwiseError(f"{name}: {length:,} bytes cannot hold {tuple(tensor.dims)} elements of {itemsize} bytes")
    return file, offset


def stored_bytes(model: ModelProto, folder: Path) -> int:
    """The size of the model in bytes, external data included."""
    outside = {locate(t, folder)[0] for t in model.graph.initializer if t.data_location == TensorProto.EXTERNAL}
    return int(model.ByteSize()) + sum(file.stat().st_size for file in outside)


_PACKED = tuple(
    code for name, code in TensorProto.DataType.items() if name.endswith(("INT4", "INT2", "FLOAT4E2M1", "STRING"))
)


def _parsed(file: Path) -> ModelProto:
    try:
        there = file.exists()
    except OSError as error:  # e.g. the name is too long
        raise LayerwiseError(f"{str(file)!r} cannot be read: {error.strerror}") from None
    if not there:
        raise LayerwiseError(f"the file {str(file)!r} does not exist")
    if not file.is_file():
        raise LayerwiseError(f"{str(file)!r} is not a file")
    size = file.stat().st_size
    if size > PROTOBUF_BYTES:
        raise LayerwiseError(
            f"{file} has {size:,} bytes, but ONNX allows {PROTOBUF_BYTES:,}: save it with external data "
            "(onnx.save(..., save_as_external_data=True))"
        )
    try:
        model = onnx.load_model(file, format="protobuf", load_external_data=False)
    except DecodeError:
        raise LayerwiseError(f"{file} is not an ONNX file, or it is damaged or truncated") from None
    except OSError as error:
        raise LayerwiseError(f"{file} cannot be read: {first_line(error, 500)}") from None
    if not model.ir_version or not (model.graph.node or model.graph.output):
        raise LayerwiseError(f"{file} is not an ONNX model: it has no graph")
    if model.ir_version > onnx.IR_VERSION:
        raise LayerwiseError(
            f"{file} is written in ONNX IR version {model.ir_version}, but onnx {onnx.__version__} reads up to "
            f"{onnx.IR_VERSION}: upgrade onnx"
        )
    return model


def _check(file: Path) -> None:
    try:
        onnx.checker.check_model(str(file))
    except (onnx.checker.ValidationError, ValueError, RuntimeError) as error:
        context = next((line for line in str(error).splitlines() if "Context" in line), "").rpartition("node. ")[2]
        where = f" ({context.strip()})" if context else ""
        raise LayerwiseError(f"{file} is not a valid ONNX model: {first_line(error, 500)}{where}") from None


def _messages(message: Message) -> Iterator[Message]:
    """A message of the file, and every message in it."""
    yield message
    for name in _nested(message.DESCRIPTOR):
        value = getattr(message, name)
        alone = isinstance(value, Message)
        for inner in [value] * message.HasField(name) if alone else value:
            yield from _messages(inner)


@cache
def _nested(kind: Any) -> list[str]:
    """The fields of a kind of message that have messages."""
    return [field.name for field in kind.fields if field.message_type is not None]


def _names(message: Message) -> Iterator[object]:
    for field in ("name", "op_type", "domain"):
        yield getattr(message, field, "")
    if isinstance(message, NodeProto):
        yield from message.input
        yield from message.output


def _inlined_size(model: ModelProto) -> int:
    """The number of nodes with every call of a local function inlined. Recursion counts as too many."""
    bodies = {(f.domain, f.name): f.node for f in model.functions}
    sizes: dict[tuple[str, str], int] = {}

    def size(nodes: Sequence[NodeProto], depth: int) -> int:
        total = 0
        for node in nodes:
            key = (node.domain, node.op_type)
            if key in bodies and key not in sizes:
                sizes[key] = MAX_NODES + 1 if depth > MAX_DEPTH else size(bodies[key], depth + 1)
            total += sizes.get(key, 1)
        return min(total, MAX_NODES + 1)

    return size(model.graph.node, 0)


SMALL = 4096  # elements; shapes are computed from far fewer
NEWEST_IR_WITHOUT_INPUTS = 4  # since then, initializers need not be listed as inputs


def inferred(model: ModelProto, folder: Path) -> dict[str, ValueInfoProto]:
    """Types and shapes of all tensors, at the model's own batch. Weights are neither copied nor read."""
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
            if dim.dim_value < 0:
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
    # The file's other shapes may be outdated (a changed batch); only user-defined operators need them.
    foreign = {name for node in graph.node if not standard(node.domain) for name in node.output}
    bare.graph.value_info.extend(info for info in graph.value_info if info.name in foreign)
    try:
        # Without data_prop, which would compute constants of any size that the file asks for.
        result = onnx.shape_inference.infer_shapes(bare, check_type=True, strict_mode=True)
    except (onnx.shape_inference.InferenceError, ValueError, RuntimeError) as error:
        raise LayerwiseError(f"the model's shapes or types are inconsistent: {first_line(error, 500)}") from None
    return {info.name: info for info in (*result.graph.value_info, *result.graph.output)}


def extents(info: ValueInfoProto | None) -> tuple[int | None, ...] | None:
    """The shape of a tensor, or None if it is unknown."""
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
