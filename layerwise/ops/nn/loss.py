"""Losses. https://pytorch.org/docs/stable/nn.html#loss-functions"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from layerwise.errors import LayerwiseError
from layerwise.geometry import AxisMap, identity, scaled, whole
from layerwise.ops.base import Op, volumes
from layerwise.ops.facts import AllReduce, Counts, Extents, Local, Maps, Saved, Statistics
from layerwise.ops.specs import merge_labels, only
from layerwise.ops.tensor.reduce import divided, in_parts
from layerwise.tensor import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


# Primitive operations per element of the prediction: softmax 5 + product and sum; log-sigmoid 4; and so on.
WORK = {"cross_entropy": 7, "nll": 1, "mse": 3, "l1": 3, "smooth_l1": 5, "bce": 6, "bce_logits": 7, "kl": 5}
# The names in torch.nn.functional.
FUNCTIONS = {
    "cross_entropy": "cross_entropy", "nll": "nll_loss", "mse": "mse_loss", "l1": "l1_loss", "kl": "kl_div",
    "smooth_l1": "smooth_l1_loss", "bce": "binary_cross_entropy", "bce_logits": "binary_cross_entropy_with_logits",
}  # fmt: skip
TYPES: dict[str, type] = {"ignore_index": int, "log_target": bool}  # types of the arguments that are not real numbers
IGNORED = -100  # PyTorch's default of ignore_index


@dataclass(frozen=True, slots=True)
class Loss(Op):
    """A loss of a prediction and a target: one number a sample; the mean over the batch is taken once, at the sink.

    With a reduction the output is (n,), reduced over all other dimensions; with "none" it is PyTorch's. `arguments` are
    the function's own, by name: ("label_smoothing", 0.1), ("beta", 1.0). `weighted` names the inputs after the target:
    "weight" (of the classes, (c,), if there are any, else of every element), "pos_weight". `parts`: the number of equal
    parts of every dimension of positions; the output then has a number for each part, (n, *parts), and a LossSum adds
    them up, so the loss can be split along positions.
    """

    kind: ClassVar[str] = "loss"
    added: ClassVar[frozenset[str]] = frozenset({"weighted", "parts"})
    fn: Literal["cross_entropy", "nll", "mse", "l1", "smooth_l1", "bce", "bce_logits", "kl"]
    reduction: Literal["mean", "sum", "none", "batchmean"] = "mean"
    arguments: tuple[tuple[str, float], ...] = ()
    weighted: tuple[str, ...] = ()
    parts: tuple[int, ...] = ()

    @property
    def classes(self) -> bool:
        """True if dimension 1 of the prediction is the classes, which the loss needs in full."""
        return self.fn in ("cross_entropy", "nll")

    @property
    def loss(self) -> Literal["mean", "sum"] | None:
        if self.reduction == "none" or self.parts:
            return None
        return "sum" if self.reduction == "sum" else "mean"

    def each(self, x: TensorSpec, target: TensorSpec) -> TensorSpec:
        """The spec without a reduction: one number a position."""
        self._check(x, target)
        if not self.classes:
            return merge_labels(x.shape, (x, target), x.dtype)
        each = _each_class(x, len(x.shape))
        return merge_labels(each.shape, (each, _each_class(target, len(x.shape))), x.dtype)

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        x, target = inputs[:2]
        each = self.each(x, target)
        if self.reduction == "none":
            return each
        if self.parts:
            return in_parts(each, dict(enumerate(self.parts, start=1)))
        return merge_labels(x.shape[:1], (only(x, [0]), only(target, [0])), x.dtype)

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        x, target, *weights = inputs
        each = self.each(x, target)
        samples, *positions = (self._position(i, extent) for i, extent in enumerate(each.shape))
        full = (samples, *map(whole, x.shape[1:2]), *positions) if self.classes else (samples, *positions)
        of_target = (samples, *positions) if len(target.shape) < len(x.shape) else full
        return (full, of_target, *(self._of_weight(w, x, full) for w in weights))

    def flops(self, inputs: Sequence[TensorSpec], extents: Extents) -> Counts:
        each = inputs[0].volume / self.output(*inputs).volume  # elements of the prediction for each of the output
        return Op.flops(self, inputs, extents) * (each * WORK[self.fn])

    def saved(self, inputs: Sequence[TensorSpec], lo: Extents, hi: Extents) -> Saved:
        """Memory: cross entropy saves the logarithms of all probabilities, and makes their gradients before its own."""
        each = volumes(self.needs(inputs, self.output(*inputs))[0], lo, hi) * inputs[0].item_bytes
        kept = each if self.fn == "cross_entropy" else 0.0
        return Saved(output=False, extra=kept, forward=each, between=each + kept)

    def statistics(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> Statistics | None:
        """What is all-reduced: the number, or weight, of the targets that count, if some may be ignored."""
        return Statistics(tuple(range(len(out.shape))), (), 1, exact=False) if self._counts(inputs[1]) else None

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        """A mean is over the targets that count in all samples: each sample contributes its part times their number."""
        import torch
        import torch.nn.functional as F

        x, target, *given = inputs
        arguments = {name: TYPES.get(name, float)(value) for name, value in self.arguments}
        detached = (w.detach() for w in given)  # torch has no gradient for them
        weights = dict(zip(self.weighted, detached, strict=True))
        each: Tensor = getattr(F, FUNCTIONS[self.fn])(x, target, reduction="none", **arguments, **weights)
        if self.reduction == "none":
            return each
        spec = self.each(*local.specs[:2])
        inner = tuple(range(1, each.dim()))
        if self.parts:
            each, inner = divided(each, spec.shape, dict(enumerate(self.parts, start=1)))
        if self._counts(local.specs[1]):
            ignored = int(arguments.get("ignore_index", IGNORED))
            counted = _counted(target, ignored, weights.get("weight"))
            wide = torch.promote_types(each.dtype, torch.float32)
            summed = each.sum(inner, dtype=wide) if inner else each.to(wide)
            return counted_mean(summed, counted, spec.shape[0], local.all_reduce).to(each.dtype)
        if not inner:
            return each
        if self.reduction != "mean":
            return each.sum(inner)
        return each.sum(inner) / prod(spec.shape[1:]) if self.parts else each.mean(inner)

    def _counts(self, target: TensorSpec) -> bool:
        """True if it averages over targets that are not ignored, or by weights."""
        return self.classes and self.reduction == "mean" and not target.differentiable

    def _position(self, i: int, extent: int) -> AxisMap:
        """The map of dimension i of the loss without a reduction."""
        if i == 0 or self.reduction == "none":
            return identity(extent, i)
        if self.parts:
            return scaled(self.parts[i - 1], extent, i, scale=extent // self.parts[i - 1])
        return whole(extent)

    def _of_weight(self, weight: TensorSpec, x: TensorSpec, full: Maps) -> Maps:
        if self.classes:
            return tuple(map(whole, weight.shape))
        skip = len(x.shape) - len(weight.shape)
        pairs = enumerate(weight.shape, start=skip)
        return tuple(full[i] if extent == x.shape[i] else whole(extent) for i, extent in pairs)

    def _check(self, x: TensorSpec, target: TensorSpec) -> None:
        indices = (x.shape[0], *x.shape[2:]) if self.classes and len(x.shape) > 1 else x.shape
        allowed = {indices} if self.fn == "nll" else {indices, x.shape}
        if not x.shape or target.shape not in allowed or (self.classes and len(x.shape) < 2):
            raise LayerwiseError(f"{self.fn} of a prediction {x.describe()} does not fit a target {target.describe()}")


@dataclass(frozen=True, slots=True)
class LossSum(Op):
    """The loss of each sample, (n,), from those of its parts, (n, ...)."""

    kind: ClassVar[str] = "loss_sum"
    saves: ClassVar[Saved] = Saved(inputs=False, output=False)
    reduction: Literal["mean", "sum"] = "mean"

    @property
    def loss(self) -> Literal["mean", "sum"]:
        return self.reduction

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        return only(inputs[0], [0])

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        samples, *rest = inputs[0].shape
        return ((identity(samples, 0), *map(whole, rest)),)

    def flops(self, inputs: Sequence[TensorSpec], extents: Extents) -> Counts:
        return Op.flops(self, inputs, extents) * prod(inputs[0].shape[1:])

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        return inputs[0].flatten(1).sum(1)


def _counted(target: Tensor, ignored: int, weight: Tensor | None) -> Tensor:
    """The number of targets that count, or the sum of their classes' weights."""
    import torch

    counted = target != ignored
    if weight is None:
        return counted.sum()
    return (weight[target.where(counted, 0)] * counted).sum(dtype=torch.promote_types(weight.dtype, torch.float32))


