"""A .pt2 file is read without running anything that is in it."""

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layerwise.errors import LayerwiseError
from layerwise.importers.load import load_network
from layerwise.importers.torch.from_torch import from_torch
from layerwise.importers.torch.read.load_pt2 import load_pt2

Change = Callable[[str, bytes], bytes | None]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of a small model with a buffer, a constant and an open batch."""
    path = tmp_path_factory.mktemp("pt2") / "good.pt2"
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(Small(), (torch.randn(6, 16),), dynamic_shapes=({0: batch},))
    torch.export.save(program, path)
    return path


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 4)
        self.register_buffer("shift", torch.arange(4.0))
        self.scale = torch.full((4,), 2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.view(x.shape[0], -1)) * self.scale + self.shift


def altered(good: Path, change: Change, name: str = "altered.pt2") -> Path:
    """A copy of the file, its members changed; None drops one."""
    path = good.with_name(name)
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(path, "w") as target:
        for member in source.namelist():
            content = change(member, source.read(member))
            if content is not None:
                target.writestr(member, content)
    return path


def in_json(edit: Callable[[Any], None], member: str = "models/model.json") -> Change:
    def change(name: str, content: bytes) -> bytes:
        if not name.endswith(member):
            return content
        document = json.loads(content)
        edit(document)
        return json.dumps(document).encode()

    return change


class Payload:
    """Unpickling it runs a command."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.witness}",)


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def entry(name: str, **changes: Any) -> Change:
    """Changes what the file says of where a weight is; drops it where nothing is given."""

    def edit(document: Any) -> None:
        if changes:
            document["config"][name]["tensor_meta"].update(changes)
        else:
            del document["config"][name]

    kind = "constants" if name == "scale" else "weights"
    return in_json(edit, f"model_{kind}_config.json")


WITHOUT_VALUES: dict[str, tuple[Change, str]] = {
    "no weights": (lambda n, c: None if "weights_config" in n else c, "member 'data/weights/.*' is missing"),
    "no constants": (lambda n, c: None if "constants_config" in n else c, "member 'data/constants/.*' is missing"),
    "a parameter": (entry("fc.weight"), "it has no value of 'fc.weight'"),
    "a buffer": (entry("shift"), "it has no value of 'shift'"),
    "a constant": (entry("scale"), "it has no value of 'scale'"),
    "another shape": (
        entry("fc.weight", sizes=[{"as_int": 16}, {"as_int": 4}]),
        r"stores 'fc.weight' as float32 of shape \(16, 4\), and its graph has float32 of shape \(4, 16\)",
    ),
    "another type": (entry("fc.bias", dtype=4), "stores 'fc.bias' as int32 of shape"),
    "one pickle": (lambda n, c: c, "its weights are in one pickle"),
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_VALUES)
def test_a_file_that_lacks_a_weight_does_not_train_from_random_values(name: str, good: Path) -> None:
    change, said = WITHOUT_VALUES[name]
    path = altered(good, change)
    if name == "one pickle":  # as torch 2.8 wrote it
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("good/data/weights/model.pt", saved(Small().state_dict()))
    with pytest.raises(LayerwiseError, match=said) as caught:
        load_network(str(path), 6)
    assert "\n" not in str(caught.value)


def test_open_batch_buffers_and_constants(good: Path) -> None:
    program = load_pt2(good)
    assert program.name == "good"
    values = {s.target: s.read() for s in program.sources}
    assert torch.equal(values["shift"], torch.arange(4.0))  # type: ignore[arg-type]
    assert torch.equal(values["scale"], torch.full((4,), 2.0))  # type: ignore[arg-type]
    graph = from_torch(program)
    assert graph.batch == 6
    assert graph.digest == from_torch(Small(), (torch.randn(6, 16),)).digest
    assert from_torch(program, (torch.randn(32, 16),)).rebatch(64).batch == 64


