"""Checkpoints: each rank writes its boxes through torch.distributed.checkpoint; any other plan reads what it needs.

    DIR/step-00000012/__0_0.distcp       the boxes that rank 0 wrote
    DIR/step-00000012/.metadata          what is where, in DCP's words
    DIR/step-00000012/checkpoint.json    checksums of these, and what is known of the run; written last

What the ranks must agree on goes through layerwise's own network (`comm.together.agree`), because DCP's collectives
need torch.distributed and pickle. Of a pickle nothing is made but numbers, text and DCP's own records.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from layerwise.checkpoint.contribution import MODEL, Entry, finish, of_model, write
from layerwise.checkpoint.optimizer_state import Owned, Prepared, describe, of_groups, prepare
from layerwise.checkpoint.reader import SEAL, Reader
from layerwise.checkpoint.step_folders import begin, commit, find, latest, sole_writer
from layerwise.comm.base import Comm
from layerwise.comm.together import agree, in_thread, patiently
from layerwise.errors import LayerwiseError, nearest
from layerwise.files import JSON
from layerwise.geometry import Box
from layerwise.graph.cells import without_cells
from layerwise.graph.fuse import fuse
from layerwise.graph.layer_graph import LayerGraph
from layerwise.run.local_tensor import is_dtensor, local_tensor
from layerwise.run.parallel import ParallelModule, of
from layerwise.run.state.state import Shard
from layerwise.tensorfile import dtype_name


def save(
    directory: str | os.PathLike[str],
    module: ParallelModule,
    optimizer: Optimizer | None,
    progress: Mapping[str, JSON],
    keep: int = 2,
) -> Path:
    """Writes DIR/step-<module.steps_done>, by all ranks together, and keeps the newest `keep`. Returns its path.

    Args:
        directory: DIR, on a file system that all ranks share, into which no other run is saving.
        module: The parallel module.
        optimizer: One of torch.optim's over its parameters; None: the module alone is saved.
        progress: What `load` is to return, such as epoch, counters and seeds; rank 0's is kept.
        keep: How many checkpoints DIR has afterwards, at most.

    Returns:
        The folder of this checkpoint.

    Raises:
        LayerwiseError: It failed on some rank; earlier checkpoints are as they were.

    Examples:
        >>> import layerwise, tempfile, torch
        >>> model = layerwise.parallelize(torch.nn.Linear(4, 2), torch.randn(8, 4), verbose=False)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = save(folder, model, None, {"epoch": 3})
        ...     load(folder, model)
        {'epoch': 3}
    """
    return begin_saving(directory, module, optimizer, progress, keep, beside=False).finish()


@dataclass(frozen=True, slots=True)
class Writing:
    """A checkpoint that is being written; it is there when all ranks have called `finish`.

    Attributes:
        comm: The ranks.
        temporary: Where they write.
        steps: After how many it is.
        about: What the checkpoint says of itself.
        keep: How many checkpoints are kept.
        failed: What errors begin with.
        lock: Lets no other run save in this folder; released by `finish`.
        write: Writes this rank's part; returns what rank 0 is to be told of it.
        future: What `write` returns, where a thread calls it; None: `finish` does.
    """

    comm: Comm
    temporary: Path
    steps: int
    about: dict[str, JSON]
    keep: int
    failed: str
    lock: ExitStack
    write: Callable[[], JSON]
    future: Future[JSON] | None

    def written(self) -> bool:
        """True if this rank's part is, so that it need not be waited for."""
        return self.future is not None and self.future.done()

    def finish(self) -> Path:
        """Returns what `save` returns, or raises what it raises; waits however long a thread takes."""
        meet, part = (agree, self.write) if self.future is None else (patiently, self.future.result)
        with self.lock, removed_on_failure(self.comm, self.temporary):
            _, written = meet(self.comm, lambda: (None, part()), self.failed)
            _, names = agree(self.comm, lambda: (None, self._complete(written)), self.failed)
        return self.temporary.parent / str(names[0])

    def _complete(self, written: list[Any]) -> JSON:
        """Rank 0 gives the checkpoint its name."""
        if self.comm.rank:
            return None
        finish(self.temporary, self.about, written)
        return commit(self.temporary, self.steps, self.keep).name