def _each_class(spec: TensorSpec, rank: int) -> TensorSpec:
    """The tensor without dimension 1, the classes; a target of indices, of lower rank, has none."""
    return only(spec, [i for i in range(rank) if i != 1]) if len(spec.shape) == rank else spec


def counted_mean(summed: Tensor, counted: Tensor, samples: int, all_reduce: AllReduce | None) -> Tensor:
    """(n,): each sample's `summed` losses times samples / total; the mean of these is the mean over what counts.

    summed: at least float32, as 16 bits cannot count an image's positions. counted: the count on this device;
    all_reduce adds those of the devices with other samples. The mean of nothing is nan, as in PyTorch.
    """
    count = counted.to(summed.dtype).reshape(1)
    if all_reduce is None:
        return summed / (count / samples)
    result: Tensor = _function().apply(summed, count, samples, all_reduce)
    return result


@cache
def _function() -> Any:
    """The autograd function, created here because this module must be importable without torch."""
    import torch
    from torch.autograd.function import once_differentiable

    class CountedMean(torch.autograd.Function):
        """Its backward pass sums the count again, as plans count statistics once in each direction."""

        @staticmethod
        def forward(ctx: Any, summed: Tensor, count: Tensor, samples: int, all_reduce: AllReduce) -> Tensor:
            ctx.save_for_backward(count)
            ctx.samples, ctx.all_reduce = samples, all_reduce
            return summed / (all_reduce(count.clone()) / samples)

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
            (count,) = ctx.saved_tensors
            return gradient / (ctx.all_reduce(count.clone()) / ctx.samples), None, None, None

    return CountedMean
