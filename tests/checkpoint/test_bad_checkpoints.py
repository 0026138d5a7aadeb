"""Files of a checkpoint that are damaged, forged, links or pipes are refused, and nothing changes."""

import hashlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layerwise.checkpoint import latest, load, reader, save
from layerwise.checkpoint.shards import file_name, write_shards
from layerwise.checkpoint.step_folders import find
from layerwise.commands.export import export
from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.run.state.state import Shard
from tests.checkpoint.runs import OPTIMIZERS, alone, refused, saved, train
from tests.examples import examples

FILE = file_name(0)


def test_no_checkpoint(tmp_path: Path) -> None:
    assert "there is no such folder" in refused(tmp_path / "none")
    assert "has no complete checkpoint" in refused(tmp_path)
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / ".step-00000004.tmp-12345678").mkdir()
    (tmp_path / ".step-00000004.tmp-12345678" / "checkpoint.json").write_text("{}")
    assert "has no complete checkpoint" in refused(tmp_path)
    assert "cannot be read" in refused(tmp_path / "nul\0")
    (tmp_path / "file").write_text("")
    assert "cannot be read: Not a directory" in refused(tmp_path / "file")


@examples(40)
@given(st.data())
def test_damaged_files(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A bit flipped, bytes cut off or added, in any file."""
    folder = tmp_path_factory.mktemp("run")
    saved(folder, make=OPTIMIZERS["adam"])
    path = folder / "step-00000007" / data.draw(st.sampled_from(["checkpoint.json", FILE]))
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    how = data.draw(st.sampled_from(["flip", "cut", "add"]))
    if how == "flip":
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    elif how == "cut":
        del content[at:]
    else:
        content[at:at] = b"0"
    try:
        harmless = json.loads(content) == json.loads(path.read_bytes())  # white space
    except ValueError:
        harmless = False
    path.write_bytes(content)
    module = alone(1)
    if harmless:
        load(folder, module)
    else:
        assert str(folder) in refused(folder, module, OPTIMIZERS["adam"](module.parameters()))


class Trap:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", [FILE, "checkpoint.json"])
def test_files_that_link_out_of_the_folder_are_refused(name: str, tmp_path: Path) -> None:
    saved(tmp_path / "ck")
    folder = latest(tmp_path / "ck")
    assert folder is not None
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    assert f"{name}' is a link" in refused(folder)
    with pytest.raises(LayerwiseError, match="is a link or not a plain file"):
        export(tmp_path / "ck", tmp_path / "out.safetensors")


def test_a_file_that_is_gone_or_a_pipe_which_does_not_block(tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / "step-00000007" / FILE
    path.unlink()
    assert "damaged or missing: No such file or directory" in refused(tmp_path)
    os.mkfifo(path)
    assert "not a plain file" in refused(tmp_path)


@pytest.mark.parametrize("name", ["step-00000007", "step-00000003", ".step-00000007.replaced"])
def test_step_folders_that_are_links_are_refused_and_stay(name: str, tmp_path: Path) -> None:
    """They used to be renamed to .step-N.tmp-..., and stayed so."""
    module = saved(tmp_path / "elsewhere")
    (tmp_path / "ck").mkdir()
    (tmp_path / "ck" / name).symlink_to(tmp_path / "elsewhere" / "step-00000007")
    for attempt in (lambda: save(tmp_path / "ck", module, None, {}, keep=1), lambda: latest(tmp_path / "ck")):
        with pytest.raises(LayerwiseError, match=f"{name} is a link"):
            attempt()
    assert [path.name for path in (tmp_path / "ck").iterdir()] == [name]
    assert find(tmp_path / "elsewhere").is_dir()
    (tmp_path / "ck" / name).rename(tmp_path / "ck" / ".step-00000007.tmp-1f3a")  # as earlier versions left them
    save(tmp_path / "ck", module, None, {})
    assert [path.name for path in (tmp_path / "ck").iterdir()] == ["step-00000007"]
    assert find(tmp_path / "elsewhere" / "step-00000007").is_dir()


def forged(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Alters checkpoint.json, with a checksum that fits."""
    path = folder / "step-00000007" / "checkpoint.json"
    body = json.loads(path.read_text())
    del body["checksum"]
    change(body)
    path.write_text(json.dumps({**body, "checksum": reader.checksum(body)}))


def rewritten(folder: Path, content: bytes) -> None:
    """Another file of tensors, with checksums that fit."""
    (folder / "step-00000007" / FILE).write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    forged(folder, lambda body: body["files"].update({FILE: digest}))


def test_no_pickle_runs(tmp_path: Path) -> None:
    """Not as a rank's file, whatever checkpoint.json says of it; not as checkpoint.json."""
    step, trap = tmp_path / "step-00000007", tmp_path / "sprung"
    content = pickle.dumps(Trap(trap))
    saved(tmp_path)
    (step / FILE).write_bytes(content)
    assert "makes no sense" in refused(tmp_path)
    rewritten(tmp_path, content)
    assert "makes no sense" in refused(tmp_path)
    (step / "checkpoint.json").write_bytes(content)
    assert "not a text file" in refused(tmp_path)
    (step / "checkpoint.json").unlink()
    assert "no complete checkpoint" in refused(tmp_path)
    assert "no complete checkpoint" in refused(step)
    assert not trap.exists()
    pickle.loads(content)
    assert trap.exists()  # so it would have


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda b: b.update(version=3),
            "has version 3, but this layerwise reads version 4: export its weights with `layerwise export` of the "
            "version that wrote it, and start with --weights",
        ),
        (lambda b: b.update(format="other"), "not a layerwise checkpoint"),
        (lambda b: b.pop("format"), "not a layerwise checkpoint"),
        (lambda b: b.pop("files"), "makes no sense"),
        (lambda b: b.update(files=[]), "makes no sense"),
        (lambda b: b["files"].pop(FILE), "is of another model: it has no"),
        (lambda b: b["files"].update({"../evil.safetensors": "0"}), "makes no sense"),
        (lambda b: b["about"].pop("steps"), "makes no sense"),
        (lambda b: b["about"].update(steps=-1), "makes no sense"),
        (lambda b: b["about"].update(progress=[]), "makes no sense"),
        (lambda b: b["about"].update(optimizer=3), "makes no sense"),
        (lambda b: b["about"]["optimizer"].update(groups=[3]), "makes no sense"),
        (lambda b: b["about"]["optimizer"].update(numbers=[]), "makes no sense"),
        (lambda b: b["about"]["optimizer"]["groups"][0].update(lr={"float": "x"}), "makes no sense"),
    ],
)
def test_forged_seals(tmp_path: Path, change: Callable[[dict[str, Any]], object], reason: str) -> None:
    module = alone(0, 5)
    optimizer = OPTIMIZERS["adam"](module.parameters())
    train(module, optimizer, 2)
    save(tmp_path, module, optimizer, {})
    forged(tmp_path, change)
    assert reason in refused(tmp_path, module, optimizer)