PICKLES = {
    "sample inputs": "data/sample_inputs/model.pt",
    "all weights": "data/weights/model.pt",
    "all constants": "data/constants/model.pt",
    "weight": "data/weights/weight_0",
    "constant": "data/constants/tensor_0",
    "custom object": "data/constants/custom_obj_0",
    "opaque object": "data/constants/opaque_obj_0",
}


@pytest.mark.parametrize("kind", PICKLES)
def test_a_pickle_that_runs_code_is_refused(kind: str, good: Path, tmp_path: Path) -> None:
    witness, member = tmp_path / "ran", PICKLES[kind]
    evil = pickle.dumps(Payload(witness)) if "object" in kind else saved((Payload(witness),))

    def config(name: str, content: bytes) -> bytes:
        folder = member.rpartition("/")[0]
        if not name.endswith("_config.json") or folder not in name:
            return content
        document = json.loads(content)
        entry = next(e for k, e in document["config"].items() if e["path_name"].endswith("_0") or k == "scale")
        entry.update(path_name=member.rpartition("/")[2], use_pickle=True)
        return json.dumps(document).encode()

    def change(name: str, content: bytes) -> bytes:
        content = evil if name.endswith(member) else content
        return config(name, content) if kind in ("weight", "constant", "custom object", "opaque object") else content

    path = altered(good, change)
    with zipfile.ZipFile(path, "a") as archive:
        root = archive.namelist()[0].partition("/")[0]
        if f"{root}/{member}" not in archive.namelist():
            archive.writestr(f"{root}/{member}", evil)
    with pytest.raises(LayerwiseError, match=f"refused: member '{member}'") as caught:
        load_pt2(path)
    assert not witness.exists()
    assert "\n" not in str(caught.value)
    # The payload is real: this is what PyTorch's unpickling of it does.
    (pickle.loads if "object" in kind else lambda c: torch.load(io.BytesIO(c), weights_only=False))(evil)
    assert witness.exists()


def test_strings_that_torch_evaluates_are_not_evaluated(good: Path, tmp_path: Path) -> None:
    """torch 2.13's reader passes sizes to sympify, and imports the modules that a tree of outputs names."""
    witness = tmp_path / "ran"
    code = f"__import__('os').system('touch {witness}') or Integer(6)"

    def input_size(document: Any) -> None:
        document["graph_module"]["graph"]["tensor_values"]["x"]["sizes"][0]["as_expr"]["expr_str"] = code

    def inner_size(document: Any) -> None:
        values = document["graph_module"]["graph"]["tensor_values"]
        values["linear"]["sizes"][0] = {"as_expr": {"expr_str": code, "hint": {"as_int": 6}}}

    def tree(document: Any) -> None:
        module = {"default_factory_module": "layerwise_evil", "default_factory_name": "x", "dict_context": []}
        spec = [1, {"type": "collections.defaultdict", "context": module, "children_spec": []}]
        document["graph_module"]["module_call_graph"][0]["signature"]["out_spec"] = json.dumps(spec)

    def operator(document: Any) -> None:
        document["graph_module"]["graph"]["nodes"][-1]["target"] = "torch.os.system"

    def file_reader(document: Any) -> None:  # an operator that touches files is unknown here, and nothing runs it
        node = document["graph_module"]["graph"]["nodes"][-1]
        name = {"name": "filename", "arg": {"as_string": str(witness)}, "kind": 1}
        node.update(target="torch.ops.aten.from_file.default", inputs=[name])
        node["inputs"] += [
            {"name": "shared", "arg": {"as_bool": True}, "kind": 1},
            {"name": "size", "arg": {"as_int": 24}, "kind": 1},
        ]

    (tmp_path / "layerwise_evil.py").write_text(f"open({str(witness)!r}, 'w')")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        for edit in (input_size, inner_size, tree, operator, file_reader):
            try:
                from_torch(load_pt2(altered(good, in_json(edit))))
            except LayerwiseError as error:
                assert "\n" not in str(error), edit  # noqa: PT017
            assert not witness.exists(), edit.__name__


