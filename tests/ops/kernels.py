"""Checks of an operator's kernel: cut its iteration space, run every cell on what it needs, put the cells together.

Forward, the cells' outputs must be the whole operator's; backward, the sums of their gradients must be its gradients.
Cells that share statistics run as threads, so that their all-reduces meet.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, product

import torch
from hypothesis import strategies as st
from torch import Tensor

from layerwise.config import REDUCE_ORDER
from layerwise.geometry import Box, boundaries, nests
from layerwise.ops.base import Op, space
from layerwise.ops.facts import Local, Space
from layerwise.ops.fused import needed_box
from layerwise.tensor import TensorSpec
from tests.ops.harness import Reference, cells, check_needs, values
from tests.ops.harness import parameters as random_parameters


@st.composite
def degrees(draw: st.DrawFn, where: Space, *, most: int = 12) -> tuple[int, ...]:
    """How often each dimension of an iteration space is cut, reductions too; at most `most` cells."""
    result = [1] * len(where.dims)
    for i in draw(st.permutations(range(len(where.dims)))):
        result[i] = draw(st.integers(1, min(where.dims[i].max_degree, most)))
        most //= result[i]
    return tuple(result)


def check_kernel(
    op: Op,
    specs: Sequence[TensorSpec],
    cuts: Sequence[int],
    reference: Reference,
    *,
    inputs: Sequence[Tensor] | None = None,
    parameters: dict[str, Tensor] | None = None,
    training: bool = True,
    seed: int = 0,
    tolerance: float = 1e-10,
) -> None:
    """Compare `op.run` on the cells of a configuration with `reference(*inputs, **parameters)`, both directions.

    `cuts`: one degree a dimension of the iteration space (see `degrees`). Inputs and parameters are random unless
    given. Buffers (parameters that are not trainable) that the reference changes must be changed alike in every cell.
    """
    where, name = space(op, tuple(specs)), f"{op}, cut {tuple(cuts)}"
    given = list(inputs) if inputs is not None else values(specs)
    held = parameters if parameters is not None else random_parameters(where)
    trained = {p.name: p.trainable for p in where.parameters}
    leaves, held_leaves = [leaf(t) for t in given], {k: leaf(held[k], trained[k]) for k in trained}
    wanted = reference(*leaves, **held_leaves)
    assert tuple(wanted.shape) == where.out.shape, f"{op}: reference {tuple(wanted.shape)}, declared {where.out.shape}"

    split = any(cuts[k] > 1 for k in where.reductions)
    assert not (split and any(where.epilogue_inputs)), (
        "inputs of the epilogue are the runner's business: check the stages one by one"
    )
    parts = [Cell(op, where, tuple(specs), box, given, held, split, training, seed) for box in cells_of(where, cuts)]
    meetings = introduce(op, tuple(specs), parts, cuts)
    together([cell.forward for cell in parts], meetings)
    total = torch.zeros_like(wanted)
    for cell in parts:
        assert tuple(cell.result.shape) == cell.out.shape, f"{name}: {tuple(cell.result.shape)} for {cell.out}"
        total[cell.out.slices()] += cell.result.detach()
    after = [Finish(op, where, box, total, held) for box in owned(where, cuts)] if split else []
    for part in after:
        total[part.box.slices()] = part.result.detach()
    close(total, wanted, tolerance, f"{name}: output")
    for cell in parts:
        for k in cell.held:
            if not trained[k]:
                close(cell.held[k], held_leaves[k][cell.holds[k].slices()], tolerance, f"{name}: buffer {k}")
    if not wanted.requires_grad:
        return

    slope = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(7), dtype=wanted.dtype)
    wanted.backward(slope)  # type: ignore[no-untyped-call]
    grads, held_grads = [torch.zeros_like(t) for t in given], {k: torch.zeros_like(t) for k, t in held.items()}
    for part in after:
        slope[part.box.slices()] = part.backward(slope, held_grads)
    together([partial(cell.backward, slope) for cell in parts], meetings)
    for cell in parts:
        for grad, box, t in zip(grads, cell.needs, cell.inputs, strict=True):
            grad[box.slices()] += gradient(t)
        for k, t in cell.held.items():
            held_grads[k][cell.holds[k].slices()] += gradient(t)
    for i, (grad, t) in enumerate(zip(grads, leaves, strict=True)):
        close(grad, gradient(t), tolerance, f"{name}: gradient of input {i}")
    for k, t in held_leaves.items():
        close(held_grads[k], gradient(t), tolerance, f"{name}: gradient of {k}")


def check_split(
    data: st.DataObject,
    op: Op,
    specs: Sequence[TensorSpec],
    reference: Reference,
    *,
    tight: bool = True,
    inputs: Sequence[Tensor] | None = None,
) -> None:
    """Both laws of what can be split: any cell needs what the real operator touches, and the cells make the whole.

    tight: whether all of a needed box is read. inputs: of the second law.
    """
    where = space(op, tuple(specs))
    check_needs(op, specs, data.draw(cells(where)), reference, tight=tight)
    check_kernel(op, specs, data.draw(degrees(where)), reference, inputs=inputs)


@dataclass
class Cell:
    """One device's part: its boxes of the inputs and of the parameters, then its part of the output."""

    op: Op
    where: Space
    specs: tuple[TensorSpec, ...]
    box: Box
    whole_inputs: list[Tensor]
    whole_held: dict[str, Tensor]
    split: bool  # a reduction is: no parameters of the epilogue
    training: bool
    seed: int
    all_reduce: Callable[[Tensor], Tensor] | None = None
    result: Tensor = field(default_factory=lambda: torch.empty(0))

    def __post_init__(self) -> None:
        rank = len(self.where.out.shape)
        self.out = Box(self.box.lo[:rank], self.box.hi[:rank])
        self.needs = tuple(needed_box(m, self.box) for m in self.where.needs)
        self.inputs = [leaf(t[box.slices()]) for t, box in zip(self.whole_inputs, self.needs, strict=True)]
        mine = [p for p in self.where.parameters if not (self.split and p.epilogue)]
        self.holds = {p.name: needed_box(p.maps, self.box) for p in mine}
        self.held = {p.name: leaf(self.whole_held[p.name][self.holds[p.name].slices()], p.trainable) for p in mine}

    def forward(self) -> None:
        at = Local(self.where, self.specs, self.box, self.needs, self.training, self.all_reduce, self.seed)
        self.result = self.op.run(at, self.inputs, self.held)

    def backward(self, slope: Tensor) -> None:
        if self.result.requires_grad:  # a cell may have seen nothing but padding
            self.result.backward(slope[self.out.slices()])  # type: ignore[no-untyped-call]