def begin_saving(
    directory: str | os.PathLike[str],
    module: ParallelModule,
    optimizer: Optimizer | None,
    progress: Mapping[str, JSON],
    keep: int = 2,
    *,
    beside: bool = True,
) -> Writing:
    """Begins what `save` does. beside: a thread writes a copy of the state, and training may go on meanwhile."""
    comm, folder, steps = of(module).comm, Path(directory), of(module).steps_done
    failed = f"no checkpoint was saved in {os.fspath(folder)!r} (earlier ones are as they were)"

    def start() -> tuple[list[Entry], JSON]:
        if keep < 1:
            raise LayerwiseError(f"{keep} checkpoints cannot be kept: keep at least 1")
        try:
            json.dumps(progress, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise LayerwiseError(f"'progress' must be what JSON can hold: {error}") from None
        facts, states = describe(optimizer, owned(module)) if optimizer is not None else (None, [])
        if comm.rank == 0:
            lock.enter_context(sole_writer(folder))
        name = begin(folder, steps).name if comm.rank == 0 else None
        answer: dict[str, Any] = {"steps": steps, "folder": name, "optimizer": facts}
        return [*of_model(of(module).shards()), *states], answer

    def collect() -> tuple[list[Entry], JSON]:
        if any(answer["steps"] != steps for answer in answers):
            raise LayerwiseError(f"ranks have done different numbers of steps: {[a['steps'] for a in answers]}")
        ranks = [answer["optimizer"] for answer in answers]
        groups = of_groups(optimizer, ranks, comm.members.ranks) if optimizer is not None and any(ranks) else []
        entries = [*local, *groups] if comm.rank == 0 else local
        return [replace(entry, value=_copy(entry.value)) for entry in entries] if beside else entries, None

    with ExitStack() as lock:
        local, answers = agree(comm, start, failed)
        temporary = folder / answers[0]["folder"]
        with removed_on_failure(comm, temporary):
            entries, _ = agree(comm, collect, failed)
        lock = lock.pop_all()
    about: dict[str, JSON] = {
        "model": model_digest(module.layer_graph),
        "steps": steps,
        "progress": copy.deepcopy(dict(progress)),
        "optimizer": None if optimizer is None else type(optimizer).__qualname__,
    }
    write_local: Callable[[], JSON] = partial(write, temporary, comm.rank, entries)
    future = in_thread(write_local, "layerwise checkpoint") if beside else None
    return Writing(comm, temporary, steps, about, keep, failed, lock, write_local, future)


@contextmanager
def removed_on_failure(comm: Comm, temporary: Path) -> Iterator[None]:
    """Removes the folder that ranks write, where there is an error within it."""
    try:
        yield
    except BaseException:
        if comm.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _copy(value: object) -> object:
    """Returns a tensor's copy on the CPU; of any other value itself."""
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def load(
    directory: str | os.PathLike[str], module: ParallelModule, optimizer: Optimizer | None = None
) -> dict[str, Any]:
    """Gives module and optimizer what was saved in a step's folder, or in the latest of DIR, by all ranks together.

    Whatever plan and number of ranks saved it: each rank reads the parts of saved boxes that fall into its own. Also a
    folder that `torch.distributed.checkpoint.save` wrote, of {"model": ..., "optimizer": ...} or of the model's state
    dict alone, which has no checksums and no steps. All is checked, the SHA-256 of every file too, before the first
    value changes.

    Args:
        directory: A step's folder, or DIR.
        module: The parallel module, of the model that was saved.
        optimizer: One of the kind that was saved, over its parameters; None: the module alone is loaded.

    Returns:
        The progress that `save` was given.

    Raises:
        LayerwiseError: Some rank finds the checkpoint damaged, or of another model or optimizer.

    Examples:
        See `save`.
    """
    comm, shards = of(module).comm, of(module).shards()

    def open_it() -> tuple[Reader, JSON]:
        reader = Reader(find(directory))
        specs: dict[str, JSON] = {s.name: [s.shape, dtype_name(s.tensor.dtype), s.aliases] for s in shards}
        return reader, {"folder": reader.folder.name, "digest": reader.digest, "tensors": specs}

    def check() -> tuple[tuple[str, Prepared], JSON]:
        if any(answer["digest"] != answers[0]["digest"] for answer in answers):
            names = ", ".join(answer["folder"] for answer in answers)
            raise LayerwiseError(f"ranks see different checkpoints ({names}): they must share the file system")
        ours = {name: spec for answer in answers for name, spec in answer["tensors"].items()}
        prefix = _check_model(reader, ours)
        if reader.about is not None:
            _check_about(reader, module)
        prepared = Prepared() if optimizer is None else prepare(optimizer, owned(module), reader)
        reader.verify(sorted(reader.files)[comm.rank :: comm.size])
        return (prefix, prepared), None

    def read() -> tuple[None, JSON]:
        for shard in shards:
            reader.fill(prefix + shard.name, shard.box, shard.tensor.detach())
        for name, shard, tensor in prepared.pending:
            reader.fill(name, shard.box, tensor)
        return None, None

    reader, answers = agree(comm, open_it)
    (prefix, prepared), _ = agree(comm, check)
    agree(comm, read)
    if optimizer is not None:
        prepared.restore(optimizer)
    if reader.about is None:
        return {}
    of(module).steps_done = reader.about["steps"]
    return dict(reader.about["progress"])


def resume(
    directory: str | os.PathLike[str],
    module: ParallelModule,
    optimizer: Optimizer,
    facts: Mapping[str, JSON],
    otherwise: str = "",
) -> tuple[Path, dict[str, Any]] | None:
    """Loads the latest checkpoint in DIR, as rank 0 sees it, and returns its folder and progress; None: there is none.

    LayerwiseError where its progress differs from one of these `facts`; otherwise: what else the user can do.
    """
    path = of(module).comm.broadcast_text(str(latest(directory) or ""))
    if not path:
        return None
    progress = load(path, module, optimizer)
    for what, here in facts.items():
        if progress.get(what) != here:
            raise LayerwiseError(
                f"checkpoint {path!r} was trained with {what} {progress.get(what)}, here it is {here}: give the same"
                f"{otherwise}"
            )
    return Path(path), progress


def model_digest(graph: LayerGraph) -> str:
    """Returns the network's SHA-256, whatever its batch, whether it is fused, reads cells, and what is trained."""
    graph = without_cells(graph.freeze(()))
    try:
        return fuse(graph.rebatch(1)).digest
    except LayerwiseError:  # a network that exists at its own batch only
        return graph.digest


def owned(module: ParallelModule) -> Owned:
    """Returns the module's parameters with their shards: empty ones of parameters that only other ranks have a part of.

    (A parameter without elements that is not the model's may stand for a rank that holds nothing.)
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
    """LayerwiseError where the rest of what `save` wrote makes no sense, or is of another network."""
    about = reader.about or {}
    with reader.sense(SEAL):
        if type(about["steps"]) is not int or about["steps"] < 0:
            raise ValueError(f"{about['steps']!r} steps")
        dict(about["progress"].items())
        if not isinstance(about["optimizer"], str | None):
            raise ValueError(f"optimizer {about['optimizer']!r}")
        same = about["model"] == model_digest(of(module).layer_graph)
    if not same:
        raise LayerwiseError(
            f"{reader.where} is of another model: it has the same names and shapes, but other operators"
        )


def _check_model(reader: Reader, ours: Mapping[str, Any]) -> str:
    """Returns the prefix of the model's names in the checkpoint. `ours`: every tensor's shape, type and further names.

    LayerwiseError unless it is of this model.
    """
    every, inside = set(reader.description.tensors), f"{MODEL}."
    deeper = any(name.startswith(inside) for name in every) and not any(name in every for name in ours)
    nested = reader.about is not None or deeper
    prefix = inside if nested else ""  # torch.distributed.checkpoint.save(model.state_dict()) has no such level
    where = f"{reader.where} is of another model:"
    saved = [name.removeprefix(prefix) for name in every if name.startswith(prefix)]
    for name in ours:
        if name not in saved:
            raise LayerwiseError(f"{where} it has no {name!r}{nearest(name, saved)}")
    names = {further for name, (*_, aliases) in ours.items() for further in (name, *aliases)}
    for name in sorted(saved) if nested else ():
        if name not in names:
            raise LayerwiseError(f"{where} it has {name!r}, which this model lacks{nearest(name, ours)}")
    for name, (shape_here, dtype_here, _) in ours.items():
        shape, dtype = reader.spec(prefix + name)
        if list(shape) != shape_here:
            raise LayerwiseError(f"{where} {name!r} has shape {list(shape)} there, {shape_here} here")
        if dtype_name(dtype) != dtype_here:
            raise LayerwiseError(
                f"{reader.where} has {name!r} in {dtype_name(dtype)}, it is {dtype_here} here: load the module so"
            )
    return prefix
