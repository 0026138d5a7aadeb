"""Called in the ranks of test_dtensors: states of a split plan, which torch or layerwise saves and others read."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from layerwise import checkpoint
from layerwise.comm.base import Comm
from tests.run.dtensor_ranks import OPTIMIZERS, Cuts, made, steps, whole


def saved(comm: Comm, cuts: Cuts, folder: str, optimizer: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two steps; dcp.save of model and optimizer; two steps more."""
    model = made(comm, cuts)
    chosen = OPTIMIZERS[optimizer](model.parameters())
    steps(model, chosen, "nothing", 0, 2)
    state, states = get_state_dict(model, chosen)
    dcp.save({"model": state, "optimizer": states}, checkpoint_id=folder)
    early = whole(model)
    gathered = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if comm.rank == 0:
        assert gathered.keys() == early.keys()
        assert all(torch.equal(gathered[name], early[name]) for name in early)
    dcp.save(model.state_dict(), checkpoint_id=Path(folder) / "model")
    steps(model, chosen, "nothing", 2, 4)
    return early, whole(model)


def resumed(comm: Comm, cuts: Cuts, folder: str, optimizer: str) -> dict[str, Tensor]:
    """Another plan, or another number of ranks, goes on from there."""
    model = made(comm, cuts)
    chosen = OPTIMIZERS[optimizer](model.parameters())
    state, states = get_state_dict(model, chosen)
    dcp.load({"model": state, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(model, chosen, model_state_dict=state, optim_state_dict=states)
    steps(model, chosen, "nothing", 2, 4)
    return whole(model)


def given(comm: Comm, cuts: Cuts, state: dict[str, Tensor]) -> None:
    """A whole state dict, by torch's function and by the module's; DTensors of another layout."""
    model, other = made(comm, cuts), state
    for act in (
        lambda other: set_model_state_dict(model, dict(other), options=StateDictOptions(full_state_dict=True)),
        model.load_state_dict,
    ):
        act(other)
        here = whole(model)
        assert all(torch.equal(here[name], state[name]) for name in state)
        other = {
            name: value.redistribute(placements=[*value.placements][::-1]).clone()
            if isinstance(value, DTensor) and value.dim() > 1
            else value.clone()
            for name, value in model.state_dict().items()
        }
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()


def checkpointed(comm: Comm, cuts: Cuts, folder: str, optimizer: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """layerwise's own checkpoint after two steps; two steps more. The state then and in the end."""
    model = made(comm, cuts)
    chosen = OPTIMIZERS[optimizer](model.parameters())
    steps(model, chosen, "nothing", 0, 2)
    checkpoint.save(folder, model, chosen, {})
    early = whole(model)
    steps(model, chosen, "nothing", 2, 4)
    return early, whole(model)


def taken_up(comm: Comm, cuts: Cuts, folder: str, optimizer: str) -> dict[str, Tensor]:
    """Another plan goes on from it; and torch's own reader finds the same in it."""
    model, again = made(comm, cuts), made(comm, cuts)
    chosen = OPTIMIZERS[optimizer](model.parameters())
    checkpoint.load(folder, model, chosen)
    latest = checkpoint.latest(folder)
    dcp.load({"model": again.state_dict()}, storage_reader=HuggingFaceStorageReader(str(latest)))
    there, here = whole(again), whole(model)
    assert all(torch.equal(there[name], here[name]) for name in here)
    _, states = get_state_dict(again, other := OPTIMIZERS[optimizer](again.parameters()))
    read: dict[str, Any] = {"optimizer": {"state": states["state"]}}  # its settings are in checkpoint.json
    dcp.load(read, storage_reader=HuggingFaceStorageReader(str(latest)))
    set_state_dict(again, other, model_state_dict=again.state_dict(), optim_state_dict=states)
    steps(again, other, "nothing", 2, 4)
    steps(model, chosen, "nothing", 2, 4)
    there, here = whole(again), whole(model)
    assert all(torch.equal(there[name], here[name]) for name in here)
    return here