class Finish:
    """What follows a reduction, on the box of the sum that a device owns."""

    def __init__(self, op: Op, where: Space, box: Box, total: Tensor, held: dict[str, Tensor]) -> None:
        epilogue = [p for p in where.parameters if p.epilogue]
        k = Box((*box.lo, *(0 for _ in where.reductions)), (*box.hi, *(where.dims[i].extent for i in where.reductions)))
        self.box, self.total = box, leaf(total[box.slices()])
        self.holds = {p.name: needed_box(p.maps, k) for p in epilogue}
        self.held = {p.name: leaf(held[p.name][self.holds[p.name].slices()], p.trainable) for p in epilogue}
        self.result = op.finish(self.total, self.held)

    def backward(self, slope: Tensor, held_grads: dict[str, Tensor]) -> Tensor:
        """The gradient of the sum; those of the parameters are added to `held_grads`."""
        if not self.held:
            return slope[self.box.slices()]
        self.result.backward(slope[self.box.slices()])  # type: ignore[no-untyped-call]
        for k, t in self.held.items():
            held_grads[k][self.holds[k].slices()] += gradient(t)
        return gradient(self.total)


class Meeting:
    """The devices that share statistics: their tensors are added in the order of the devices."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.brought: dict[int, Tensor] = {}

    def all_reduce(self, rank: int, t: Tensor) -> Tensor:
        self.brought[rank] = t.detach().clone()
        self.barrier.wait()
        total = torch.stack([self.brought[i] for i in range(self.barrier.parties)]).sum(0)
        self.barrier.wait()
        return total


def introduce(op: Op, specs: tuple[TensorSpec, ...], cells: Sequence[Cell], cuts: Sequence[int]) -> list[Meeting]:
    """Give all cells that differ only along the dimensions of the operator's statistics an all-reduce."""
    found = {s.over for stage in op.stages(specs) if (s := stage.statistics())}
    meetings = []
    for over in found:
        assert len(found) == 1, f"{op}: statistics over several sets of dimensions"
        groups: dict[tuple[int, ...], list[Cell]] = {}
        for cell in cells:
            groups.setdefault(tuple(x for i, x in enumerate(cell.box.lo) if i not in over), []).append(cell)
        for group in groups.values():
            if len(group) > 1:
                meetings.append(Meeting(len(group)))
                for rank, cell in enumerate(group):
                    cell.all_reduce = partial(meetings[-1].all_reduce, rank)
    return meetings


def together(jobs: Sequence[Callable[[], None]], meetings: Sequence[Meeting]) -> None:
    """Run all jobs, at once where they meet. The first error is raised."""
    if not meetings:
        for job in jobs:
            job()
        return
    errors: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)
            for meeting in meetings:
                meeting.barrier.abort()

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def cells_of(where: Space, cuts: Sequence[int]) -> list[Box]:
    """The cells of a configuration, row-major."""
    edges = [boundaries(d.extent, cut, d.unit).tolist() for d, cut in zip(where.dims, cuts, strict=True)]
    return [Box(tuple(a for a, _ in ends), tuple(b for _, b in ends)) for ends in product(*map(pairwise, edges))]


def owned(where: Space, cuts: Sequence[int]) -> list[Box]:
    """The boxes of the output after the reduction: cut once more along the first dimension that has room."""
    rank = len(where.out.shape)
    again = [1] * rank
    for label in REDUCE_ORDER:
        at = next((i for i, d in enumerate(where.dims[:rank]) if d.label == label), None)
        room = 0 if at is None else where.dims[at].max_degree
        if at is not None and room >= cuts[at] * cuts[rank] and nests(room, cuts[at], cuts[rank]):
            again[at] = cuts[rank]
            break
    edges = [
        boundaries(d.extent, cut * more, d.unit).tolist()
        for d, cut, more in zip(where.dims[:rank], cuts[:rank], again, strict=True)
    ]
    return [Box(tuple(a for a, _ in ends), tuple(b for _, b in ends)) for ends in product(*map(pairwise, edges))]


def leaf(t: Tensor, differentiable: bool = True) -> Tensor:
    """A copy that collects its own gradient."""
    return t.detach().clone().requires_grad_(differentiable and t.is_floating_point())


def gradient(t: Tensor) -> Tensor:
    """What was collected."""
    return torch.zeros_like(t) if t.grad is None else t.grad


def close(got: Tensor, wanted: Tensor, tolerance: float, what: str) -> None:
    torch.testing.assert_close(
        got.detach(), wanted.detach(), rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}\n{text}"
    )
