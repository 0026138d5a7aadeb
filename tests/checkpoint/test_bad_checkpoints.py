"""Files of a checkpoint that are damaged, forged, links or pipes are refused, and nothing changes."""

import hashlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from layerwise.checkpoint import latest, load, reader, save
from layerwise.checkpoint.step_folders import find
from layerwise.comm.solo import SoloComm
from layerwise.errors import LayerwiseError
from layerwise.export import export
from tests.checkpoint.runs import OPTIMIZERS, alone, refused, saved, train
from tests.examples import examples
from tests.run.cut_modules import CutModule, cutting, tensors


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
    path = folder / "step-00000007" / data.draw(st.sampled_from(["checkpoint.json", ".metadata", "__0_0.distcp"]))
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


def test_file_that_is_gone(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "step-00000007" / "__0_0.distcp").unlink()
    assert "damaged or gone: No such file or directory" in refused(tmp_path)


class Trap:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "checkpoint.json"])
def test_files_that_link_out_of_the_folder_are_refused(name: str, tmp_path: Path) -> None:
    saved(tmp_path / "ck")
    folder = latest(tmp_path / "ck")
    assert folder is not None
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    assert f"{name}' is a link" in refused(folder)
    with pytest.raises(LayerwiseError, match="is a link, or no plain file"):
        export(tmp_path / "ck", tmp_path / "out.safetensors")


def test_a_pipe_in_the_place_of_a_file_does_not_block(tmp_path: Path) -> None:
    saved(tmp_path / "ck")
    folder = latest(tmp_path / "ck")
    assert folder is not None
    (folder / "__0_0.distcp").unlink()
    os.mkfifo(folder / "__0_0.distcp")
    assert "no plain file" in refused(folder)


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
    """Another .metadata, with checksums that fit."""
    (folder / "step-00000007" / ".metadata").write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    forged(folder, lambda body: body["files"].update({".metadata": digest}))


def test_no_pickle_runs(tmp_path: Path) -> None:
    """Not as a rank's file, not as .metadata, whatever checkpoint.json says of them; not as checkpoint.json."""
    step, trap = tmp_path / "step-00000007", tmp_path / "sprung"
    content = pickle.dumps(Trap(trap))
    saved(tmp_path)
    description = (step / ".metadata").read_bytes()
    (step / ".metadata").write_bytes(content)
    assert "SHA-256" in refused(tmp_path)
    rewritten(tmp_path, content)
    assert ".metadata makes no sense" in refused(tmp_path)
    rewritten(tmp_path, description)
    (step / "__0_0.distcp").write_bytes(content)
    assert "SHA-256" in refused(tmp_path)
    digest = hashlib.sha256(content).hexdigest()
    forged(tmp_path, lambda body: body["files"].update({"__0_0.distcp": digest}))
    assert "damaged" in refused(tmp_path)
    (step / "checkpoint.json").write_bytes(content)
    assert "not a text file" in refused(tmp_path)
    (step / "checkpoint.json").unlink()
    assert "no complete checkpoint" in refused(tmp_path)
    assert "damaged" in refused(step)  # as one that torch wrote
    (step / ".metadata").write_bytes(content)
    assert ".metadata makes no sense" in refused(step)
    assert not trap.exists()
    pickle.loads(content)
    assert trap.exists()  # so it would have


def test_no_pickle_of_an_optimizers_settings_runs(tmp_path: Path) -> None:
    trap, module = tmp_path / "sprung", alone()
    optimizer = OPTIMIZERS["adam"](module.parameters())
    states = optimizer.state_dict()
    states["param_groups"][0]["lr"] = Trap(trap)
    dcp.save({"model": dict(module.held), "optimizer": states}, checkpoint_id=tmp_path / "ck", no_dist=True)
    assert "is damaged: __0_0.distcp makes no sense" in refused(tmp_path / "ck", alone(1), optimizer)
    assert not trap.exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda b: b.update(version=1), "version 1; this layerwise reads version 3"),
        (lambda b: b.update(format="other"), "not a layerwise checkpoint"),
        (lambda b: b.pop("format"), "not a layerwise checkpoint"),
        (lambda b: b.pop("files"), "makes no sense"),
        (lambda b: b.update(files=[]), "makes no sense"),
        (lambda b: b["files"].pop(".metadata"), "makes no sense"),
        (lambda b: b["files"].update({"../evil.distcp": "0"}), "makes no sense"),
        (lambda b: b["about"].pop("steps"), "makes no sense"),
        (lambda b: b["about"].update(steps=-1), "makes no sense"),
        (lambda b: b["about"].update(progress=[]), "makes no sense"),
        (lambda b: b["about"].update(optimizer=3), "makes no sense"),
    ],
)
def test_forged_seals(tmp_path: Path, change: Callable[[dict[str, Any]], object], reason: str) -> None:
    module = alone(0, 5)
    optimizer = OPTIMIZERS["adam"](module.parameters())
    train(module, optimizer, 2)
    save(tmp_path, module, optimizer, {})
    forged(tmp_path, change)
    assert reason in refused(tmp_path, module, optimizer)


