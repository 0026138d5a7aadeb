"""save: the whole model's state dict in one file, from a script that every rank runs."""

from __future__ import annotations

import os

import torch
from torch import nn

from layerwise.api.data.split import seat
from layerwise.api.loop.guards import original
from layerwise.api.world import joined
from layerwise.comm.solo import SoloComm
from layerwise.comm.together import agree
from layerwise.errors import LayerwiseError
from layerwise.files import writing
from layerwise.run.parallel import ParallelModule


def save(model: nn.Module, file: str | os.PathLike[str]) -> None:
    """Writes what `torch.save(model.state_dict(), file)` writes on one device; all ranks call it alike.

    The whole model's state dict is gathered, rank 0 writes it, whole or not at all, and the others wait for that. It
    loads into the model that `parallelize` was given. After `fit`, `model` may also be that model.
    LayerwiseError on every rank where it cannot be written.
    """
    if not isinstance(model, nn.Module):
        raise LayerwiseError(f"save takes a model, not {type(model).__name__}: say layerwise.save(model, file)")
    if not isinstance(file, str | os.PathLike):
        raise LayerwiseError(
            f"save takes the path of a file, not {type(file).__name__}: say layerwise.save(model, file)"
        )
    if original(model):
        raise LayerwiseError(
            "save was given the model that parallelize was given, which is not trained: save the one that it returned"
        )
    if isinstance(model, ParallelModule):
        comm, state = model.comm, model.full_state_dict()
    else:
        comm, state = joined() or SoloComm(), model.state_dict()
        if seat()[1] != comm.size:
            raise LayerwiseError("save is for what parallelize returns, or for a model that fit has trained")

    def write() -> tuple[None, None]:
        if comm.rank == 0:
            with writing(file) as temporary:
                try:
                    torch.save(dict(state), temporary)
                except RuntimeError as error:  # torch's writer has errors of its own
                    raise OSError(str(error)) from None
        return None, None

    agree(comm, write)
