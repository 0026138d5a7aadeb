"""Calls: a model that is called in several ways within something larger, chunk by chunk, with state in between.

Each way has a network and a plan; parameters are split alike in all. State stays on the ranks as boxes: what a call
returns of it stands for a tensor, without numbers, and the next call is given the boxes that its layers read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast
from zlib import crc32

import torch
from torch import Tensor

from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.importers.load import Network
from layerwise.importers.torch.read.arguments import Arguments
from layerwise.importers.torch.read.calls import Key, Written, key_of, write
from layerwise.ops.base import Role
from layerwise.partition.moved import transfer
from layerwise.partition.place import Each
from layerwise.plan import Plan
from layerwise.run.batch import Batch
from layerwise.run.inputs import Inputs
from layerwise.run.schedule.redistribute import Redistribution
from layerwise.run.schedule.schedule import parameter_boxes, places
from layerwise.run.shapes import Shaped

if TYPE_CHECKING:
    from layerwise.comm.base import Comm
    from layerwise.run.base import Run
    from layerwise.run.schedule.schedule import Schedule


# Of samples and a network: this rank's schedule, and what makes its boxes of outputs of its boxes of inputs.
Evaluation = Callable[[int, Shaped], "tuple[Schedule, Callable[[Sequence[Tensor]], Any]]"]


@dataclass(frozen=True, slots=True)
class _Boxes:
    """The boxes that the ranks own of a tensor, and this rank's numbers."""

    owned: Each
    local: Tensor


@dataclass(frozen=True, slots=True)
class _Way:
    """A way in which the model is called."""

    shaped: Shaped
    arguments: Arguments
    carried: frozenset[int]  # leaves of what it returns


class Calls:
    """The ways in which a model is called, by what it is given."""

    def __init__(self, run: Run, evaluation: Evaluation) -> None:
        self._run, self._evaluation, self._ways = run, evaluation, dict[Key, _Way]()
        self._boxes = parameter_boxes(run.layer_graph, places(run.layer_graph, run.plan))

    def __len__(self) -> int:
        """Returns how many ways there are."""
        return len(self._ways)

    def add(self, network: Network, plan: Plan, given: Mapping[str, Any], carried: frozenset[int]) -> None:
        """Adds a way. LayerwiseError where it splits a parameter otherwise.

        network: without memory. given: its arguments, by path. carried: leaves of what it returns.
        """
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
        self._ways[key_of(given)] = _Way(shaped, arguments, carried)

    def __call__(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Returns what the model does, in full on every rank but for state. LayerwiseError for another call."""
        run = self._run
        first = next(iter(self._ways.values())).arguments
        key = key_of(first.named(inputs, named))
        way = self._ways.get(key)
        alike = crc32(repr(sorted(map(repr, key))).encode())
        if Batch(run.plan, run.comm, run.plan.batch, None, ((alike,),), training=False).total and way is None:
            raise LayerwiseError(
                "the model is called as it was not when it was made parallel: "
                f"{_said(first.named(inputs, named))}; make it parallel with a function that calls it so"
            )
        assert way is not None
        if run.training:
            raise LayerwiseError("the model was made parallel for inference: call eval() on it")
        schedule, evaluate = self._evaluation(way.shaped.graph.batch, way.shaped)
        tensors, layers = way.arguments.tensors(inputs, named), schedule.graph.layers
        fed = [layer.name for layer in layers if layer.role is Role.INPUT]
        read = [_read(run.comm, run.device, tensors[n], schedule.places[n].owned.each, n) for n in fed]
        outputs = evaluate(read)
        structure = way.shaped.structure
        assert structure is not None
        stay = {structure.numbers[i] for i in way.carried}
        every = list[Tensor]()
        for slot, (owned, x) in enumerate(zip(schedule.sinks, outputs, strict=True)):
            spec = schedule.graph.layers[-1].specs[slot]
            if slot in stay:
                made = torch.empty(spec.shape, dtype=x.dtype, device="meta")
                made.layerwise_boxes = _Boxes(owned, x)  # type: ignore[attr-defined]
            else:
                made = _moved(run.comm, x, owned, (Box.full(spec.shape),) * run.comm.size, f"output {slot}")
            every.append(made)
        returned, written = cast("tuple[Any, Written]", structure.of(every))
        write((inputs, named), written)
        return returned


def _read(comm: Comm, device: torch.device, x: Any, needed: Each, name: str) -> Any:
    """Returns this rank's box of an input, of which each rank has all, or which the ranks own boxes of."""
    boxes: _Boxes | None = getattr(x, "layerwise_boxes", None)
    if boxes is None:
        if isinstance(x, Tensor) and x.is_meta and device.type != "meta":
            raise LayerwiseError(
                f"input {name!r} was made of state that the ranks have boxes of, outside of the model: only the model "
                "can compute with it"
            )
        return x
    if boxes.owned == needed:
        return boxes.local
    return _moved(comm, boxes.local, boxes.owned, needed, name)


def _moved(comm: Comm, x: Tensor, owned: Each, needed: Each, what: str) -> Tensor:
    part = transfer(owned, needed, comm.rank)
    if part.pattern != "local":  # no collective is prepared for it
        part = replace(part, pattern="messages", group=())
    own, need = owned[comm.rank], needed[comm.rank]
    made = Redistribution(part, comm, what, "io").begin(None if own is None else x, x).finish()
    return x.new_empty(need.shape if need is not None else (0,)) if made is None else made


def _said(leaves: Mapping[str, Any]) -> str:
    return ", ".join(f"{path} {tuple(x.shape) if isinstance(x, Tensor) else repr(x)}" for path, x in leaves.items())