BIAS = "model.conv.bias"  # of 5 elements


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda h, s: h.pop("__metadata__"), "makes no sense"),
        (lambda h, s: s.pop(BIAS), "makes no sense"),
        (lambda h, s: s.update({BIAS: 3}), "makes no sense"),
        (lambda h, s: s[BIAS].pop("shape"), "makes no sense"),
        (lambda h, s: s[BIAS].update(shape=3), "is not a list of sizes"),
        (lambda h, s: s[BIAS].update(shape=[5.0]), "is not a list of sizes"),
        (lambda h, s: s[BIAS].update(shape=[1] * 65), "is not a list of sizes"),
        (lambda h, s: s[BIAS].update(shape=[2**60]), "5 of the 1152921504606846976 elements"),
        (lambda h, s: s[BIAS].update(saved_offsets=[1]), "outside its shape"),
        (lambda h, s: s[BIAS].update(saved_offsets=[-1]), "outside its shape"),
        (lambda h, s: s[BIAS].update(saved_offsets=[]), "makes no sense"),
        (lambda h, s: h[BIAS].update(dtype="C64"), "makes no sense"),
        (lambda h, s: h[BIAS].update(dtype="I64"), "makes no sense"),
        (lambda h, s: h[BIAS].update(shape=[4]), "makes no sense"),
        (lambda h, s: h[BIAS].update(shape=[2**62]), "makes no sense"),
        (lambda h, s: h[BIAS].update(data_offsets=[0, 2**60]), "makes no sense"),
        (lambda h, s: h[BIAS].update(data_offsets=[-20, 0]), "makes no sense"),
        (lambda h, s: h.update({"model.odd": h[BIAS]}), "makes no sense"),
    ],
)
def test_forged_headers(
    tmp_path: Path, change: Callable[[dict[str, Any], dict[str, Any]], object], reason: str
) -> None:
    """Of a rank's file, with checksums that fit; `change` has the header and what it says of boxes."""
    saved(tmp_path)
    content = (tmp_path / "step-00000007" / FILE).read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    sharding = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
    change(header, sharding)
    if "__metadata__" in header:
        header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(sharding)
    text = json.dumps(header).encode()
    rewritten(tmp_path, len(text).to_bytes(8, "little") + text + content[end:])
    told = refused(tmp_path)
    assert "is damaged: a file of tensors makes no sense" in told
    assert reason in told