def test_files_that_are_none(good: Path, tmp_path: Path) -> None:
    whole = good.read_bytes()
    files: dict[str, tuple[bytes | None, str]] = {
        "missing": (None, "no such file"),
        "empty": (b"", "not a .pt2 file, or a damaged one"),
        "noise": (b"\x00" * 4096, "not a .pt2 file, or a damaged one"),
        "truncated": (whole[: len(whole) // 2], "not a .pt2 file, or a damaged one"),
        "weights": (saved({"a": torch.ones(2)}), "it holds weights or a pickled module"),
    }
    for name, (content, said) in files.items():
        path = tmp_path / f"{name}.pt2"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(LayerwiseError, match=said) as caught:
            load_pt2(path)
        assert str(caught.value).startswith(str(path))
        assert "\n" not in str(caught.value)
    with pytest.raises(LayerwiseError, match=r"not a .pt2 file"):
        load_pt2(tmp_path)


def test_flipped_bytes_are_noticed(good: Path, tmp_path: Path) -> None:
    content = bytearray(good.read_bytes())
    at = content.index(b'"graph_module"')
    content[at + 1 : at + 6] = b"xxxxx"
    (tmp_path / "flipped.pt2").write_bytes(content)
    with pytest.raises(LayerwiseError, match="damaged"):
        load_pt2(tmp_path / "flipped.pt2")


BROKEN: dict[str, tuple[Change, str]] = {
    "no model": (lambda n, c: None if "models/" in n else c, "holds 0 exported programs"),
    "no json": (lambda n, c: b"{" if "models/" in n else c, r"member 'models/model.json' is not JSON"),
    "deep json": (lambda n, c: b"[" * 100_000 if "models/" in n else c, r"member 'models/model.json' is not JSON"),
    "other json": (lambda n, c: b"[1]" if "models/" in n else c, "is not what torch.export.save writes"),
    "no format": (lambda n, c: None if "archive_format" in n else c, "it is a zip archive, but no .pt2 file"),
    "other schema": (in_json(lambda d: d["schema_version"].update(major=5)), "its schema has version 5"),
    "no nodes": (in_json(lambda d: d["graph_module"]["graph"].pop("nodes")), "is not what torch.export.save writes"),
    "wrong name": (
        in_json(lambda d: d["graph_module"]["graph"]["nodes"][-1]["inputs"][0]["arg"]["as_tensor"].update(name="q")),
        "is not what torch.export.save writes",
    ),
    "wrong type": (in_json(lambda d: d["graph_module"].update(signature=3)), "is not what torch.export.save writes"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_members(name: str, good: Path) -> None:
    change, said = BROKEN[name]
    with pytest.raises(LayerwiseError, match=said) as caught:
        load_pt2(altered(good, change))
    assert "\n" not in str(caught.value)


def test_zip_tricks_are_refused(good: Path) -> None:
    path = good.with_name("tricks.pt2")
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for member in source.namelist():
            target.writestr(member, source.read(member))
    with pytest.raises(LayerwiseError, match="is compressed, which torch never writes"):
        load_pt2(path)
    path.write_bytes(good.read_bytes())
    with zipfile.ZipFile(path, "a") as target, pytest.warns(UserWarning, match="Duplicate name"):
        target.writestr("good/models/model.json", b"{}")
    with pytest.raises(LayerwiseError, match="several members of the same name"):
        load_pt2(path)


def test_an_operator_that_is_not_registered_here(good: Path) -> None:
    """Custom operators need their package imported, or a row of their own."""

    def edit(document: Any) -> None:
        document["graph_module"]["graph"]["nodes"][-1]["target"] = "torch.ops.acme.swoosh.default"

    program = load_pt2(altered(good, in_json(edit)))
    with pytest.raises(
        LayerwiseError, match=r"operator acme::swoosh is unknown; register it with layerwise.register_op"
    ):
        from_torch(program)


def test_numbers_of_another_byte_order_are_not_read_as_ours(good: Path) -> None:
    file = altered(good, lambda name, content: b"big" if name.endswith("byteorder") else content)
    with pytest.raises(LayerwiseError, match="written on a big-endian machine"):
        load_pt2(file)
