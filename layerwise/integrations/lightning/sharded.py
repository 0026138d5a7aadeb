"""A checkpoint of Lightning's as a folder of safetensors files, into which each rank writes its boxes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from layerwise.checkpoint.shards import ShardReader, file_name, write_shards
from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.run.local_tensor import is_dtensor, local_tensor
from layerwise.run.state.state import Shard

META = "meta.pt"  # what is no split tensor, as Lightning's own strategies call it
MODEL, OPTIMIZER = "model.", "optimizer."  # how names of tensors begin


def write(checkpoint: dict[str, Any], folder: Path, rank: int, barrier: Callable[[], object]) -> None:
    """Writes a checkpoint, from which its tensors are taken; every rank calls it. `barrier` waits for all ranks."""
    state = checkpoint["state_dict"]
    tensors = {MODEL + name: state.pop(name) for name in list(state) if isinstance(state[name], Tensor)}
    for i, optimizer in enumerate(checkpoint.get("optimizer_states", ())):
        optimizer["state"] = {j: dict(entry) for j, entry in optimizer["state"].items()}  # the optimizer's own stay
        for j, entry in optimizer["state"].items():
            shaped = [key for key, value in entry.items() if isinstance(value, Tensor) and value.dim()]
            tensors |= {f"{OPTIMIZER}{i}.{j}.{key}": entry.pop(key) for key in shaped}
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for old in (folder / META, *folder.glob("*.safetensors")):
            old.unlink(missing_ok=True)
    barrier()
    write_shards(folder / file_name(rank), _written(tensors, rank))
    barrier()
    if rank == 0:  # last: a folder without it is not read
        torch.save(checkpoint, folder / META)
    barrier()


def _written(tensors: Mapping[str, Any], rank: int) -> Iterator[Shard]:
    """Yields the boxes that this rank writes: of a split tensor each box once, of any other rank 0's."""
    for name, tensor in tensors.items():
        lo, local, first = (0,) * tensor.dim(), local_tensor(tensor).detach(), rank == 0
        if is_dtensor(tensor):
            mesh, placements = tensor.device_mesh, tensor.placements
            here = mesh.get_coordinate()
            _, lo = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
            replicated = [isinstance(placement, Replicate) for placement in placements]
            first = here is not None and not any(i for i, same in zip(here, replicated, strict=True) if same)
            first = first and bool(local.numel() or not tensor.numel())
        if first:
            box = Box(tuple(lo), tuple(a + n for a, n in zip(lo, local.shape, strict=True)))
            yield Shard(name, (), tuple(tensor.shape), box, local, trainable=False, first=True)


def read(folder: Path) -> dict[str, Any]:
    """Returns the checkpoint with full tensors. LayerwiseError for files that are damaged, or would run code."""
    try:
        files = sorted(path.name for path in folder.glob("*.safetensors"))
        if not files:
            raise LookupError("it has no safetensors files, as those of earlier versions")
        reader = ShardReader(folder, files)
        checkpoint: dict[str, Any] = torch.load(folder / META, "cpu", weights_only=True)
        for name in reader.tensors:
            if name.startswith(MODEL):
                checkpoint["state_dict"][name.removeprefix(MODEL)] = reader.full(name)
            else:
                i, j, key = name.removeprefix(OPTIMIZER).split(".", 2)
                checkpoint["optimizer_states"][int(i)]["state"].setdefault(int(j), {})[key] = reader.full(name)
    except (OSError, SafetensorError, UnpicklingError, RuntimeError, LookupError, ValueError, TypeError) as error:
        raise LayerwiseError(f"checkpoint {str(folder)!r} cannot be read: {error}") from None
    return checkpoint
