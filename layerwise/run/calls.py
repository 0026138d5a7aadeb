"""Calls: a model that is called in several ways within something larger, chunk by chunk, with state in between.

Each way has a network and a plan; parameters are split alike in all. State stays on the ranks as boxes: what a call
returns of it stands for a tensor, without numbers, and the next call is given the boxes that its layers read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, cast
from zlib import crc32

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.importers.load import Network
from layerwise.importers.torch.read.arguments import Arguments
from layerwise.importers.torch.read.calls import Key, RecordedCall, Written, key_of, with_leaves, write
from layerwise.ops.base import Role
from layerwise.partition.moved import transfer
from layerwise.partition.place import Each
from layerwise.plan import Plan
from layerwise.run.base import Run
from layerwise.run.batch import Batch
from layerwise.run.inputs import Inputs
from layerwise.run.schedule.redistribute import Redistribution
from layerwise.run.schedule.schedule import Schedule, parameter_boxes, places
from layerwise.run.shapes import Shaped

# Of samples and a network: this rank's schedule, and what makes its boxes of outputs of its boxes of inputs.
Evaluation = Callable[[int, Shaped], tuple[Schedule, Callable[[Sequence[Tensor]], Any]]]


class BoxedState(Tensor):
    """State that the ranks have boxes of between calls of a model. Only the model computes with it; all else raises."""

    owned: Each
    local: Tensor  # this rank's box

    @staticmethod
    def __new__(cls, shape: Sequence[int], owned: Each, local: Tensor) -> BoxedState:
        """Returns a tensor of this shape, of which this rank has `local`."""
        make = Tensor._make_wrapper_subclass
        made: BoxedState = make(cls, tuple(shape), dtype=local.dtype, device=local.device)
        made.owned, made.local = owned, local
        return made

    @classmethod
    def __torch_dispatch__(cls, func: object, *_: object) -> NoReturn:
        """Raises LayerwiseError."""
        raise LayerwiseError(
            f"{func} is called on state of which a rank has only a box: only the model can compute with what it keeps "
            "from call to call, so let it return what else you need"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"BoxedState(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: object) -> BoxedState:
        return self  # nobody writes to it


@dataclass(frozen=True, slots=True)
class _Way:
    """A way in which the model is called."""

    shaped: Shaped
    arguments: Arguments
    carried: frozenset[int]  # leaves of what it returns
    unread: Mapping[int, Tensor]  # those of them that no call computes with, without numbers


class CallPlans:
    """The plans of a model's unlike calls, by what it is given."""

    def __init__(self, run: Run, evaluation: Evaluation) -> None:
        self._run, self._evaluation, self._ways = run, evaluation, dict[Key, _Way]()
        self._compared = run.runtime_options.compare_ranks
        self._boxes = parameter_boxes(run.layer_graph, places(run.layer_graph, run.plan))

    def __len__(self) -> int:
        """Returns how many ways there are."""
        return len(self._ways)

    @property
    def memory_bytes(self) -> float:
        """Predicted bytes of the fullest rank in the fullest way."""
        return max(float(way.shaped.plan.predicted.get("memory_bytes", 0)) for way in self._ways.values())

    def add(self, network: Network, plan: Plan, call: RecordedCall) -> None:
        """Adds a way. LayerwiseError where it splits a parameter otherwise. network: without memory."""
        run = self._run
        arguments = network.arguments
        assert arguments is not None
        graph = plan.layers(network.graph.rebatch(plan.batch))
        plan.check(graph, run.comm.size)
        for name, boxes in parameter_boxes(graph, places(graph, plan)).items():
            known = self._boxes.get(name, (None,) * len(boxes))
            if name in network.keys.values() and any(b not in (None, k) for k, b in zip(known, boxes, strict=True)):
                raise LayerwiseError(f"parameter {name!r} is split in one call of the model as it is not in another")
        network = replace(network, graph=graph)
        inputs = Inputs(network, plan, run.comm, run.runtime_options)
        sizes = tuple(layer.out.shape[1:] for layer in graph.layers if layer.role is Role.INPUT)
        shaped = Shaped(graph, inputs, network.structure, plan, sizes, network)
        self._ways[call.key] = _Way(shaped, arguments, call.carried, call.unread)

    def __call__(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Returns what the model does, in full on every rank but for state. LayerwiseError for another call."""
        run = self._run
        first = next(iter(self._ways.values())).arguments
        key = key_of(first, (inputs, named))
        way = self._ways.get(key)
        alike = (crc32(repr(sorted(map(repr, key))).encode()),)
        tensors = {} if way is None else way.arguments.tensors(inputs, named)
        full = [x for x in tensors.values() if not isinstance(x, BoxedState)] if self._compared else ()
        if Batch(run.plan, run.comm, run.plan.batch, None, (alike,), training=False, full=full).total and way is None:
            raise LayerwiseError(
                "the model is called as it was not when it was made parallel: "
                f"{_said(first.named(inputs, named))}; make it parallel with a function that calls it so"
            )
        assert way is not None
        if run.training:
            raise LayerwiseError("the model was made parallel for inference: call eval() on it")
        schedule, evaluate = self._evaluation(way.shaped.graph.batch, way.shaped)
        fed = [layer.name for layer in schedule.graph.layers if layer.role is Role.INPUT]
        read = [_read(run.comm, run.device, tensors[n], schedule.places[n].owned.each, n) for n in fed]
        outputs = evaluate(read)
        structure = way.shaped.structure
        assert structure is not None
        stay = {structure.numbers[i] for i in way.carried}
        every = list[Tensor]()
        for slot, (owned, x) in enumerate(zip(schedule.sinks, outputs, strict=True)):
            spec = schedule.graph.layers[-1].specs[slot]
            if slot in stay:
                made: Tensor = BoxedState(spec.shape, owned, x)
            else:
                made = _moved(run.comm, x, owned, (Box.full(spec.shape),) * run.comm.size, f"output {slot}")
            every.append(made)
        empty = {i: BoxedState(x.shape, (), x.new_empty(0, device=run.device)) for i, x in way.unread.items()}
        returned, written = cast("tuple[Any, Written]", with_leaves(structure.of(every), empty))
        write(way.arguments.bound(inputs, named), written)
        return returned


def _read(comm: Comm, device: torch.device, x: Any, needed: Each, name: str) -> Any:
    """Returns this rank's box of an input, of which each rank has all, or which the ranks own boxes of."""
    if isinstance(x, BoxedState) and not x.owned:
        raise LayerwiseError(
            f"input {name!r} is state that no call computed with when the model was made parallel, so no rank has it: "
            "make it parallel with a function that makes all calls"
        )
    if isinstance(x, BoxedState):
        if x.owned == needed:
            return x.local
        made, own, need = _moved(comm, x.local, x.owned, needed, name), x.owned[comm.rank], needed[comm.rank]
        if own is not None and need is not None and own & need == own:
            x.local = made[own.slices(need)]  # the same numbers, once
        return made
    if isinstance(x, Tensor) and (x.is_meta or isinstance(x, FakeTensor)) and device.type != "meta":
        raise LayerwiseError(
            f"input {name!r} has no numbers: clear what was cached as the model was made parallel, which ran on shapes "
            "alone"
        )
    return x


def _moved(comm: Comm, x: Tensor, owned: Each, needed: Each, what: str) -> Tensor:
    part = transfer(owned, needed, comm.rank, by_messages=True)
    own, need = owned[comm.rank], needed[comm.rank]
    made = Redistribution(part, comm, what, "io").begin(None if own is None else x, x).finish()
    return x.new_empty(need.shape if need is not None else (0,)) if made is None else made


def _said(leaves: Mapping[str, Any]) -> str:
    tensors = {path: f"{tuple(x.shape)} {x.dtype}" for path, x in leaves.items() if isinstance(x, Tensor)}
    return ", ".join(f"{path} {tensors.get(path, repr(x))}" for path, x in leaves.items())
