"""Executor: a rank's forward pass, by the instructions of the program, as one autograd graph.

Every rank goes through all instructions, including those of layers that it has no part of, so all ranks communicate in
the same order. Communication passes the order token on (see `run.execute.autograd`), so the backward pass has that
order reversed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from layerwise.errors import LayerwiseError
from layerwise.ops.base import Role
from layerwise.ops.fused import InPieces
from layerwise.partition.pieces import pieces_of
from layerwise.program import Instruction, StepKind
from layerwise.program.instructions import AllGather, Arrive, Begin, Compute, End, Free, Keep, Move, Output, Release
from layerwise.run.compiling import Settings
from layerwise.run.execute.autograd import Communication, at_once, communicated, issued_early, zeros_for
from layerwise.run.execute.gathers import gather_once_more
from layerwise.run.execute.kernels import LayerKernel, Pass, all_there
from layerwise.run.execute.saved import Block, SavedOutput
from layerwise.run.execute.segments import Segment, segments
from layerwise.run.schedule.redistribute import Flight, TimedTransfer, landed
from layerwise.run.schedule.schedule import Schedule, ScheduledEdge, ScheduledLayer, ScheduledPiece

Steps = list[tuple[str, list[Instruction]]]  # by layer


class Executor:
    """The interpreter of one rank's schedule. constants: this rank's boxes of parameters that the module lacks."""

    def __init__(self, schedule: Schedule, constants: Mapping[str, Tensor]) -> None:
        self.schedule, self.constants = schedule, constants
        self.layers = {scheduled.layer.name: scheduled for scheduled in schedule.layers}
        self.returned = frozenset(schedule.graph.layers[-1].inputs)
        self.blocks: dict[str, list[Instruction]] = {}  # how each is recomputed
        self._steps: dict[StepKind, Steps] = {}
        self._settings: Settings | None = None  # of torch.compile
        self._segments: dict[bool, dict[str, Segment]] = {}
        if schedule.options.compile is not None:
            self.compile(schedule.options.compile)

    def compile(self, settings: Settings) -> None:
        """Compiles what lies between communications, from now on."""
        for layer in self.schedule.graph.layers:
            if any(stage.op.draws_always for stage in layer.stages):
                raise LayerwiseError(
                    f"layer {layer.name!r} draws random numbers in a way that cannot be compiled: leave compile= out"
                )
        self._settings = {"dynamic": False, **settings, "fullgraph": True}  # a schedule has fixed sizes
        self._segments.clear()

    def forward(self, run: Pass, fed: Mapping[str, Tensor]) -> list[Tensor | None]:
        """Returns this rank's boxes of the outputs from those of the inputs (`fed`, constants included)."""
        return _Forward(self, run, fed).outputs()

    def steps(self, run: Pass) -> Steps:
        """Returns the instructions of a forward pass, by layer."""
        kind: StepKind = "training" if run.training or run.differentiate else "inference"
        if kind not in self._steps:
            program = self.schedule.program(kind)
            self._steps[kind] = program.forward()
            self.blocks |= program.recomputed()
        return self._steps[kind]

    def segments(self, run: Pass) -> Mapping[str, Segment]:
        """Returns the compiled segment that contains each layer, by layer name; the other layers communicate."""
        if self._settings is None:
            return {}
        if run.training not in self._segments:
            compiled = segments(self.schedule, self._settings, training=run.training)
            by_layer = {scheduled.layer.name: segment for segment in compiled for scheduled in segment.layers}
            self._segments[run.training] = by_layer
        return self._segments[run.training]


