"""Losses. https://pytorch.org/docs/stable/nn.html#loss-functions"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from layerwise.errors import LayerwiseError
from layerwise.geometry import identity, whole
from layerwise.ops.base import Counts, Extents, Kept, Local, Maps, Op, Statistics, volumes
from layerwise.ops.counted import counted_mean
from layerwise.ops.specs import merge_labels, only, same
from layerwise.tensor import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


# Primitive operations an element of the prediction: softmax 5 + product and sum; log-sigmoid 4; and so on.
WORK = {"cross_entropy": 7, "nll": 1, "mse": 3, "l1": 3, "smooth_l1": 5, "bce": 6, "bce_logits": 7, "kl": 5}
# The names in torch.nn.functional.
FUNCTIONS = {
    "cross_entropy": "cross_entropy", "nll": "nll_loss", "mse": "mse_loss", "l1": "l1_loss", "kl": "kl_div",
    "smooth_l1": "smooth_l1_loss", "bce": "binary_cross_entropy", "bce_logits": "binary_cross_entropy_with_logits",
}  # fmt: skip
TYPES: dict[str, type] = {"ignore_index": int, "log_target": bool}  # of the arguments that are not real numbers
IGNORED = -100  # PyTorch's default of ignore_index


@dataclass(frozen=True, slots=True)
class Loss(Op):
    """Of a prediction and a target: one number a sample; the mean over the batch is taken once, at the sink.

    With a reduction the output is (n,), reduced over all other dimensions; with "none" it is what PyTorch's is.
    `arguments` are the function's own, by name: ("label_smoothing", 0.1), ("beta", 1.0).
    """

    kind: ClassVar[str] = "loss"
    fn: Literal["cross_entropy", "nll", "mse", "l1", "smooth_l1", "bce", "bce_logits", "kl"]
    reduction: Literal["mean", "sum", "none", "batchmean"] = "mean"
    arguments: tuple[tuple[str, float], ...] = ()

    @property
    def classes(self) -> bool:
        """Whether dimension 1 of the prediction is the classes, which the loss needs all."""
        return self.fn in ("cross_entropy", "nll")

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        x, target = inputs
        self._check(x, target)
        if self.reduction != "none":
            return merge_labels(x.shape[:1], (only(x, [0]), only(target, [0])), x.dtype)
        if not self.classes:
            return merge_labels(x.shape, (x, target), x.dtype)
        each = _each_class(x, len(x.shape))
        return merge_labels(each.shape, (each, _each_class(target, len(x.shape))), x.dtype)

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        return tuple(self._maps(spec, out, inputs[0]) for spec in inputs)

    def flops(self, inputs: Sequence[TensorSpec], extents: Extents) -> Counts:
        each = inputs[0].volume / self.output(*inputs).volume  # elements of the prediction for one of the output
        return Op.flops(self, inputs, extents) * (each * WORK[self.fn])

    def kept(self, inputs: Sequence[TensorSpec], lo: Extents, hi: Extents) -> Kept:
        """A cross entropy keeps the logarithms of all probabilities, and has their gradients before its own."""
        each = volumes(self.needs(inputs, self.output(*inputs))[0], lo, hi) * inputs[0].item_bytes
        kept = each if self.fn == "cross_entropy" else 0.0
        return Kept(output=False, extra=kept, forward=each, between=each + kept)

    def statistics(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> Statistics | None:
        """How many targets count, where some may be ignored."""
        return Statistics((0,), (), 1) if self._ignores(inputs[1]) else None

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        """A mean is that of the targets that count, over all samples: each has its part of it, times their number."""
        import torch.nn.functional as F

        x, target = inputs
        arguments = {name: TYPES.get(name, float)(value) for name, value in self.arguments}
        each: Tensor = getattr(F, FUNCTIONS[self.fn])(x, target, reduction="none", **arguments)
        if self.reduction == "none":
            return each
        if self._ignores(local.specs[1]):
            counted = target != arguments.get("ignore_index", IGNORED)
            summed = each if each.dim() == 1 else each.flatten(1).sum(1)
            return counted_mean(summed, counted.sum(), local.space.out.shape[0], local.all_reduce)
        if each.dim() == 1:
            return each
        return each.flatten(1).mean(1) if self.reduction == "mean" else each.flatten(1).sum(1)

    def _ignores(self, target: TensorSpec) -> bool:
        """Whether it is a mean over what a target does not leave out."""
        return self.classes and self.reduction == "mean" and not target.differentiable

    def _maps(self, spec: TensorSpec, out: TensorSpec, x: TensorSpec) -> Maps:
        if self.reduction != "none":
            return (identity(spec.shape[0], 0), *map(whole, spec.shape[1:]))
        if not self.classes or len(spec.shape) < len(x.shape):
            return same(out)
        samples, *rest = same(out)
        return (samples, whole(spec.shape[1]), *rest)

    def _check(self, x: TensorSpec, target: TensorSpec) -> None:
        indices = (x.shape[0], *x.shape[2:]) if self.classes and len(x.shape) > 1 else x.shape
        allowed = {indices} if self.fn == "nll" else {indices, x.shape}
        if not x.shape or target.shape not in allowed or (self.classes and len(x.shape) < 2):
            raise LayerwiseError(f"{self.fn} of a prediction {x.describe()} does not fit a target {target.describe()}")


def _each_class(spec: TensorSpec, rank: int) -> TensorSpec:
    """Without dimension 1, the classes; a target of indices, of lower rank, has none."""
    return only(spec, [i for i in range(rank) if i != 1]) if len(spec.shape) == rank else spec
