"""ONNX -> LayerGraph. https://onnx.ai/onnx/repo-docs/IR.html"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx.inliner
from numpy.typing import NDArray
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
from layerwise.importers.onnx.sharing import PlacedValue


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
    imported = _imported(path, batch, name)
    graph = imported.graph
    if imported.unsampled and batch not in (None, graph.batch):
        raise LayerwiseError(
            f"layer {imported.unsampled!r} drops the sample dimension, so the batch must stay {graph.batch}: export "
            "the model with an open batch"
        )
    made = graph if batch is None else graph.rebatch(batch)
    if made.batch > 1:  # a file for one sample does not show which dimension that is
        check_samples(made)
    return made


def load_onnx_weights(path: str | Path) -> Mapping[str, NDArray[np.generic]]:
    """Returns the values of all parameters and constants of `from_onnx(path)`, by their names in the graph.

    Each is read when it is accessed, external data from a memory map: copy it before you write to it.
    """
    return _Weights(_imported(path, None, None).values)


class _Weights(Mapping[str, NDArray[np.generic]]):
    def __init__(self, values: Mapping[str, PlacedValue]) -> None:
        self._values = values

    def __getitem__(self, name: str) -> NDArray[np.generic]:
        return self._values[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def _imported(path: str | Path, batch: int | None, name: str | None) -> OnnxNetwork:
    file = Path(path)
    model = _composites_inlined(read_onnx(file), file.parent)
    return build_graph(model, file.parent, name or file.stem, model_inputs(model.graph, batch))


def _composites_inlined(model: ModelProto, folder: Path) -> ModelProto:
    """The model with composite operators (MeanVarianceNormalization) that layerwise lacks replaced by their ONNX
    definition.
    """
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
