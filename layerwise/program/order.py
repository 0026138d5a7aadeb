"""The program of a graph and a strategy: the order of a step, the same as autograd's (tests/program/test_order.py)."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from layerwise.graph.layer import Layer
from layerwise.graph.layer_graph import LayerGraph
from layerwise.ops.base import Role
from layerwise.partition.ahead import EdgeEnd, begun_before
from layerwise.partition.blocks import recomputed_layers
from layerwise.partition.buckets import ALONE, fill, flushed_after
from layerwise.program.instructions import (
    AllGather,
    Arrive,
    Begin,
    Bucket,
    Compute,
    End,
    Fill,
    Forget,
    Free,
    Instruction,
    Keep,
    Move,
    Output,
    Program,
    Release,
    StepKind,
    StrategyFacts,
    Update,
)


def program(graph: LayerGraph, io: str, facts: StrategyFacts, kind: StepKind = "training") -> Program:
    """The instructions of one step on all devices, in order.

    Args:
        graph: The network; inputs and the sink are layers of it.
        io: Who feeds the batch (see `CostOptions.io`), which decides the transfers that may be issued early.
        facts: The facts of the strategy.
        kind: Training has a backward pass and an update; in inference nothing is saved, and layers that no output
            depends on are left out.
    """
    return _Builder(graph, io, facts, kind).build()


class _Builder:
    """Appends instructions: the forward pass, then the backward pass, layer by layer."""

    def __init__(self, graph: LayerGraph, io: str, facts: StrategyFacts, kind: StepKind) -> None:
        self.graph, self.facts, self.kind = graph, facts, kind
        self.out: list[Instruction] = []
        self.begun = begun_before(graph, io)
        self.early = {end for ends in self.begun.values() for end in ends if end in facts.travels}
        self.blocks = recomputed_layers(graph, facts.recomputed) if kind == "training" else {}
        self.block_of = {layer.name: last for last, layers in self.blocks.items() for layer in layers}
        self.needed = {layer.name for layer in graph.layers} if kind == "training" else graph.returned
        self.gathered = frozenset(facts.gathered)
        names = [name for name in facts.gathered if name in self.needed]
        back = [name for name in reversed(names) if graph.has_gradient[name]]
        self.next_forward, self.next_backward = dict(pairwise(names)), dict(pairwise(back))
        self.issued: set[str] = set()  # layers whose parameters are being gathered
        self.buckets: list[Bucket] = []
        self.flushed: dict[str, list[int]] = {}  # layer -> the buckets that its gradients complete
        self.arriving: dict[str, list[int]] = {}  # layer -> the buckets whose parameters it needs first

    def build(self) -> Program:
        """The full step."""
        self._fill_buckets()
        self._forward()
        if self.kind == "training":
            for layer in reversed(self.graph.layers):
                if layer.name in self.blocks:
                    self._recompute(layer.name)
                self._backward(layer)
            self.out.append(Update())
        return Program(self.out, self.buckets)

    # ---- parameters and their gradients ----

    def _fill_buckets(self) -> None:
        gradients, back = self.facts.gradients, [layer.name for layer in reversed(self.graph.layers)]
        number = {name: i for i, name in enumerate(back)}  # index in the backward pass
        alone = [g.layer if g.states == "gathered" else "" for g in gradients]  # each such layer has its own buckets
        sizes = [
            ((g.group, g.states, layer), ALONE if layer else g.size_bytes)
            for g, layer in zip(gradients, alone, strict=True)
        ]
        filled = fill(sizes, self.facts.bucket_bytes)
        first = [gradients[members[0]] for members in filled]
        # The backward pass reaches a shared parameter in its place, though buckets have it last.
        complete = [[number[gradients[i].layer] for i in members] for members in filled]
        flushed = flushed_after(complete, [g.states == "gathered" for g in first], [g.members for g in first])
        for members, leader, last in zip(filled, first, flushed, strict=True):
            user = max((gradients[i].layer for i in members), key=number.__getitem__)
            self.flushed.setdefault(back[last], []).append(len(self.buckets))
            self.buckets.append(Bucket(tuple(members), leader.states, leader.layer, user))
        # What stays full for the step is gathered before it, in the reverse order of the sums.
        for b in reversed([b for leaving in self.flushed.values() for b in leaving]):
            if self.buckets[b].states == "sharded":
                self.out.append(AllGather(b))
                self.arriving.setdefault(self.buckets[b].first, []).append(b)

    def _gather(self, name: str) -> None:
        if name not in self.issued:
            self.issued.add(name)
            self.out.append(AllGather(name))

    def _arrive(self, name: str) -> None:
        if name in self.gathered:
            self._gather(name)
            self.issued.remove(name)
            self.out.append(Arrive(name, name))

    def _release(self, name: str) -> None:
        if name in self.gathered:
            self.out.append(Release(name))

    def _fill(self, name: str) -> None:
        if name in self.flushed:
            self.out.append(Fill(name, tuple(self.flushed[name])))

    # ---- forward ----

    def _forward(self) -> None:
        layers = self.graph.layers
        needed = self.needed
        last_reader = {source: i for i, layer in enumerate(layers) if layer.name in needed for source in layer.inputs}
        for i, layer in enumerate(layers):
            name = layer.name
            if name not in needed:
                continue
            self.out += [Arrive(name, bucket) for bucket in self.arriving.get(name, ())]
            self._arrive(name)
            if name in self.next_forward:
                self._gather(self.next_forward[name])
            self.out += [self._receive(name, slot) for slot in self._slots(layer)]
            self.out += [Begin(*end, "forward") for end in self._begun(name) if end[0] in needed]
            done = [Free(source) for source in dict.fromkeys(layer.inputs) if last_reader[source] == i]
            if layer.role is Role.SINK:
                self.out += [Output(name), *done]
                continue
            if name in self.block_of:
                self.out.append(Keep(name, self.block_of[name]))
            self.out.append(Compute(name, "forward", self.kind == "training" and name not in self.block_of))
            self._release(name)
            self.out += done if name in last_reader else [Free(name), *done]

    def _begun(self, name: str) -> list[EdgeEnd]:
        """The transfers that are issued before a layer computes."""
        return [end for end in self.begun.get(name, ()) if end in self.early]

    def _slots(self, layer: Layer) -> list[int]:
        """A layer's inputs in the order in which it receives them.

        Those that were issued early come first, so in the backward pass the gradient that is needed next goes first.
        """
        return sorted(range(len(layer.inputs)), key=lambda slot: (layer.name, slot) not in self.early)

    def _receive(self, name: str, slot: int) -> Instruction:
        return (End if (name, slot) in self.early else Move)(name, slot, "forward")

    # ---- backward ----

    def _backward(self, layer: Layer) -> None:
        name, differentiates = layer.name, self.graph.has_gradient[layer.name] and layer.role is not Role.TIED
        if layer.role is Role.SINK:
            self._return(layer)
            return
        if differentiates:
            self._arrive(name)
            if name in self.next_backward:
                self._gather(self.next_backward[name])
        if differentiates or layer.role is Role.TIED:
            self.out.append(Compute(name, "backward"))
        self._fill(name)
        self.out += [End(*end, "backward") for end in reversed(self._begun(name)) if self._returns(end)]
        if differentiates:
            self._return(layer)

    def _return(self, layer: Layer) -> None:
        """Sends the gradients of a layer's inputs back, in the reverse order of the inputs."""
        for slot in reversed(self._slots(layer)):
            end = layer.name, slot
            if self._returns(end):
                self.out.append((Begin if end in self.early else Move)(*end, "backward"))

    def _returns(self, end: EdgeEnd) -> bool:
        """True if an input needs a gradient."""
        user = self.graph[end[0]]
        return self.graph.has_gradient[user.inputs[end[1]]] and (user.end or self.graph.has_gradient[user.name])

    def _recompute(self, last: str) -> None:
        """Runs the recomputed layers of a block again, before the backward pass of its last layer."""
        layers = self.blocks[last]
        inside = {layer.name for layer in layers}
        uses = Counter(source for layer in layers for source in layer.inputs if source in inside)
        for layer in layers:
            name, sources = layer.name, [source for source in layer.inputs if source in inside]
            self.out += [Move(name, slot, "recompute") for slot in range(len(layer.inputs))]
            self._arrive(name)
            self.out.append(Compute(name, "recompute", saves=True))
            self._release(name)
            uses.subtract(sources)
            self.out += [Free(value) for value in dict.fromkeys((name, *sources)) if not uses[value]]
        self.out.append(Forget(last))
