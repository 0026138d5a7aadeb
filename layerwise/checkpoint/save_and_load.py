"""Saves and loads checkpoints: each rank writes its boxes into its own file; any other plan reads what it needs.

DIR/step-00000012/rank-00000.safetensors   the boxes that rank 0 wrote
DIR/step-00000012/checkpoint.json          checksums of these files, and facts about the run; written last
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from layerwise.checkpoint.optimizer_state import Owned, describe, merged, prepare
from layerwise.checkpoint.reader import SEAL, Reader, seal
from layerwise.checkpoint.shards import file_name, write_shards, written
from layerwise.checkpoint.step_folders import begin, commit, find, latest
from layerwise.comm.together import agree, patiently
from layerwise.errors import LayerwiseError, nearest
from layerwise.files import JSON
from layerwise.geometry import Box
from layerwise.graph.fuse import fuse
from layerwise.graph.layer_graph import LayerGraph
from layerwise.run.local_tensor import is_dtensor, local_tensor
from layerwise.run.parallel import ParallelModule, of
from layerwise.run.state.state import Shard
from layerwise.tensorfile import dtype_name

MODEL = "model."  # prefix of the model's tensors' names


def save(
    directory: str | os.PathLike[str],
    module: ParallelModule,
    optimizer: Optimizer | None,
    progress: Mapping[str, JSON],
    keep: int = 2,
) -> Path:
    """Writes DIR/step-<module.steps_done>, and deletes all but the newest `keep`. All ranks must call it. Returns the
    path.

    Args:
        directory: DIR, on a file system that all ranks share; give every run its own.
        module: The parallel model.
        optimizer: A torch.optim optimizer over its parameters; None: only the model is saved.
        progress: Values for `load` to return, such as epoch, counters and seeds; rank 0's are saved.
        keep: The most checkpoints that DIR has afterwards.

    Returns:
        The folder of this checkpoint.

    Raises:
        LayerwiseError: Saving failed on some rank; earlier checkpoints are unchanged.

    Examples:
        >>> import layerwise, tempfile, torch
        >>> quiet = layerwise.ParallelOptions(verbose=False)
        >>> model = layerwise.parallelize(torch.nn.Linear(4, 2), torch.randn(8, 4), options=quiet)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = save(folder, model, None, {"epoch": 3})
        ...     load(folder, model)
        {'epoch': 3}
    """
    comm, folder, steps = of(module).comm, Path(directory), of(module).steps_done
    failed = f"no checkpoint was saved in {os.fspath(folder)!r} (earlier ones are unchanged)"
    about: dict[str, JSON] = {"model": model_digest(of(module).layer_graph), "steps": steps}
    about["progress"] = dict(progress)

    def start() -> tuple[list[Shard], JSON]:
        if keep < 1:
            raise LayerwiseError(f"keep is {keep}, but at least 1 checkpoint must be kept")
        try:
            json.dumps(progress, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise LayerwiseError(f"'progress' must consist of JSON values: {error}") from None
        facts, states = describe(optimizer, owned(module)) if optimizer is not None else (None, [])
        local = [*map(_in_checkpoint, filter(written, of(module).shards())), *states]
        if comm.device.type == "cuda":
            torch.cuda.synchronize(comm.device)  # a thread writes, whose stream is another
        name = begin(folder, steps).name if comm.rank == 0 else None
        answer: dict[str, Any] = {"steps": steps, "folder": name, "optimizer": facts}
        return local, answer

    def write() -> tuple[None, JSON]:
        path = temporary / file_name(comm.rank)
        if not temporary.is_dir():
            raise LayerwiseError(
                f"{os.fspath(temporary)!r} is not visible here: all ranks must share the file system, and no other run "
                "may use the folder"
            )
        return None, [path.name, write_shards(path, shards)] if shards else None

    def complete() -> tuple[None, JSON]:
        if any(answer["steps"] != steps for answer in answers):
            raise LayerwiseError(f"ranks have done different numbers of steps: {[a['steps'] for a in answers]}")
        about["optimizer"] = merged([answer["optimizer"] for answer in answers], comm.members.ranks)
        if comm.rank:
            return None, None
        seal(temporary, about, dict(file for file in files if file))
        return None, commit(temporary, steps, keep).name

    shards, answers = agree(comm, start, failed)
    temporary = folder / answers[0]["folder"]
    try:
        _, files = patiently(comm, write, failed)
        _, names = agree(comm, complete, failed)
    except BaseException:
        if comm.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return folder / str(names[0])


def _in_checkpoint(shard: Shard) -> Shard:
    """Returns the shard under its names in a checkpoint."""
    return replace(shard, name=MODEL + shard.name, aliases=tuple(MODEL + name for name in shard.aliases))


def load(
    directory: str | os.PathLike[str], module: ParallelModule, optimizer: Optimizer | None = None
) -> dict[str, Any]:
    """Loads a step's folder, or the latest checkpoint of DIR, into module and optimizer. All ranks must call it.

    Any plan and number of ranks may have saved it: each rank reads the parts of saved boxes that overlap its own.
    Everything is checked, including every file's SHA-256, before the first value changes.

    Args:
        directory: A step's folder, or DIR.
        module: A parallel model of the model that was saved.
        optimizer: An optimizer of the saved kind over its parameters; None: only the model is loaded.

    Returns:
        The `progress` that was passed to `save`.

    Raises:
        LayerwiseError: The checkpoint is damaged, or of another model or optimizer.

    Examples:
        See `save`.
    """
    comm, shards = of(module).comm, of(module).shards()

    def open_it() -> tuple[Reader, JSON]:
        reader = Reader(find(directory))
        specs: dict[str, JSON] = {s.name: [s.shape, dtype_name(s.tensor.dtype), s.aliases] for s in shards}
        return reader, {"folder": reader.folder.name, "digest": reader.digest, "tensors": specs}

    def check() -> tuple[Callable[[], None] | None, JSON]:
        if any(answer["digest"] != answers[0]["digest"] for answer in answers):
            names = ", ".join(answer["folder"] for answer in answers)
            raise LayerwiseError(f"the ranks see different checkpoints ({names}): they must share the file system")
        ours = {name: spec for answer in answers for name, spec in answer["tensors"].items()}
        _check_model(reader, ours)
        _check_about(reader, module)
        restore = None if optimizer is None else prepare(optimizer, owned(module), reader)
        reader.verify(sorted(reader.files)[comm.rank :: comm.size])
        return restore, None

    def read() -> tuple[None, JSON]:
        for shard in shards:
            reader.fill(MODEL + shard.name, shard.box, shard.tensor.detach())
        return None, None

    reader, answers = agree(comm, open_it)
    restore, _ = agree(comm, check)
    agree(comm, read)
    if restore is not None:
        restore()
    of(module).steps_done = reader.about["steps"]
    return dict(reader.about["progress"])


def resume(
    directory: str | os.PathLike[str],
    module: ParallelModule,
    optimizer: Optimizer,
    facts: Mapping[str, JSON],
    otherwise: str = "",
) -> tuple[Path, dict[str, Any]] | None:
    """Loads the latest checkpoint in DIR, as rank 0 sees it; returns its folder and progress, or None if there is none.

    Raises LayerwiseError if its progress differs in one of these `facts`; otherwise: another way out to mention.
    """
    path = of(module).comm.broadcast_text(str(latest(directory) or ""))
    if not path:
        return None
    progress = load(path, module, optimizer)
    for what, here in facts.items():
        if progress.get(what) != here:
            raise LayerwiseError(
                f"checkpoint {path!r} was trained with {what} {progress.get(what)}, but here it is {here}: use the "
                f"same{otherwise}"
            )
    return Path(path), progress


def model_digest(graph: LayerGraph) -> str:
    """Returns the network's SHA-256, which does not depend on its batch, on fusion, or on which
    parameters are trained.
    """
    graph = graph.freeze(())
    try:
        return fuse(graph.rebatch(1)).digest
    except LayerwiseError:  # a network that exists at its own batch only
        return graph.digest


def owned(module: ParallelModule) -> Owned:
    """Returns the module's parameters with their shards, which are empty for parameters that only other ranks hold.

    (An empty parameter that is not the model's may stand for a rank that holds nothing.)
    """
    shards = {name: shard for shard in of(module).shards() for name in (shard.name, *shard.aliases)}
    owned = dict[Parameter, Shard]()
    for name, parameter in module.named_parameters():
        if name in shards:
            owned[parameter] = shards[name]
        elif is_dtensor(parameter):
            nothing = Box.full((0,) * parameter.dim())
            owned[parameter] = Shard(
                name, (), tuple(parameter.shape), nothing, local_tensor(parameter), trainable=True, first=False
            )
    return owned


def _check_about(reader: Reader, module: ParallelModule) -> None:
    """Raises LayerwiseError if the rest of what `save` wrote is invalid, or is of another network."""
    about = reader.about
    with reader.sense(SEAL):
        if type(about["steps"]) is not int or about["steps"] < 0:
            raise ValueError(f"{about['steps']!r} steps")
        dict(about["progress"].items())
        same = about["model"] == model_digest(of(module).layer_graph)
    if not same:
        raise LayerwiseError(f"{reader.where} is of another model with the same names and shapes, but other operators")


def _check_model(reader: Reader, ours: Mapping[str, Any]) -> None:
    """Raises LayerwiseError unless it is of this model. `ours`: every tensor's shape, type and other names."""
    where = f"{reader.where} is of another model:"
    saved = [name.removeprefix(MODEL) for name in reader.tensors if name.startswith(MODEL)]
    for name in ours:
        if name not in saved:
            raise LayerwiseError(f"{where} it has no {name!r}{nearest(name, saved)}")
    names = {further for name, (*_, aliases) in ours.items() for further in (name, *aliases)}
    for name in sorted(saved):
        if name not in names:
            raise LayerwiseError(f"{where} it has {name!r}, which this model does not{nearest(name, ours)}")
    for name, (shape_here, dtype_here, _) in ours.items():
        shape, dtype = reader.tensors[MODEL + name].spec
        if list(shape) != shape_here:
            raise LayerwiseError(f"{where} {name!r} has shape {list(shape)} there, but {shape_here} here")
        if dtype_name(dtype) != dtype_here:
            raise LayerwiseError(
                f"{reader.where} has {name!r} in {dtype_name(dtype)}, but it is {dtype_here} here: load the model with "
                "that type"
            )
