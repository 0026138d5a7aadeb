"""One device that computes all of an operator: its result must be plain PyTorch's, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from layerwise.geometry import Box
from layerwise.ops.base import Op, space
from layerwise.ops.facts import Local
from layerwise.tensor import TensorSpec
from tests.ops.harness import Reference, needed


def whole(
    op: Op,
    specs: Sequence[TensorSpec],
    *,
    training: bool = True,
    all_reduce: Callable[[Tensor], Tensor] | None = None,
    seed: int = 0,
) -> Local:
    """The one cell."""
    where = space(op, tuple(specs))
    cell = Box((0,) * len(where.dims), tuple(d.extent for d in where.dims))
    return Local(where, tuple(specs), cell, tuple(needed(m, cell) for m in where.needs), training, all_reduce, seed)


def check_identical(
    op: Op,
    specs: Sequence[TensorSpec],
    reference: Reference,
    *,
    training: bool = True,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Output, gradients and buffers of the whole against PyTorch's, to the last bit."""
    results = []
    for mine in (True, False):
        g = torch.Generator().manual_seed(3)
        inputs = [
            torch.randn(s.shape, generator=g).to(dtype).requires_grad_()
            if s.differentiable
            else torch.randint(0, 2 if s.dtype == "bool" else 3, s.shape, generator=g).to(getattr(torch, s.dtype))
            for s in specs
        ]
        held: Mapping[str, Tensor] = {
            p.name: torch.rand(p.shape, generator=g).to(dtype).requires_grad_(p.trainable)
            for p in space(op, tuple(specs)).parameters
        }
        out = op.run(whole(op, specs, training=training), inputs, held) if mine else reference(*inputs, **held)
        if out.requires_grad:
            out.backward(torch.randn(out.shape, generator=g).to(out.dtype))  # type: ignore[no-untyped-call]
        results.append([out, *(t.grad for t in (*inputs, *held.values())), *held.values()])
    for a, b in zip(*results, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a.nan_to_num(), b.nan_to_num())
        assert a is None or a.dtype == b.dtype