def size(*extents: int) -> torch.Size:
    return torch.Size(extents)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.state_dict_metadata.update({"model.odd": 3}), "makes no sense"),
        (lambda m: m.state_dict_metadata["model.scale"].__dict__.update(size=3), "makes no sense"),
        (lambda m: setattr(m.state_dict_metadata["model.scale"].properties, "dtype", torch.complex64), "no place in"),
        (lambda m: m.state_dict_metadata["model.conv.bias"].chunks.clear(), "0 of the 5 elements of 'model.conv.bias'"),
        (
            lambda m: setattr(m.state_dict_metadata["model.conv.bias"].chunks[0], "offsets", size(1)),
            "outside its shape",
        ),
        (lambda m: setattr(m.state_dict_metadata["model.conv.bias"].chunks[0], "offsets", (-1,)), "outside its shape"),
        (lambda m: setattr(m.state_dict_metadata["model.conv.bias"].chunks[0], "offsets", size()), "makes no sense"),
        (
            lambda m: setattr(m.state_dict_metadata["model.conv.bias"], "size", size(2**60)),
            "5 of the 11529215046068469",
        ),
        (lambda m: [setattr(i, "relative_path", "/etc/passwd") for i in m.storage_data.values()], "file '/etc/passwd'"),
        (lambda m: [setattr(i, "transform_descriptors", ["zstd"]) for i in m.storage_data.values()], "compressed"),
        (lambda m: m.storage_data.clear(), "makes no sense"),
    ],
)
def test_forged_descriptions(tmp_path: Path, change: Callable[[Any], object], reason: str) -> None:
    saved(tmp_path)
    description = pickle.loads((tmp_path / "step-00000007" / ".metadata").read_bytes())
    change(description)
    rewritten(tmp_path, pickle.dumps(description))
    assert reason in refused(tmp_path)


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        (b"\x8c\x07pathlib\x8c\x09PosixPath\x93N}\x8c\x04evil\x88s\x86b.", "a Name stands where a Record belongs"),
        (b"})" + b"".join(b"\x94h" + bytes([i]) + b"\x86" for i in range(60)) + b"K\x01s.", "stands where a Metadata"),
        (b"\x96" + (2**40).to_bytes(8, "little") + b".", "makes no sense"),
    ],
    ids=["attributes of a class", "a key of 60 tuples in tuples", "an array of 2^40 bytes"],
)
def test_a_description_that_attacks_whoever_reads_it_is_refused(tmp_path: Path, attack: bytes, reason: str) -> None:
    saved(tmp_path)
    rewritten(tmp_path, b"\x80\x04" + attack)
    assert reason in refused(tmp_path)
    assert not hasattr(PurePosixPath, "evil")


def test_boxes_that_are_there_twice_do_not_stand_in_for_others(tmp_path: Path) -> None:
    """As many elements as the tensor has, but two of them twice and two not at all, of a checkpoint without a seal."""
    dcp.save({"model": dict(alone().held)}, checkpoint_id=tmp_path / "ck", no_dist=True)
    described = tmp_path / "ck" / ".metadata"
    description = pickle.loads(described.read_bytes())
    bias, name = description.state_dict_metadata["model.conv.bias"], "model.conv.bias"
    info = next(info for index, info in description.storage_data.items() if index.fqn == name)
    boxes = [(0, 2), (0, 2), (4, 1)]
    bias.chunks[:] = [ChunkStorageMetadata(size(lo), size(extent)) for lo, extent in boxes]
    description.storage_data |= {MetadataIndex(name, size(lo)): info for lo, _ in boxes}
    described.write_bytes(pickle.dumps(description))
    assert f"of {name!r} some elements are there twice, and others not at all" in refused(tmp_path / "ck")


def test_a_pipe_in_the_place_of_a_step_is_refused_and_no_save_waits_for_it(tmp_path: Path) -> None:
    whole = tensors(0)
    module = CutModule(SoloComm(), whole, cutting(whole, 1, 0), 7)
    os.mkfifo(tmp_path / ".step-00000003.tmp-12ab34cd")
    save(tmp_path, module, None, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]
    os.mkfifo(tmp_path / "step-00000003")
    with pytest.raises(LayerwiseError, match="step-00000003 is no folder: put the folder itself in its place, or remo"):
        save(tmp_path, module, None, {})
    assert (tmp_path / "step-00000003").is_fifo()
