"""Attention. https://pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from layerwise.errors import LayerwiseError
from layerwise.geometry import AxisMap, Box, identity, scaled, whole
from layerwise.ops.base import Op
from layerwise.ops.facts import Counts, Extents, Gemm, Local, Maps, Pieces, Saved
from layerwise.ops.random import drop
from layerwise.ops.specs import broadcast, merge_labels, only
from layerwise.tensor import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


MUCH = 1 << 26  # bytes of keys and values, from which on they are read a piece at a time
SCORES = 1 << 22  # that are computed at once then


@dataclass(frozen=True, slots=True)
class Attention(Op):
    """softmax(q @ k.T * scale + mask) @ v over the last two dimensions of (n, heads, s, e), heads optional.

    Inputs: q, k, v[, mask]. k and v may have fewer heads (grouped queries): each then serves a group of query heads,
    and heads are split between groups. Queries are split anywhere; k and v are needed in full, but in evaluation large
    ones come a piece at a time (`run_pieces`); a causal mask uses positions in the full sequence. `dropout` is the
    probability of a zero among the softmax's results. FLOPs: 2 a multiply-add in both products; what a causal mask
    saves is not counted, as the last queries save little and the other devices wait for them.
    """

    kind: ClassVar[str] = "attention"
    draws: ClassVar[bool] = True
    causal: bool = False
    mask: bool = False
    scale: float | None = None
    dropout: float = 0.0

    @property
    def random(self) -> bool:
        return self.dropout > 0

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        q, k, v = inputs[:3]
        assert len(inputs) == 3 + self.mask, f"{self} of {len(inputs)} inputs"
        rank = len(q.shape)
        fits = len(k.shape) == len(v.shape) == rank >= 3
        fits = fits and q.shape[-1] == k.shape[-1] and k.shape[-2] == v.shape[-2]
        fits = fits and k.shape[:-2] == v.shape[:-2]
        fits = fits and all(a in (b, 1) for a, b in zip(k.shape[: rank - 3], q.shape, strict=False))
        fits = fits and (q.shape[-3] % k.shape[-3] == 0 if rank > 3 else k.shape[0] in (q.shape[0], 1))
        if not fits:
            raise LayerwiseError(f"attention of {q.describe()} over {k.describe()} and {v.describe()} does not fit")
        lead = range(rank - 2)
        stack = merge_labels(q.shape[:-2], [only(x, lead) for x in inputs[:3]], q.dtype)
        units = list(stack.units)
        if 1 < k.shape[-3] < q.shape[-3]:  # cells of full groups, which are full units of k's and v's heads
            units[-1] = lcm(q.units[-3], q.shape[-3] // k.shape[-3] * lcm(k.units[-3], v.units[-3]))
        dims = [*stack.dims, q.dims[-2]]
        if q.dims[-2] in stack.dims:
            dims[-1] = None
        dims.append(None if v.dims[-1] in dims else v.dims[-1])
        out = TensorSpec((*q.shape[:-1], v.shape[-1]), tuple(dims), q.dtype, (*units, q.units[-2], v.units[-1]))
        if self.mask:
            _check_mask(inputs[3], (*q.shape[:-1], k.shape[-2]))
        return out

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        q, k, v = inputs[:3]
        rank = len(out.shape)
        queries = (*(identity(extent, i) for i, extent in enumerate(q.shape[:-1])), whole(q.shape[-1]))
        heads = tuple(_head(k.shape[i], q.shape[i], i) for i in range(rank - 2))
        keys = (*heads, whole(k.shape[-2]), whole(k.shape[-1]))
        values = (*heads, whole(v.shape[-2]), identity(v.shape[-1], rank - 1))
        if not self.mask:
            return queries, keys, values
        mask = inputs[3]
        rows = broadcast((*mask.shape[:-1], 1), out)[:-1]
        return queries, keys, values, (*rows, whole(mask.shape[-1]))

    def gemms(self, inputs: Sequence[TensorSpec], extents: Extents) -> tuple[Gemm, ...]:
        k = inputs[1]
        e = extents.astype(np.float64)
        heads, rows, width = e[..., :-2].prod(-1), e[..., -2], e[..., -1]
        keys, depth = np.full_like(rows, k.shape[-2]), np.full_like(rows, k.shape[-1])
        return (Gemm(rows, keys, depth, heads), Gemm(rows, width, keys, heads))

    def saved(self, inputs: Sequence[TensorSpec], lo: Extents, hi: Extents) -> Saved:
        """A flash kernel saves its output; with dropout, the weights before and after it, and a byte for each draw."""
        q, k = inputs[:2]
        scores = (hi - lo)[..., : len(q.shape) - 1].astype(np.float64).prod(-1) * k.shape[-2]
        if self.dropout == 0:
            return Saved()
        return Saved(extra=scores * (2 * q.item_bytes + 1), forward=16 * scores, between=3 * scores * q.item_bytes)

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        """Runs PyTorch's kernel, unless dropout by position is needed."""
        import torch.nn.functional as F

        q, k, v = inputs[:3]
        mask = inputs[3] if self.mask else None
        if mask is not None and mask.dim() == 1:  # PyTorch's kernel needs two
            mask = mask.unsqueeze(0)
        first, last = local.cell.lo[-2], local.cell.hi[-2]
        if self.causal and last < k.shape[-2]:  # no query here sees the keys after the last query
            k, v = k[..., :last, :], v[..., :last, :]
            mask = mask if mask is None or mask.shape[-1] == 1 else mask[..., :last]
        if self.causal and (first > 0 or mask is not None):
            mask = _causal(mask, q, k, first)
        k, v = (t.expand(*_stacked(q, t), *t.shape[-2:]) for t in (k, v))
        if local.training and self.dropout > 0:
            return self._dropped(local, q, k, v, _causal(None, q, k, 0) if self.causal and mask is None else mask)
        grouped = q.dim() > 3 and k.shape[-3] != q.shape[-3]
        causal = self.causal and mask is None
        return F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=self.scale, enable_gqa=grouped)

    def pieces(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> Pieces | None:
        k, v = inputs[1:3]
        if k.volume * k.item_bytes + v.volume * v.item_bytes < MUCH:
            return None
        rank, keys = len(out.shape), identity(k.shape[-2], len(out.shape))
        maps = {i: (*m[:-2], keys, m[-1]) for i, m in enumerate(self.needs(inputs, out)) if i in (1, 2)}
        wide = max(out.item_bytes, 4)

        def temporary(extents: Extents, piece: int) -> Counts:
            e = extents[..., :rank].astype(np.float64)
            scores = np.minimum(e[..., :-1].prod(-1) * piece, SCORES)
            counted: Counts = (3 * scores + 2 * e.prod(-1) + 6 * e[..., :-1].prod(-1)) * wide
            return counted

        return Pieces(maps, k.shape[-2], lcm(k.units[-2], v.units[-2]), temporary)

    def run_pieces(
        self, local: Local, inputs: Sequence[Tensor], pieces: Iterator[tuple[int, int, Sequence[Tensor]]]
    ) -> Tensor:
        """Adds up a softmax piece by piece (online): numerators, and their sum, both over exp of the largest score.

        No logarithm of the sum is kept: beside a large score, as a mask of -1e9 leaves it, that would be rounded off.
        """
        import torch

        with torch.autocast(inputs[0].device.type, enabled=False):  # which would round the scores
            return self._in_pieces(local, inputs, pieces)

    def _in_pieces(
        self, local: Local, inputs: Sequence[Tensor], pieces: Iterator[tuple[int, int, Sequence[Tensor]]]
    ) -> Tensor:
        import torch

        q = inputs[0]
        mask = inputs[1] if self.mask else None
        wide = torch.promote_types(q.dtype, torch.float32)
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        first, rows = local.cell.lo[-2], q.shape[-2]
        total, sums = q.new_zeros(local.out.shape, dtype=wide), q.new_zeros(q.shape[:-1], dtype=wide)
        largest = torch.full_like(sums, -torch.inf)
        for lo, hi, (k, v) in pieces:
            if self.causal and lo >= first + rows:  # no query here sees these keys
                continue
            k, v = (t.expand(*_stacked(q, t), *t.shape[-2:]).to(wide) for t in (k, v))
            if q.dim() > 3 and k.shape[-3] != q.shape[-3]:
                k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
            step = max(1, SCORES // max(1, q.shape[:-2].numel() * (hi - lo)))
            for at in range(0, rows, step):
                some = slice(at, min(at + step, rows))
                scores = (q[..., some, :].to(wide) @ k.mT).mul_(scale)
                if mask is not None:
                    part = mask[..., some, :] if mask.dim() > 1 and mask.shape[-2] > 1 else mask
                    part = part[..., lo:hi] if mask.shape[-1] > 1 else part
                    scores = scores.masked_fill_(~part, -torch.inf) if part.dtype == torch.bool else scores.add_(part)
                if self.causal:
                    here = torch.arange(first + at, first + some.stop, device=q.device)[:, None]
                    scores.masked_fill_(torch.arange(lo, hi, device=q.device) > here, -torch.inf)
                before = largest[..., some]
                after = torch.maximum(before, scores.amax(-1))
                seen = after.masked_fill(after == -torch.inf, 0.0)  # a query that sees no key yet has zeros
                scores.sub_(seen[..., None]).exp_()
                kept = (before - seen).exp_()
                sums[..., some].mul_(kept).add_(scores.sum(-1))
                total[..., some, :].mul_(kept[..., None]).add_(scores @ v)
                before.copy_(after)
        total.div_(sums.masked_fill_(sums == 0, 1.0)[..., None])
        return total.to(q.dtype)

    def _dropped(self, local: Local, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attention with dropout by position: weights are zeroed by (..., query, key) in the full tensor of scores."""
        import torch

        if q.dim() > 3 and k.shape[-3] != q.shape[-3]:
            k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if self.scale is None else self.scale)
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -torch.inf)
        elif mask is not None:
            scores = scores + mask
        weights = _softmax(scores) if mask is not None else scores.softmax(-1)
        whole = (*local.space.out.shape[:-1], local.specs[1].shape[-2])
        box = Box((*local.cell.lo[: q.dim() - 1], 0), (*local.cell.hi[: q.dim() - 1], k.shape[-2]))
        return drop(weights, self.dropout, local.seed, box, whole) @ v


def _head(extent: int, queries: int, dim: int) -> AxisMap:
    """Heads (or samples) of k and v for those of q: the same, one for all, or one for each group."""
    if extent == 1:
        return whole(1)
    return scaled(queries, extent, dim, over=queries // extent)


def _stacked(q: Tensor, k: Tensor) -> list[int]:
    """The extents of all but the last two dimensions to which k expands: q's where k has one for all."""
    return [a if b == 1 else b for a, b in zip(q.shape[:-2], k.shape[:-2], strict=True)]


def _causal(mask: Tensor | None, q: Tensor, k: Tensor, first: int) -> Tensor:
    """A causal mask for queries that begin at `first`, combined with another mask if there is one."""
    import torch

    seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril(first)
    if mask is None:
        return seen
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)


def _softmax(scores: Tensor) -> Tensor:
    """Softmax over the last dimension; a query that sees no key gets zeros, as in PyTorch's attention."""
    blind = (scores == -float("inf")).all(-1, keepdim=True)
    return scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)


def _check_mask(mask: TensorSpec, scores: tuple[int, ...]) -> None:
    spare = len(scores) - len(mask.shape)
    if spare < 0 or not mask.shape or any(m not in (s, 1) for m, s in zip(mask.shape, scores[spare:], strict=True)):
        raise LayerwiseError(f"a mask {mask.describe()} does not broadcast to the scores {scores}")
