"""Checks of a trained folder before nnU-Net reads it, which unpickles its checkpoints and imports what it names."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from layerwise.errors import LayerwiseError, foreign

# What numpy numbers in a checkpoint's log are made of; none of it runs code of the file.
NUMBERS: list[Any] = [
    *((np.float64(0).__reduce__()[0], f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    np.dtype,
    *(type(np.dtype(name)) for name in ("f2", "f4", "f8", "i4", "i8", "?")),
]
CLASSES = re.compile(r"(torch\.nn|dynamic_network_architectures)(\.[a-z_]+)*\.[A-Z]\w*")  # that plans may name
LOCK = threading.Lock()  # torch has one list of safe globals for all threads


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Returns what torch.save wrote: tensors, numbers and text; anything else is refused, and nothing in it is run."""
    if not path.is_file():
        raise LayerwiseError(f"nnU-Net's folder has no {path.parent.name}/{path.name}: give folds= or checkpoint=")
    with foreign(f"{os.fspath(path)!r} is no checkpoint of tensors and numbers alone"):
        with LOCK, torch.serialization.safe_globals(NUMBERS):
            read = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(read, dict) or "network_weights" not in read:
            raise LayerwiseError(f"{os.fspath(path)!r} is no checkpoint of nnU-Net's")
        return read


def check_names(path: Path) -> None:
    """LayerwiseError where plans.json names a network or a layer elsewhere than in torch.nn and nnU-Net's package."""
    with foreign(f"nnU-Net's file {os.fspath(path)!r} cannot be read"):
        for name in _names(json.loads(path.read_text(encoding="utf-8"))):
            if not CLASSES.fullmatch(name):
                raise LayerwiseError(
                    f"{os.fspath(path)!r} names {name!r}, which is no class of torch.nn or of "
                    "dynamic_network_architectures"
                )


def _names(plans: Any) -> Iterator[str]:
    """Yields what nnU-Net imports by the name that plans give."""
    for configuration in plans["configurations"].values():
        if (architecture := configuration.get("architecture")) is not None:
            yield str(architecture["network_class_name"])
            imported = map(architecture["arch_kwargs"].get, architecture["_kw_requires_import"])
            yield from (str(name) for name in imported if name is not None)
