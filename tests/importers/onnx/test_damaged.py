"""Damaged .onnx files: imported or refused, never a crash."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from layerwise.errors import LayerwiseError
from layerwise.importers.onnx.from_onnx import from_onnx
from tests.importers.onnx.compute import node, random, tensor, write


def survives(path: Path, batch: int | None) -> None:
    """Imported or refused, in one line."""
    said = ""
    try:
        from_onnx(path, batch=batch)
    except LayerwiseError as error:
        said = str(error)
    assert "\n" not in said


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A bit of everything."""
    nodes = [
        node("Conv", "x", "w", "b", out="c", pads=[1, 1, 1, 1], strides=[2, 2], name="conv"),
        node("BatchNormalization", "c", "g", "b", "b", "v", out="n"),
        node("Relu", "n", out="r"),
        node("AveragePool", "r", out="p", kernel_shape=[2, 2], ceil_mode=1),
        node("Shape", "p", out="shape"),
        node("Slice", "shape", "i0", "i1", out="batch"),
        node("Concat", "batch", "minus", out="target", axis=0),
        node("Reshape", "p", "target", out="f"),
        node("Gemm", "f", "fc", out="h", transB=1, alpha=0.5),
        node("Split", "h", "parts", out=["h1", "h2"], axis=1),
        node("Sigmoid", "h2", out="s"),
        node("Mul", "h1", "s", out="m"),
        node("Concat", "m", "h", out="j", axis=1),
        node("Softmax", "j", out="y", axis=-1),
    ]
    stored = [random("w", 4, 3, 3, 3), random("b", 4), random("g", 4), tensor("v", [1.0, 2.0, 1.0, 2.0])]
    stored += [
        random("fc", 6, 16),
        tensor("parts", [3, 3]),
        tensor("i0", [0]),
        tensor("i1", [1]),
        tensor("minus", [-1]),
    ]
    path = tmp_path_factory.mktemp("onnx") / "m.onnx"
    return write(path, nodes, ["N", 3, 8, 8], stored).read_bytes()


BYTES = st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255))


@given(changes=st.lists(BYTES, min_size=1, max_size=4), batch=st.sampled_from([None, 1, 3]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_changed_bytes(network: bytes, changes: list[tuple[float, int]], batch: int | None, tmp_path: Path) -> None:
    """A damaged file is imported or refused; it does not crash."""
    data = bytearray(network)
    for where, value in changes:
        data[int(where * len(data))] = value
    path = tmp_path / "m.onnx"
    path.write_bytes(data)
    survives(path, batch)


NUMBERS = st.sampled_from([0, -1, 1, 2, 3, 7, 64, 1 << 31, 1 << 62, -(1 << 63)])


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_changed_fields(network: bytes, data: st.DataObject, tmp_path: Path) -> None:
    """As above, but what changes are attributes, shapes, connections and small constants."""
    model = onnx.load_from_string(network)
    for _ in range(data.draw(st.integers(1, 3))):
        one = data.draw(st.sampled_from(list(model.graph.node)))
        what = data.draw(st.sampled_from(["attribute", "input", "dims", "value", "shape"]))
        if what == "attribute" and one.attribute:
            attribute = data.draw(st.sampled_from(list(one.attribute)))
            if attribute.ints:
                attribute.ints[0] = data.draw(NUMBERS)
            attribute.i = data.draw(NUMBERS)
        elif what == "input" and one.input:
            one.input[-1] = data.draw(st.sampled_from(["x", "w", "c", "f", "parts", "shape", ""]))
        elif what == "dims":
            stored = data.draw(st.sampled_from(list(model.graph.initializer)))
            stored.dims[0] = data.draw(NUMBERS)
        elif what == "value":
            stored = data.draw(st.sampled_from([t for t in model.graph.initializer if t.data_type == 7]))
            value = np.frombuffer(stored.raw_data, np.int64).copy()
            value[0] = data.draw(NUMBERS)
            stored.raw_data = value.tobytes()
        elif what == "shape":
            dims = model.graph.input[0].type.tensor_type.shape.dim
            data.draw(st.sampled_from(list(dims))).dim_value = data.draw(NUMBERS)
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    survives(path, data.draw(st.sampled_from([None, 3])))