def boxes_of_ranks(folder: Path, boxes: list[tuple[int, int]], shape: int = 5) -> None:
    """The step's checkpoint, where ranks wrote these boxes of a tensor: where each begins, how many elements it has."""
    digests = {}
    for rank, (lo, extent) in enumerate(boxes):
        box = Box((lo,), (lo + extent,))
        shard = Shard("model.bias", (), (shape,), box, torch.ones(extent), trainable=True, first=True)
        digests[file_name(rank)] = write_shards(folder / "step-00000007" / file_name(rank), [shard])
    forged(folder, lambda body: body.update(files=digests))


def test_boxes_that_are_there_twice_do_not_stand_in_for_others(tmp_path: Path) -> None:
    """As many elements as the tensor has, but two of them twice and two not at all."""
    saved(tmp_path)
    boxes_of_ranks(tmp_path, [(0, 2), (0, 2), (4, 1)])
    assert "some elements of 'model.bias' are stored twice, and others are missing" in refused(tmp_path)
    boxes_of_ranks(tmp_path, [(0, 2), (2, 2)])
    assert "only 4 of the 5 elements of 'model.bias' are stored" in refused(tmp_path)


def test_files_of_ranks_that_contradict_each_other(tmp_path: Path) -> None:
    saved(tmp_path)
    boxes_of_ranks(tmp_path, [(0, 2), (2, 3)])
    path = tmp_path / "step-00000007" / file_name(1)
    for shape, dtype in ((6, torch.float32), (5, torch.float64)):
        values = torch.ones(3, dtype=dtype)
        other = Shard("model.bias", (), (shape,), Box((2,), (5,)), values, trainable=True, first=True)
        digest = write_shards(path, [other])
        forged(tmp_path, lambda body, digest=digest: body["files"].update({path.name: digest}))
        assert "'model.bias' differs in element type or shape between files" in refused(tmp_path)


def test_a_pipe_in_the_place_of_a_step_is_refused_and_no_save_waits_for_it(tmp_path: Path) -> None:
    module = alone(0, 7)
    os.mkfifo(tmp_path / ".step-00000003.tmp-12ab34cd")
    save(tmp_path, module, None, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]
    os.mkfifo(tmp_path / "step-00000003")
    with pytest.raises(LayerwiseError, match="step-00000003 is no folder: replace it by the folder itself, or remo"):
        save(tmp_path, module, None, {})
    assert (tmp_path / "step-00000003").is_fifo()
