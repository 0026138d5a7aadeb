"""ONNX -> LayerGraph. https://onnx.ai/onnx/repo-docs/IR.html"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import onnx.inliner
from onnx import AttributeProto, ModelProto, NodeProto

from layerwise.arguments import Count, checked
from layerwise.errors import LayerwiseError
from layerwise.graph.layer_graph import LayerGraph
from layerwise.graph.samples import check_samples
from layerwise.importers.onnx.call import schema_of
from layerwise.importers.onnx.constants import FOLDABLE
from layerwise.importers.onnx.file import inferred, opset_of, read_onnx
from layerwise.importers.onnx.importer import OnnxNetwork, build_graph
from layerwise.importers.onnx.inputs import model_inputs
from layerwise.importers.onnx.ops.table import row


@checked
def from_onnx(
    path: str | Path,
    *,
    batch: Count | None = None,
    name: str | None = None,
) -> LayerGraph:
    """Returns the layers of an .onnx file at `batch` samples, unfused.

    A fixed batch is rewritten (also a leading 1 in the constant of a reshape), an open one is filled in. Layers get the
    names of the nodes, or `Conv_3` (the fourth Conv) if these have none; parameters get those of the initializers. A
    parameter that several layers use is a node of the graph. Weights are not read, unless shapes depend on them. Batch
    norm and dropout are in training mode, whatever the model says.

    Args:
        path: Path of the file.
        batch: The global batch size. None: the file's own, or 1.
        name: Name of the graph.

    Returns:
        The layers.

    Raises:
        LayerwiseError: The file is not a valid model, or has an unsupported operator.

    Examples:
        >>> import tempfile
        >>> import onnx
        >>> x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 4]) for name in "xy")
        >>> graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "net", [x], [y])
        >>> with tempfile.NamedTemporaryFile(suffix=".onnx") as file:
        ...     onnx.save(onnx.helper.make_model(graph), file.name)
        ...     from_onnx(file.name, batch=8).batch
        8
    """
    return import_onnx(path, batch, name).graph


def import_onnx(path: str | Path, batch: int | None = None, name: str | None = None) -> OnnxNetwork:
    """`from_onnx`'s network with its values, each of which is read when it is asked for."""
    file = Path(path)
    model = _composites_inlined(read_onnx(file), file.parent)
    imported = build_graph(model, file.parent, name or file.stem, model_inputs(model.graph, batch))
    graph = imported.graph
    if imported.unsampled and batch not in (None, graph.batch):
        raise LayerwiseError(
            f"layer {imported.unsampled!r} drops the sample dimension, so the batch must stay {graph.batch}: export "
            "the model with an open batch"
        )
    made = graph if batch is None else graph.rebatch(batch)
    if made.batch > 1:  # a file for one sample does not show which dimension that is
        check_samples(made)
    return replace(imported, graph=made)


def _composites_inlined(model: ModelProto, folder: Path) -> ModelProto:
    """The model with composite operators that layerwise lacks replaced by their ONNX definition."""
    opset = opset_of(model, "the model")
    unknown: set[str] = set()
    nodes: Sequence[NodeProto] = model.graph.node
    for node in nodes:
        schema = schema_of(node, opset)
        if schema is None or node.op_type in FOLDABLE or row("ai.onnx", node.op_type, schema.since_version):
            continue
        if schema.has_function or schema.has_context_dependent_function:  # type: ignore[attr-defined]
            unknown.add(node.op_type)
    for node in model.graph.node:
        if node.op_type in unknown and (schema := schema_of(node, opset)):
            given = {a.name for a in node.attribute}  # the inliner does not know the defaults
            defaults = [a.default_value for name, a in schema.attributes.items() if name not in given]
            node.attribute.extend(a for a in defaults if a.type != AttributeProto.UNDEFINED)
    if not unknown:
        return model
    stored = {tensor.name for tensor in model.graph.initializer} - {info.name for info in model.graph.input}
    typed = [onnx.helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in model.graph.initializer]
    model.graph.input.extend(info for info in typed if info.name in stored)  # the inliner needs types
    model.graph.value_info.extend(inferred(model, folder).values())
    for op_type in sorted(unknown):
        try:
            model = onnx.inliner.inline_selected_functions(model, [("", op_type)], inline_schema_functions=True)
        except (RuntimeError, TypeError):  # types that it cannot infer, or onnx is too old: not supported
            continue
    return model