class _Forward:
    """One forward pass: its state, and what each instruction of the program does here."""

    def __init__(self, executor: Executor, run: Pass, fed: Mapping[str, Tensor]) -> None:
        self.executor, self.run, self.fed = executor, run, fed
        self.schedule, self.layers = executor.schedule, executor.layers
        self.values = dict[str, Tensor | None]()  # by layer: this rank's box of its output, until its last reader
        self.types = dict[str, torch.dtype]()  # element types of the layers' outputs
        self.received = dict[int, Tensor | None]()  # the inputs of the next layer, by slot
        self.issued = dict[tuple[str, int], Communication]()  # to be awaited, by layer and slot
        self.saved = dict[str, SavedOutput]()  # by layer, until its output is saved in what a reader receives
        self.segments = executor.segments(run)
        self.blocks = dict[str, Block]()  # by the name of their last layer, until that is computed
        self.block_of = dict[str, Block]()  # the block of each recomputed layer
        # the layer whose parameters are gathered before the next one's, in the backward pass
        self.gathered: str | None = None
        self.does: dict[type[Instruction], Callable[..., None]] = {
            AllGather: self.gather,
            Arrive: self.arrive,
            Release: self.release,
            Begin: self.begin,
            End: self.end,
            Move: self.move,
            Keep: self.keep,
            Compute: self.compute,
            Free: self.free,
            Output: lambda _: None,  # the received inputs are the outputs
        }

    def outputs(self) -> list[Tensor | None]:
        """Runs the pass and returns what the sink receives."""
        for name, instructions in self.executor.steps(self.run):
            self.run.comm.at(self.run.number, name)
            for instruction in instructions:
                self.does[type(instruction)](instruction)
            if name in self.blocks:
                self.blocks.pop(name).end(self.values, self.types)
        return [self.received[slot] for slot in range(len(self.received))]

    # ---- parameters that are full only while their layer computes ----

    def gather(self, instruction: AllGather) -> None:
        if instruction.what in self.run.gathers:
            self.run.gathers[str(instruction.what)].begin()

    def arrive(self, instruction: Arrive) -> None:
        if instruction.layer in self.run.gathers:
            self.run.gathers[instruction.layer].finish()

    def release(self, instruction: Release) -> None:
        """Frees a layer's parameters. The backward pass gathers them again before it differentiates the layer.

        A rank without a part of the layer passes its turn on: the ranks gather in one order.
        """
        run, name = self.run, instruction.layer
        if run.differentiate and self.layers[name].backward:
            gather, self.gathered = partial(gather_once_more, run.gathers, name, self.gathered), name
            output = [self.values.get(name)]
            run.order(output, [0], gather)
            self.values[name] = output[0]
        if name in run.gathers:
            run.gathers[name].drop(self.values.get(name))

    # ---- inputs ----

    def _in_pieces(self, scheduled: ScheduledLayer, slot: int | None = None) -> bool:
        """True if an input of a layer (None: some input) is received while the layer computes, a piece at a time."""
        pieces = scheduled.pieces
        if not pieces or self.run.differentiate or self.run.training or scheduled.layer.name in self.segments:
            return False
        return slot is None or slot in pieces[0].ways

    def begin(self, instruction: Begin) -> None:
        """Issues an input early."""
        if self._in_pieces(self.layers[instruction.layer], instruction.slot):
            return
        edge = self.layers[instruction.layer].edges[instruction.slot]
        leaving, self.issued[instruction.layer, instruction.slot] = issued_early(*self._ways(edge))
        self._communicate(edge, self.values[edge.source], leaving)

    def end(self, instruction: End) -> None:
        """Waits for an input that was issued early."""
        scheduled, slot = self.layers[instruction.layer], instruction.slot
        if self._in_pieces(scheduled, slot):
            self.received[slot] = None
            return
        awaited = self.issued.pop((instruction.layer, slot))
        self._receive(scheduled, slot, self._communicate(scheduled.edges[slot], None, awaited))

    def move(self, instruction: Move) -> None:
        scheduled, slot = self.layers[instruction.layer], instruction.slot
        edge = scheduled.edges[slot]
        if self._in_pieces(scheduled, slot) or (scheduled.layer.name in self.segments and not edge.travels):
            self.received[slot] = None  # a compiled segment slices it itself
        elif edge.stays:
            self.received[slot] = self.values[edge.source]
        else:
            self._receive(scheduled, slot, self._redistribute(edge))

    def _receive(self, scheduled: ScheduledLayer, slot: int, x: Tensor | None) -> None:
        edge = scheduled.edges[slot]
        self.received[slot] = x
        if edge.within and edge.source in self.saved:
            self.saved.pop(edge.source).move(edge, x)

    def _communicate(self, edge: ScheduledEdge, x: Tensor | None, way: Communication) -> Tensor | None:
        """Returns `way` of x, in its turn. If a gradient comes back, the backward pass takes a turn too."""
        if not (self.run.differentiate and edge.backward):
            with torch.no_grad():
                return way.run(x)
        self.run.token, result = communicated(self.run.token, x, way)
        return result

    def _redistribute(self, edge: ScheduledEdge) -> Tensor | None:
        """Returns the box of a layer's output that this rank needs for another layer."""
        run, x = self.run, self.values[edge.source]
        full = edge.redistribution.kind == "io"  # every rank has all of it, and computes the same from it
        if not (edge.travels or full):
            part = edge.redistribution.kept(x, self.run.empty(self.types[edge.source]))
            if part is not None and not part.numel() and run.differentiate and edge.backward and not part.requires_grad:
                # it depends on nothing that is trained, yet all ranks sum the gradients of the layer's statistics
                part.requires_grad_()
            return part
        return self._communicate(edge, x, at_once(*self._ways(edge, alike=full)))

    def _ways(self, edge: ScheduledEdge, *, alike: bool = False) -> tuple[TimedTransfer, TimedTransfer]:
        """Returns the forward and backward transfers. alike: all ranks have the same gradient; nothing is summed."""
        like, way = self.run.empty(self.types[edge.source]), edge.redistribution
        run, name = self.run, f"{edge.what} (backward)"

        def back(gradient: Tensor | None) -> Flight:
            run.comm.at(run.number, name)
            return way.begin_adjoint(gradient, like)

        def own(gradient: Tensor | None) -> Flight:
            box = way.transfer.own
            return landed(None if box is None or gradient is None else gradient[box.slices()])

        there, adjoint = (lambda x: way.begin(x, like)), own if alike else back
        return TimedTransfer(edge.what, there, run.spans), TimedTransfer(name, adjoint, run.spans)

    # ---- layers ----

    def keep(self, instruction: Keep) -> None:
        if self.run.differentiate:
            if instruction.block not in self.blocks:
                last, executor = instruction.block, self.executor
                self.blocks[last] = Block(self.run, self.layers, self.schedule.blocks[last], executor.blocks[last])
            block = self.blocks[instruction.block]
            block.save_sources(self.layers[instruction.layer], self.values)
            self.block_of[instruction.layer] = block

    def compute(self, instruction: Compute) -> None:
        run, name = self.run, instruction.layer
        scheduled, segment = self.layers[name], self.segments.get(name)
        received, self.received = [self.received[slot] for slot in range(len(scheduled.edges))], {}
        if run.differentiate and scheduled.backward:
            run.token = zeros_for(run.token, [run.parameters[p] for p in scheduled.elsewhere])
        if segment is not None:
            if segment.layers[0] is scheduled:  # computes all layers of the segment
                self._segment(segment, received)
        else:
            out = self._layer(scheduled, received)
            if out is not None and not run.differentiate and name in self.executor.returned:
                # What is returned stays: a view of more, such as frames for the next chunk, would keep all of it.
                out = out.clone() if out.untyped_storage().nbytes() > out.nbytes else out
            self.values[name] = out
            self.types[name] = (scheduled.dtype or torch.int64) if out is None else out.dtype
        unread = self.values.get(name) if name in self.schedule.unread else None
        if run.differentiate and unread is not None:
            run.token = zeros_for(run.token, [unread])

    def free(self, instruction: Free) -> None:
        self.values.pop(instruction.value, None)  # a value within a compiled segment is not stored

    def _layer(self, scheduled: ScheduledLayer, received: Sequence[Tensor | None]) -> Tensor | None:
        """Returns this rank's box of a layer's output; None if it has no part of it."""
        run, name, work, parameters = self.run, scheduled.layer.name, scheduled.work, scheduled.parameters
        if scheduled.layer.role is not Role.COMPUTE:
            return self._source(scheduled)
        in_pieces = self._in_pieces(scheduled)
        if work is None:
            if in_pieces:  # it may send some
                deque(self._pieces(scheduled), maxlen=0)
            return None
        count, backward = len(scheduled.layer.specs), run.differentiate and scheduled.backward
        tied = iter(received[count:])
        tensors = [*received[:count], *(next(tied) if p is None else run.parameters[p] for p in parameters)]
        found = pieces_of(scheduled.layer, viewed=True) if in_pieces else None
        pieces = None if found is None else InPieces(found.maps, self._pieces(scheduled))
        compute: LayerKernel = partial(run.layer, scheduled, pieces=pieces)
        if name in run.gathers and backward:
            # So all ranks begin to sum these gradients before they reach the next layer.
            run.order(tensors, [count + i for i, p in enumerate(parameters) if p in run.gathers[name].names])
        if name in self.schedule.within and backward:
            self.saved[name] = SavedOutput()
            compute = partial(self.saved[name].compute, compute)
        if name in self.block_of:
            compute = partial(self.block_of[name].compute, scheduled, compute)
        (out,) = run.in_turn(
            name,
            tensors,
            lambda tensors: [compute(tensors[:count], tensors[count:])],
            backward=scheduled.backward,
            communicates=work.communicates,
        )
        return out

    def _pieces(self, scheduled: ScheduledLayer) -> Iterator[tuple[int, int, list[Tensor]]]:
        """Yields what this rank sees of some inputs, a piece at a time. The next one is under way meanwhile."""
        run, edges = self.run, scheduled.edges

        def begin(piece: ScheduledPiece) -> list[Flight]:
            with run.spans.span(scheduled.layer.name, "transfers"):
                sources = {slot: edges[slot].source for slot in piece.ways}
                return [
                    way.begin(self.values[sources[slot]], run.empty(self.types[sources[slot]]))
                    for slot, way in piece.ways.items()
                ]

        flights = begin(scheduled.pieces[0])
        for piece, following in zip(scheduled.pieces, (*scheduled.pieces[1:], None), strict=True):
            with run.spans.span(scheduled.layer.name, "transfers"):
                received = [flight.finish() for flight in flights]
            flights = begin(following) if following is not None else []
            yield *piece.bounds, [x for x in received if x is not None]

    def _source(self, scheduled: ScheduledLayer) -> Tensor | None:
        """Returns this rank's part of a value that is not computed: a tied parameter, an input or a constant."""
        name = scheduled.layer.name
        if scheduled.layer.role is Role.TIED:
            return None if scheduled.elsewhere else self.run.parameters[name]
        return self.fed.get(name)

    def _segment(self, segment: Segment, received: Sequence[Tensor | None]) -> None:
        """Computes the outputs of a segment; the inputs of its first layer have been received."""
        run, inputs = self.run, list[Tensor | None]()
        for source, slot in segment.inputs:
            if slot is not None:
                inputs.append(received[slot])
            elif source in self.values:
                inputs.append(self.values[source])
            else:  # it is passed between the segment's layers
                inputs.append(self._source(self.layers[source]))
        count, seeds = len(inputs), segment.seeds(run.seed, run.options.device)

        def compute(tensors: list[Tensor | None]) -> list[Tensor | None]:
            with run.autocast(segment.layers[0]):
                return [*segment(all_there(tensors[:count]), all_there(tensors[count:]), seeds)]

        tensors = [*inputs, *(run.parameters[name] for name in segment.parameters)]
        outputs = run.in_turn(segment.name, tensors, compute, backward=segment.backward)
        for name, out in zip(segment.outputs, outputs, strict=True):
            assert out is not None
            self.values[name], self.types[name] = out, out.dtype
