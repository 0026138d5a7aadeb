"""save: the whole model's state dict in one file, from a script that every rank runs."""

from __future__ import annotations

import os

from torch import nn

from layerwise.api.world import joined, ranks_here
from layerwise.arguments import checked
from layerwise.comm.solo import SoloComm
from layerwise.comm.together import agree
from layerwise.errors import LayerwiseError
from layerwise.files import writing
from layerwise.run.parallel import ParallelModule, of
from layerwise.tensorfile import torch_save


@checked
def save(model: nn.Module, file: str | os.PathLike[str]) -> None:
    """Writes what `torch.save(model.state_dict(), file)` writes on one device; all ranks call it alike.

    The full state dict is gathered, rank 0 writes it, whole or not at all, and the others wait for that.

    Args:
        model: What `parallelize` returned; after `fit`, also the model that it was given.
        file: A path. What is in it loads into the model that `parallelize` was given.

    Raises:
        LayerwiseError: It cannot be written; on every rank.

    Examples:
        >>> import tempfile, torch, layerwise
        >>> quiet = layerwise.ParallelOptions(verbose=False)
        >>> model = layerwise.parallelize(torch.nn.Linear(4, 2), torch.randn(8, 4), options=quiet)
        >>> with tempfile.NamedTemporaryFile() as out:
        ...     save(model, out.name)
        ...     sorted(torch.load(out.name, weights_only=True))
        ['bias', 'weight']
    """
    if isinstance(model, ParallelModule):
        comm, state = of(model).comm, of(model).full_state_dict()
    else:
        comm, state = joined() or SoloComm(), model.state_dict()
        if ranks_here() != comm.size:
            raise LayerwiseError(
                "the model is not parallel: give save what parallelize returned, or a model that fit has trained"
            )

    def write() -> tuple[None, None]:
        if comm.rank == 0:
            with writing(file) as temporary, temporary.open("wb") as out:
                torch_save(dict(state), out)
        return None, None

    agree(comm, write)
