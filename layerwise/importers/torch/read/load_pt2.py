"""Reading .pt2 files, which may come from anybody, without running what is in them.

This reader is here as `torch.export.load` of PyTorch (2.13) runs code of a file: it unpickles in full the weights
and constants that are marked so, custom objects and sample inputs (weights_only=False, in
torch/export/pt2_archive/_package.py and torch/_export/serde/serialize.py), and evaluates sizes as Python (pt2_json.py).
Nothing of that is called here: every member that PyTorch would unpickle is read with weights_only=True, and the file
refused where that fails; weights are read from their raw bytes when they are asked for.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

import torch

from layerwise.errors import LayerwiseError, first_line
from layerwise.files import parse_json
from layerwise.importers.torch.calls.constants import OF_A_FILE
from layerwise.importers.torch.read.pt2_json import DTYPES, Json, read_json
from layerwise.importers.torch.traced_program import TracedProgram, Value

T = TypeVar("T")
OBJECTS = ("custom_obj_", "opaque_obj_")  # pickles of C++ and Python objects, which nothing can vet


def load_pt2(path: str | os.PathLike[str]) -> TracedProgram:
    """The program of a file that `torch.export.save` wrote, for `from_torch`. Runs nothing of it.

    Raises LayerwiseError for a file that is missing, damaged, or that would run code on being loaded by PyTorch.
    """
    return _read(Path(path), lambda archive: archive.program())


def load_pt2_weights(path: str | os.PathLike[str]) -> tuple[dict[str, Callable[[], torch.Tensor]], dict[str, str]]:
    """How to read each parameter and buffer, on the CPU; and for each name of the state dict the first of its tensor.

    Weights without values (of the meta device) are left out. Raises LayerwiseError as `load_pt2`.
    """
    file = Path(path)
    weights = _read(file, lambda archive: archive.weights())
    shared = _shared(weights)

    def value(name: str) -> torch.Tensor:
        value = _read(file, lambda archive: archive.value(weights[name]))
        if value is None:
            raise LayerwiseError(f"{file}: the value of {name!r} is damaged or of an element type unknown here")
        return value

    kept = {name: partial(value, name) for name, item in weights.items() if not _is_meta(item)}
    return dict(kept), shared


def _read(file: Path, read: Callable[[_Archive], T]) -> T:
    try:
        with zipfile.ZipFile(file) as archive:
            return read(_Archive(file, archive))
    except LayerwiseError as error:
        raise LayerwiseError(f"{file}: {error}") from None
    except FileNotFoundError:
        raise LayerwiseError(f"{file}: no such file") from None
    except Exception as error:  # whatever it is: nothing runs here but the reading of this file
        said = f"{type(error).__name__}: {first_line(error)}"
        raise LayerwiseError(f"{file}: not a .pt2 file, or a damaged one ({said})") from None


class _Archive:
    def __init__(self, file: Path, archive: zipfile.ZipFile) -> None:
        self.file, self.archive = file, archive
        names = archive.namelist()
        if len(set(names)) < len(names):
            raise LayerwiseError("refused: it has several members of the same name")
        for member in archive.infolist():
            if member.compress_type != zipfile.ZIP_STORED or member.file_size > file.stat().st_size:
                raise LayerwiseError(f"refused: member {member.filename!r} is compressed, which torch never writes")
        self.root = names[0].partition("/")[0] + "/" if names else ""
        self.members = {name.removeprefix(self.root): name for name in names if name.startswith(self.root)}
        if "archive_format" not in self.members or self.bytes("archive_format") != b"pt2":
            raise LayerwiseError(_other_kind(set(names) | set(self.members)))
        if "byteorder" in self.members and self.bytes("byteorder") != b"little":
            raise LayerwiseError("refused: it was written on a big-endian machine; export it again on another")

    def bytes(self, member: str) -> bytes:
        """Contents of a member; its checksum is verified."""
        if member not in self.members:
            raise LayerwiseError(f"member {member!r} is missing")
        return self.archive.read(self.members[member])

    def json(self, member: str) -> Json:
        try:
            document: Json = parse_json(self.bytes(member).decode(), f"member {member!r}")
        except UnicodeDecodeError:
            raise LayerwiseError(f"member {member!r} is not JSON: it is no text") from None
        return document

    @cached_property
    def model(self) -> str:
        """The member with the graph."""
        models = [m for m in self.members if m.startswith("models/") and m.endswith(".json")]
        model = next((m for m in models if m == "models/model.json"), models[0] if len(models) == 1 else None)
        if model is None:
            raise LayerwiseError(f"it holds {len(models)} exported programs ({', '.join(models)}), not one")
        return model

    def weights(self) -> dict[str, Json]:
        """Where each parameter and buffer is, once all that PyTorch would unpickle is known to be plain data."""
        self.vet()
        return self.config("weights")

    def value(self, item: Json) -> torch.Tensor | None:
        """One of them."""
        if item.get("use_pickle"):
            content = io.BytesIO(self.bytes("data/weights/" + item["path_name"]))
            tensor = torch.load(content, weights_only=True, map_location="cpu")
            found = (tuple(tensor.shape), str(tensor.dtype)[6:]) if isinstance(tensor, torch.Tensor) else None
            return tensor if found == _stored_as(item) else None
        return self.tensor("data/weights/", item, most_bytes=None)

    def program(self) -> TracedProgram:
        self.vet()
        weights, constants = self.config("weights"), self.config("constants")
        stored = {k: ("data/constants/", v) for k, v in constants.items()}
        stored |= {k: ("data/weights/", v) for k, v in weights.items()}

        def find(target: str, value: Value) -> Callable[[], torch.Tensor | None]:
            folder, item = stored.get(target, ("", None))
            if item is None:
                raise LayerwiseError(f"it has no value of {target!r}: save the exported program again")
            shape, dtype = _stored_as(item)
            if (shape, dtype) != (value.shape, value.dtype):
                raise LayerwiseError(
                    f"it stores {target!r} as {dtype} of shape {shape}, and its graph has {value.dtype} of shape "
                    f"{value.shape}: save the exported program again"
                )
            return lambda: self.tensor(folder, item)

        document = self.json(self.model)
        try:
            return read_json(document, self.file.stem, _shared(weights), find)
        except LayerwiseError:
            raise
        except Exception as error:  # whatever it is, the file's JSON has led to it
            raise LayerwiseError(
                f"member {self.model!r} is not what torch.export.save writes ({first_line(error)})"
            ) from None

    def config(self, kind: str) -> dict[str, Json]:
        """Where each weight or constant is; what is pickled is known to be plain data then."""
        folder, name = f"data/{kind}/", self.model.removeprefix("models/").removesuffix(".json")
        if f"{folder}{name}.pt" in self.members:
            raise LayerwiseError(f"its {kind} are in one pickle, as torch 2.8 wrote them; save it with 2.11 or later")
        entries: dict[str, Json] = self.json(f"{folder}{name}_{kind}_config.json")["config"]
        for item in entries.values():
            if item.get("use_pickle"):
                self.plain_data(folder + item["path_name"])
        return entries

    def vet(self) -> None:
        """Refuses the file if PyTorch, on loading it, would unpickle something that is not plain data."""
        for member in self.members:
            folder, _, base = member.rpartition("/")
            if base.startswith(OBJECTS):
                raise LayerwiseError(f"refused: member {member!r} is a pickled object, which may run code")
            if folder == "data/sample_inputs" or base.endswith((".pt", ".pkl", ".pth")):
                self.plain_data(member)

    def plain_data(self, member: str) -> None:
        """Reads a pickle as PyTorch reads weights: tensors and containers, nothing that is called."""
        content = self.bytes(member)
        if not content:
            return
        try:
            torch.load(io.BytesIO(content), weights_only=True, map_location="meta")
        except Exception as error:  # whatever it is, it is no plain data
            lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            said = next((line for line in lines if "GLOBAL" in line), lines[0])
            raise LayerwiseError(
                f"refused: member {member!r} is no plain data and may run code where PyTorch loads it ({said[:120]}); "
                "export the model again, with plain tensors as example inputs"
            ) from None

    def tensor(self, folder: str, item: Json, most_bytes: int | None = OF_A_FILE[0] * 8) -> torch.Tensor | None:
        """A tensor from its raw bytes; None for larger ones, those without values, and of unknown element types."""
        if item.get("use_pickle") or item.get("tensor_meta") is None:
            return None
        meta, member = item["tensor_meta"], folder + item["path_name"]
        sizes, strides, (offset,) = _ints(meta["sizes"]), _ints(meta["strides"]), _ints([meta["storage_offset"]])
        dtype = getattr(torch, DTYPES.get(meta["dtype"], ""), None)
        size = self.archive.getinfo(self.members[member]).file_size if member in self.members else 0
        if not isinstance(dtype, torch.dtype) or (most_bytes is not None and size > most_bytes):
            return None
        content = bytearray(self.bytes(member))
        if 0 in sizes:
            return torch.empty(sizes, dtype=dtype)
        if not content and _is_meta(item):
            return None
        if not content:
            raise LayerwiseError(f"member {member!r} is damaged: it is empty")
        flat = torch.frombuffer(content, dtype=dtype)
        last = offset + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
        if min((offset, *sizes, *strides)) < 0 or last >= flat.numel():
            raise LayerwiseError(f"member {member!r} is damaged: it has {flat.numel()} elements")
        return flat.as_strided(sizes, strides, offset)


def _ints(sizes: Json) -> tuple[int, ...]:
    return tuple(size["as_int"] for size in sizes)


def _stored_as(item: Json) -> tuple[tuple[int, ...], str]:
    """Shape and element type of a stored tensor."""
    meta = item["tensor_meta"]
    return _ints(meta["sizes"]), DTYPES.get(meta["dtype"], "unknown")


def _shared(weights: Mapping[str, Json]) -> dict[str, str]:
    """Parameters that are the same tensor under several names: the first name of each."""
    first: dict[str, str] = {}
    keys = {  # weights without values are all in one member
        name: name if _is_meta(item) else json.dumps([item.get("path_name"), item.get("tensor_meta") or {}])
        for name, item in weights.items()
    }
    return {name: first.setdefault(key, name) for name, key in keys.items()}


def _is_meta(item: Json) -> bool:
    return ((item.get("tensor_meta") or {}).get("device") or {}).get("type") == "meta"


def _other_kind(names: set[str]) -> str:
    """What a zip archive that is no .pt2 is."""
    remedy = "write one with torch.export.save(torch.export.export(model, inputs), file)"
    if "serialized_exported_program.json" in names:
        return "it was written by torch 2.7 or earlier; save it again with torch 2.11 or later"
    if any(name.startswith("code/") for name in names):
        return f"it is a TorchScript archive; {remedy}"
    if "data.pkl" in names:
        return f"it holds weights or a pickled module; {remedy}"
    return f"it is a zip archive, but no .pt2 file; {remedy}"
