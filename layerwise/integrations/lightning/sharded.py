"""A checkpoint of Lightning's as a folder of torch.distributed.checkpoint, into which each rank writes its boxes."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save

from layerwise.checkpoint.reader import Reader
from layerwise.errors import LayerwiseError

META = "meta.pt"  # what is no split tensor, as Lightning's own strategies call it
MODEL, OPTIMIZER = "model.", "optimizer."  # how names of tensors begin


def write(checkpoint: dict[str, Any], folder: Path, rank: int) -> None:
    """Writes a checkpoint, from which its tensors are taken; every rank calls it."""
    state = checkpoint["state_dict"]
    tensors = {MODEL + name: state.pop(name) for name in list(state) if isinstance(state[name], Tensor)}
    for i, optimizer in enumerate(checkpoint.get("optimizer_states", ())):
        optimizer["state"] = {j: dict(entry) for j, entry in optimizer["state"].items()}  # the optimizer's own stay
        for j, entry in optimizer["state"].items():
            shaped = [key for key, value in entry.items() if isinstance(value, Tensor) and value.dim()]
            tensors |= {f"{OPTIMIZER}{i}.{j}.{key}": entry.pop(key) for key in shaped}
    if rank == 0:  # written last: without it a folder that is written anew is not read as it was before
        (folder / META).unlink(missing_ok=True)
    save(tensors, checkpoint_id=folder)
    if rank == 0:
        torch.save(checkpoint, folder / META)


def read(folder: Path) -> dict[str, Any]:
    """Returns the checkpoint with full tensors. LayerwiseError for files that are damaged, or would run code."""
    reader = Reader(folder)
    try:
        checkpoint: dict[str, Any] = torch.load(folder / META, "cpu", weights_only=True)
        for name in reader.description.tensors:
            if name.startswith(MODEL):
                checkpoint["state_dict"][name.removeprefix(MODEL)] = reader.full(name)
            else:
                i, j, key = name.removeprefix(OPTIMIZER).split(".", 2)
                checkpoint["optimizer_states"][int(i)]["state"].setdefault(int(j), {})[key] = reader.full(name)
    except (OSError, UnpicklingError, RuntimeError, LookupError, ValueError, TypeError) as error:
        raise LayerwiseError(f"{reader.where} cannot be read: {META} or names of tensors: {error}") from None
    return checkpoint
