"""Bad .onnx files: each one clear line, nothing outside the model's folder is read, nothing large is computed."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from layerwise.errors import LayerwiseError
from layerwise.importers.onnx import constants as onnx_constants
from layerwise.importers.onnx.file import read_onnx
from layerwise.importers.onnx.from_onnx import from_onnx
from tests.importers.onnx.compute import info, node, random, tensor, weights_of, write


def refused(path: Path, *words: str, batch: int | None = None) -> None:
    """It is refused in one line, which has all these words."""
    with pytest.raises(LayerwiseError) as caught:
        from_onnx(path, batch=batch)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1000
    assert [word for word in words if word not in message] == [], message


def relu(path: Path, shape: Sequence[int | str | None] = ("N", 4), **more: object) -> Path:
    return write(path, [node("Relu", "x", out="y", name="act")], shape, **more)  # type: ignore[arg-type]


def as_text(path: Path) -> Path:
    """onnx.load goes by the suffix."""
    onnx.save(onnx.load(relu(path)), path.with_suffix(".json"))
    return path.with_suffix(".json")


def large(path: Path) -> Path:
    with path.open("wb") as file:
        file.truncate(1 << 40)
    return path


def containing(content: bytes) -> Callable[[Path], Path]:
    return lambda path: [path.write_bytes(content), path][1]  # type: ignore[return-value]


def integers(op: str, *stored: onnx.TensorProto) -> Callable[[Path], Path]:
    """A node of whole numbers."""
    x, nodes = info("x", ["N", 4], TensorProto.INT32), [node(op, "x", *(t.name for t in stored), out="y")]
    return lambda path: write(path, nodes, [x], stored, dtype=TensorProto.INT32)


def exploding(path: Path) -> Path:
    """Thirty functions, each of which calls the one before it twice."""
    functions = []
    for i in range(30):
        op, domain = (f"F{i - 1}", "f") if i else ("Relu", "")
        body = [node(op, "a", out="b", domain=domain), node(op, "b", out="c", domain=domain)]
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]
        functions.append(helper.make_function("f", f"F{i}", ["a"], ["c"], body, opsets))
    model = onnx.load(write(path, [node("F29", "x", out="y", domain="f")], ["N", 4], domains=["f"]))
    model.functions.extend(functions)
    onnx.save(model, path)
    return path


def choosing(path: Path) -> Path:
    """An If of what is fed."""
    branches = {
        f"{name}_branch": helper.make_graph([node(op, "x", out=op)], name, [], [info(op, None)])
        for name, op in (("then", "Relu"), ("else", "Neg"))
    }
    nodes = [
        node("ReduceSum", "x", out="s", keepdims=0),
        node("Greater", "s", "zero", out="c"),
        node("If", "c", out="y", name="choice", **branches),
    ]
    return write(path, nodes, ["N", 4], [tensor("zero", 0.0)])


SEQUENCE = helper.make_tensor_sequence_value_info("x", TensorProto.FLOAT, None)
TEXTS = info("x", [2], TensorProto.STRING)
IMAGE, WEIGHT = [1, 3, 8, 8], random("w", 4, 3, 3, 3)
FILES: dict[str, tuple[Callable[[Path], Path], list[str]]] = {
    "none": (lambda path: path, ["does not exist", "m.onnx"]),
    "a folder": (lambda path: path.parent, ["is not a file"]),
    **{f"{content[:4]!r}": (containing(content), ["m.onnx", "not an ONNX"])
       for content in (b"", b"hello", b"\x89PNG\r\n\x1a\n", b"PK\x03\x04rest of a .pt2", b"{}", b"\0" * 99)},
    "text": (as_text, ["not an ONNX file"]),
    "too large": (large, ["ONNX allows", "external data"]),
    **{f"opset {opset}": (lambda path, opset=opset: relu(path, opset=opset),  # type: ignore[misc]
                          [f"opset {opset} is not supported: convert it to 7 to", "version_converter"])
       for opset in (1, 6, onnx.defs.onnx_opset_version() + 1, 1 << 40, -1)},
    "newer": (lambda path: relu(path, ir=onnx.IR_VERSION + 1), ["IR version", "upgrade onnx"]),
    "control flow": (choosing, ["'choice'", "control flow (If)", "depends on data"]),
    "sequence": (
        lambda path: write(path, [node("SequenceLength", "x", out="y")], [SEQUENCE], dtype=TensorProto.INT64),
        ["input 'x' is no tensor (sequence_type)"],
    ),
    "texts": (
        lambda path: write(path, [node("Identity", "x", out="y")], [TEXTS], dtype=TensorProto.STRING),
        ["input 'x'", "element type"],
    ),
    "no shape": (lambda path: write(path, [node("Relu", "x", out="y")], [info("x", None)]),
                 ["'shape' of 'type' is required"]),
    **{f"{shape}": (lambda path, shape=shape: relu(path, shape),  # type: ignore[misc]
                    ["input 'x': dimension", "left open", "fixed size"])
       for shape in (["N", "h", 4], ["N", None, 4], [3, 5, 0], [2, 3, -7])},
    "no samples": (lambda path: relu(path, []), ["no input has a sample dimension"]),
    "integers": (integers("MatMul", tensor("w", np.ones((4, 3), np.int32))),
                 ["'MatMul_0' (linear) has weights but works on int32: cast to float"]),
    "integers of a function": (integers("Sigmoid"), ["Sigmoid", "unsupported type: tensor(int32)"]),
    "exploding functions": (exploding, ["functions expand to"]),
    "another kernel": (
        lambda path: write(path, [node("Conv", "x", "w", out="y", kernel_shape=[5, 5])], IMAGE, [WEIGHT]),
        ["Conv", "kernel"],
    ),
    "other groups": (lambda path: write(path, [node("Conv", "x", "w", out="y", group=2)], IMAGE, [WEIGHT]), ["Conv"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_files(name: str, tmp_path: Path) -> None:
    make, words = FILES[name]
    refused(make(tmp_path / "m.onnx"), *words)


def test_truncated(tmp_path: Path) -> None:
    nodes = [node("Gemm", "x", "w", out="h"), node("Relu", "h", out="y")]
    whole = write(tmp_path / "m.onnx", nodes, ["N", 8], [random("w", 8, 8)]).read_bytes()
    path = tmp_path / "t.onnx"
    for end in range(0, len(whole) - 1, 7):
        path.write_bytes(whole[:end])
        refused(path)


def test_operators(tmp_path: Path) -> None:
    stored = [random("bad", 5, 5), random("w", 1, 8, 4), random("r", 1, 8, 2), tensor("i", [9, 9, 9, 9, 9, 9])]
    unknown = ["GlobalLpPool", "(domain ai.onnx, ", "register_op('ai.onnx::GlobalLpPool'"]
    for nodes, words in (
        ([node("GlobalLpPool", "x", out="y", name="h")], ["'h'", *unknown]),
        ([node("GlobalLpPool", "x", out="y")], ["'GlobalLpPool_0'", *unknown]),
        ([node("Frobnicate", "x", out="y", name="f")], ["Frobnicate", "(Name: f"]),
        ([node("Conv", "x", "x", out="y")], ["'Conv_0' (Conv)", "'W' is computed from the input"]),
        ([node("Relu", "z", out="y")], ["not a valid ONNX model", "'z'"]),
        ([node("Relu", "x", "x", out="y")], ["not a valid ONNX model"]),
        ([node("Elu", "x", out="y", alpha="big")], ["not a valid ONNX model", "alpha"]),
        ([node("MatMul", "x", "bad", out="y")], ["MatMul"]),
        ([node("Reshape", "x", "i", out="y")], ["Reshape"]),
        ([node("Concat", "x", "bad", out="y", axis=7)], ["Concat"]),
        ([node("Gather", "x", "x", out="y")], ["Gather"]),
        ([node("Cast", "x", out="y", to=TensorProto.FLOAT8E5M2)], ["Cast", "float8e5m2"]),
        ([node("Constant", out="y", value=tensor("", 1.0))], ["no output depends on an input"]),
        ([node("Pad", "x", "i", out="y", mode="mirror")], ["Pad", "'mirror'"]),
        ([node("Relu", "x", out="y"), node("Add", "y", "bad", out="z")], ["Add", "ncompatible dimensions"]),
    ):
        refused(write(tmp_path / "m.onnx", nodes, [2, 3, 4], stored), *words)


def test_a_gather_of_rows_is_no_reshape(tmp_path: Path) -> None:
    """Though it gives them the shape that they had before they were merged."""
    nodes = [node("Reshape", "x", "s", out="r"), node("Gather", "r", "i", out="g"), node("Relu", "g", out="y")]
    stored = [tensor("s", [-1, 4]), tensor("i", [[1, 0, 2], [4, 5, 3]])]
    refused(write(tmp_path / "m.onnx", nodes, [2, 3, 4], stored), "cannot tell which rows belong to which sample")


def test_batches(tmp_path: Path) -> None:
    path = relu(tmp_path / "m.onnx")
    for batch in (0, -3, True, 1.5):
        refused(path, f"batch is {batch}; it must be at least 1, and a whole number", batch=batch)  # type: ignore[arg-type]


# ---- external data


def external(folder: Path, location: str, *, shape: tuple[int, ...] = (4, 3), **entries: str) -> Path:
    """A model of which the only weight is in another file."""
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=shape, data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, **entries}.items():
        weight.external_data.add(key=key, value=value)
    return write(folder / "m.onnx", [node("MatMul", "x", "w", out="y")], ["N", shape[0]], [weight])


def test_external_data(tmp_path: Path) -> None:
    values = np.arange(14, dtype=np.float32)
    (tmp_path / "weights").mkdir()
    values.tofile(tmp_path / "weights" / "w.bin")
    path = external(tmp_path, "weights/w.bin", offset="8", length="48")
    assert from_onnx(path, batch=2).parameter_count() == 12
    np.testing.assert_array_equal(weights_of(path)["w"], values[2:].reshape(4, 3))
    (tmp_path / "inside").symlink_to(tmp_path / "weights")
    assert from_onnx(external(tmp_path, "./inside/w.bin")).batch == 1


def test_external_data_outside_of_the_folder(tmp_path: Path) -> None:
    """By its path, or through links."""
    folder = tmp_path / "model"
    folder.mkdir()
    np.zeros(12, np.float32).tofile(tmp_path / "w.bin")
    outside = "/etc/hostname", "../w.bin", "a/../../w.bin", "", "..", "C:\\w.bin", "..\\w.bin", "a\0b", "//host/w", "."
    for location in outside:
        refused(external(folder, location), "external data of tensor 'w'")
    (folder / "w.bin").symlink_to(tmp_path / "w.bin")
    refused(external(folder, "w.bin"), "leads outside the model's own folder")
    (folder / "up").symlink_to(tmp_path)
    refused(external(folder, "up/w.bin"), "leads outside the model's own folder")


def test_external_data_that_is_missing_or_of_another_size(tmp_path: Path) -> None:
    refused(external(tmp_path, "w.bin"), "no file 'w.bin' beside the model")
    np.zeros(12, np.float32).tofile(tmp_path / "w.bin")
    for entries, words in (
        ({"offset": "4"}, "truncated"),
        ({"offset": "-8"}, "truncated"),
        ({"offset": "many"}, "element type is invalid"),
        ({"length": "44"}, "44 bytes cannot hold (4, 3)"),
    ):
        refused(external(tmp_path, "w.bin", **entries), "external data of tensor 'w'", words)
    refused(external(tmp_path, "m.onnx", shape=(1 << 40, 1 << 20)), "truncated")


def test_constants_of_external_data_are_checked_too(tmp_path: Path) -> None:
    hidden = TensorProto(name="", data_type=TensorProto.INT64, dims=[2], data_location=TensorProto.EXTERNAL)
    hidden.external_data.add(key="location", value="/etc/hostname")
    nodes = [node("Constant", out="c", value=hidden), node("Reshape", "x", "c", out="y")]
    refused(write(tmp_path / "m.onnx", nodes, [2, 4]), "not a path inside the model's own folder")


def test_reading_runs_nothing(tmp_path: Path) -> None:
    """Python operators and metadata in a file are data."""
    path = relu(tmp_path / "m.onnx")
    model = onnx.load(path)
    model.metadata_props.add(key="run", value=f"__import__('os').system('touch {tmp_path}/ran')")
    model.graph.node[0].doc_string = "!touch ran"
    onnx.save(model, path)
    from_onnx(path)
    assert read_onnx(path).graph.node[0].op_type == "Relu"
    assert not (tmp_path / "ran").exists()


def many_constants(path: Path, count: int, elements: int) -> Path:
    """A file of a few kB which computes constants of 8 bytes an element."""
    stored = [tensor("zero", 0), tensor("one", 1), tensor("many", elements), tensor("axes", [0])]
    nodes, last = [], "x"
    for i in range(count):
        nodes += [
            node("Range", "zero", "many", "one", out=f"r{i}"),
            node("ReduceMean", f"r{i}", out=f"i{i}", keepdims=0),
            node("Cast", f"i{i}", out=f"m{i}", to=TensorProto.FLOAT),
            node("Add", last, f"m{i}", out=f"y{i}" if i < count - 1 else "y"),
        ]
        last = f"y{i}"
    return write(path, nodes, ["N", 4], stored)


def test_a_small_file_of_many_constants_does_not_take_all_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """24 constants of half a GiB each; here of half a MiB, with as much less room."""
    monkeypatch.setattr(onnx_constants, "FOLD_BYTES", 2**20)
    path = many_constants(tmp_path / "bomb.onnx", 24, 2**16 - 1)
    assert path.stat().st_size < 8000
    with pytest.raises(LayerwiseError, match=r"computing the model's constants, up to .* takes more than 1 MiB"):
        from_onnx(path, batch=2)
    assert len(from_onnx(many_constants(tmp_path / "few.onnx", 2, 2**12), batch=2).inner) == 2
