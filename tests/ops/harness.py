"""Checks of an operator's `needs` against the real operator, element by element.

Sufficient: poison (NaN) whatever a box does not need, and the box of the output must not change.
Tight: the gradient of a box of the output must reach the faces of the needed box.
Reductions: partial results over the parts of `k` must add up.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from layerwise.geometry import Box, boundaries
from layerwise.ops.base import Op, space
from layerwise.ops.facts import Local, Space
from layerwise.ops.fused import needed_box, undivided
from layerwise.tensor import TensorSpec

Reference = Callable[..., Tensor]  # (*inputs, **parameters by name) -> output

IMAGES = {0: ("n", "c"), 1: ("n", "c", "l"), 2: ("n", "c", "h", "w"), 3: ("n", "c", "d", "h", "w")}  # by spatial rank


def each(draw: st.DrawFn, rank: int, low: int, high: int) -> tuple[int, ...]:
    """One integer a dimension."""
    return tuple(draw(st.integers(low, high)) for _ in range(rank))


@st.composite
def images(
    draw: st.DrawFn, *, ranks: tuple[int, int] = (1, 3), low: int = 4, high: int = 8, block: int = 1
) -> TensorSpec:
    """A batch of few samples and channels (multiples of `block`), of that many spatial dimensions and extents."""
    rank = draw(st.integers(*ranks))
    shape = (draw(st.integers(1, 3)), block * draw(st.integers(1, 3)), *each(draw, rank, low, high))
    return TensorSpec(shape, IMAGES[rank])


@st.composite
def cells(draw: st.DrawFn, where: Space, *, reductions: bool = False) -> Box:
    """A random cell of the iteration space, cut only where it may be cut; reductions whole unless asked."""
    lo, hi = [], []
    for i, dim in enumerate(where.dims):
        start, stop = 0, dim.max_degree
        if dim.label and (reductions or i not in where.reductions):
            start = draw(st.integers(0, dim.max_degree - 1))
            stop = draw(st.integers(start + 1, dim.max_degree))
        lo.append(start * dim.unit if dim.label else 0)
        hi.append(stop * dim.unit if dim.label else dim.extent)
    return Box(tuple(lo), tuple(hi))


def values(specs: Sequence[TensorSpec], seed: int = 0) -> list[Tensor]:
    """Random float64 inputs (small non-negative integers for integer types)."""
    g = torch.Generator().manual_seed(seed)
    return [
        torch.randn(s.shape, generator=g, dtype=torch.float64)
        if s.differentiable
        else torch.randint(0, 3, s.shape, generator=g)
        for s in specs
    ]


def parameters(where: Space, seed: int = 1) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {p.name: torch.randn(p.shape, generator=g, dtype=torch.float64) for p in where.parameters}


def outside(t: Tensor, box: Box, fill: float) -> Tensor:
    """`t` with everything but `box` replaced."""
    out = torch.full_like(t, fill)
    out[box.slices()] = t[box.slices()]
    return out


def check_needs(
    op: Op,
    specs: Sequence[TensorSpec],
    cell: Box,
    reference: Reference,
    *,
    tight: bool = True,
    poison: float = torch.nan,
    resolution: float = 0.0,
) -> None:
    """Poison what `cell` does not need; then follow the gradient back. `cell` spans the whole of every reduction.

    A finite `poison` and a `resolution` above 0 (smaller gradients are none) are for references that read elements
    with weight zero, or next to zero by rounding.
    """
    where = space(op, tuple(specs))
    inputs, params = values(specs), parameters(where)
    full = reference(*inputs, **params)
    assert tuple(full.shape) == where.out.shape, f"{op}: output {tuple(full.shape)}, declared {where.out.shape}"
    box = Box(cell.lo[: full.ndim], cell.hi[: full.ndim])
    needs = [needed_box(m, cell) for m in where.needs]
    holds = {p.name: needed_box(p.maps, cell) for p in where.parameters}
    given = [outside(t, b, poison if t.is_floating_point() else 0) for t, b in zip(inputs, needs, strict=True)]
    poisoned = reference(*given, **{k: outside(t, holds[k], poison) for k, t in params.items()})
    torch.testing.assert_close(poisoned[box.slices()], full[box.slices()], rtol=1e-12, atol=1e-12)
    if not tight:
        return
    leaves = [t.requires_grad_() for t in (*inputs, *params.values()) if t.is_floating_point()]
    boxes = [b for t, b in zip(inputs, needs, strict=True) if t.is_floating_point()] + list(holds.values())
    maps = [m for t, m in zip(inputs, where.needs, strict=True) if t.is_floating_point()] + [
        p.maps for p in where.parameters
    ]
    out = reference(*inputs, **params)
    weight = torch.rand(out[box.slices()].shape, dtype=torch.float64) + 0.5
    grads = torch.autograd.grad((out[box.slices()] * weight).sum(), leaves, allow_unused=True)
    for leaf, grad, declared, axes in zip(leaves, grads, boxes, maps, strict=True):
        touched = torch.zeros_like(leaf) if grad is None else grad
        index = (touched.abs() > resolution).nonzero()
        if len(index) == 0:
            # (a kernel is declared whole, also where it meets nothing but padding)
            unused = declared.volume == 0 or any(b.volume == 0 for b in boxes)
            assert unused, f"{op} {cell}: declared {declared}, needs nothing"
            continue
        hull = Box(tuple(index.amin(0).tolist()), tuple((index.amax(0) + 1).tolist()))
        for i, axis in enumerate(axes):
            if axis.source is not None:  # a dimension that is always whole (kernel taps) may well not be used up
                reached, declares = (hull.lo[i], hull.hi[i]), (declared.lo[i], declared.hi[i])
                assert reached == declares, (
                    f"{op} {cell}: dimension {i} declared {declares}, the gradient reaches {reached}"
                )


def check_reduction(op: Op, specs: Sequence[TensorSpec], degree: int, reference: Reference) -> None:
    """Partial results over `degree` parts of k, parameters of the epilogue left out, add up to the whole."""
    where = space(op, tuple(specs))
    (k,) = where.reductions
    dim = where.dims[k]
    inputs = values(specs)
    params = {
        p.name: torch.zeros_like(t) if p.epilogue else t
        for p, t in zip(where.parameters, parameters(where).values(), strict=True)
    }
    full = reference(*inputs, **params)
    total = torch.zeros_like(full)
    cuts = boundaries(dim.extent, degree, dim.unit).tolist()
    for a, b in pairwise(cuts):
        cell = Box((*(0,) * k, a), (*(d.extent for d in where.dims[:k]), b))
        total += reference(
            *(
                outside(t, needed_box(m, cell), 0.0) if t.is_floating_point() else t
                for t, m in zip(inputs, where.needs, strict=True)
            ),
            **{p.name: outside(params[p.name], needed_box(p.maps, cell), 0.0) for p in where.parameters},
        )
    torch.testing.assert_close(total, full, rtol=1e-10, atol=1e-10)


def whole(op: Op, specs: Sequence[TensorSpec], **how: Any) -> Local:
    """The cell of one device that computes all of `op`. how: other fields of `Local`."""
    return undivided(space(op, tuple(specs)), tuple(specs), **how)


def check_identical(
    op: Op,
    specs: Sequence[TensorSpec],
    reference: Reference,
    *,
    training: bool = True,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Output, gradients and buffers of one device's cell are PyTorch's, to the last bit."""
    results = []
    for sharded in (True, False):
        g = torch.Generator().manual_seed(3)
        inputs = [
            torch.randn(s.shape, generator=g).to(dtype).requires_grad_()
            if s.differentiable
            else torch.randint(0, 2 if s.dtype == "bool" else 3, s.shape, generator=g).to(getattr(torch, s.dtype))
            for s in specs
        ]
        params: Mapping[str, Tensor] = {
            p.name: torch.rand(p.shape, generator=g).to(dtype).requires_grad_(p.trainable)
            for p in space(op, tuple(specs)).parameters
        }
        out = op.run(whole(op, specs, training=training), inputs, params) if sharded else reference(*inputs, **params)
        if out.requires_grad:
            out.backward(torch.randn(out.shape, generator=g).to(out.dtype))  # type: ignore[no-untyped-call]
        results.append([out, *(t.grad for t in (*inputs, *params.values())), *params.values()])
    for a, b in zip(*results, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a.nan_to_num(), b.nan_to_num())
        assert a is None or a.dtype == b.dtype


def flat(pads: tuple[tuple[int, int], ...]) -> list[int]:
    """As torch has them: last dimension first."""
    return [p for pair in reversed(pads) for p in pair]


def pairs(draw: st.DrawFn, rank: int, low: int, high: int, *, symmetric: bool) -> tuple[tuple[int, int], ...]:
    firsts = each(draw, rank, low, high)
    return tuple(zip(firsts, firsts if symmetric else each(draw, rank, low, high), strict=True))


def sample(x: TensorSpec) -> Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
