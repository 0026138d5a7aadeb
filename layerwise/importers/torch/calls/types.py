"""The element type that PyTorch gives a call's result, and whether that result is a loss.

A loss inside a model is a number a sample here; the mean (or sum) over all samples is taken last. So a model may only
do to its loss what commutes with that: scale it, and add losses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from layerwise.errors import LayerwiseError
from layerwise.graph.builder import GraphBuilder
from layerwise.graph.mixed import made_by
from layerwise.graph.types import autocast_within
from layerwise.importers.placer import Placer
from layerwise.importers.registry import Argument, Build, Built, Call, Operand, Result
from layerwise.importers.torch.calls.functional import overwritten
from layerwise.importers.torch.ops.table import PROMOTING, base_name
from layerwise.importers.torch.ops.views import UNCHANGED
from layerwise.importers.torch.traced_program import Node, Ref
from layerwise.ops.tensor.pointwise import Cast, promoted
from layerwise.tensor import TensorSpec


def typed(node: Node, build: Build, call: Call, placer: Placer) -> Result:
    """What a row returns for a call; if types differ, its operands are cast first.

    Raises LayerwiseError if the result's type still differs from PyTorch's.
    """
    result = build(_asked(node, call, placer))
    if (wrong := _wrong(call, result, placer.builder)) is None:
        return result
    wanted, asked = wrong[0].dtype, call.get("dtype") is not None
    if overwritten(node) and isinstance(result, Operand | Built):  # computed in the common type, stored in its own
        return Built(Cast(wanted), (result,))
    if base_name(node.target) in PROMOTING:

        def cast(key: str, value: Argument) -> Argument:
            if isinstance(value, tuple):
                return tuple(cast(key, v) for v in value)
            if key in ("mask", "condition") or not isinstance(value, Operand) or value.spec.dtype == wanted:
                return value
            # Cast only to a wider type, unless a type is asked for; a number has no type.
            if not asked and value.shape and promoted(value.spec.dtype, wanted) != wanted:
                return value
            return placer.place(Built(Cast(wanted), (value,)), f"{call.layer}.cast")

        result = build(replace(call, arguments={key: cast(key, value) for key, value in call.arguments.items()}))
        if _wrong(call, result, placer.builder) is None:
            return result
    if "float" in wanted and not wrong[1].differentiable:
        raise LayerwiseError(
            f"gets {wrong[1].dtype}, but its weights need floating-point numbers: pass example_inputs of the type that "
            "you call the model with"
        )
    raise LayerwiseError(
        f"it returns {wanted} in PyTorch, but {wrong[1].dtype} in layerwise: pass example_inputs of the type that you "
        f"call the model with, or convert its input with .to(torch.{wanted})"
    )


def _asked(node: Node, call: Call, placer: Placer) -> Call:
    """A call that computes in the type that it asks for, on operands cast to it: under autocast they may differ."""
    if call.get("dtype") is None or base_name(node.target) not in PROMOTING:
        return call

    def cast(value: Argument) -> Argument:
        if not isinstance(value, Operand) or not value.activation or value.spec.dtype != call.outputs[0].dtype:
            return value
        return (
            placer.place(Built(Cast(value.spec.dtype), (value,)), f"{call.layer}.cast")
            if value.spec.differentiable
            else value
        )

    return replace(call, arguments={key: cast(value) for key, value in call.arguments.items()})


def _wrong(call: Call, result: Result, builder: GraphBuilder) -> tuple[TensorSpec, TensorSpec] | None:
    """The first output whose element type differs from PyTorch's: (PyTorch's spec, ours)."""
    results = result if isinstance(result, tuple) else (result,)
    pairs = (
        (out, _made(r, builder))
        for out, r in zip(call.outputs, results, strict=False)
        if isinstance(r, Operand | Built)
    )
    return next(((out, made) for out, made in pairs if out.dtype != made.dtype), None)


def _made(result: Operand | Built, builder: GraphBuilder) -> TensorSpec:
    """A result's spec, within the autocast regions around it."""
    if isinstance(result, Operand):
        return result.spec
    specs = tuple(_made(i, builder) for i in result.inputs)
    out, here = result.op.output(*specs), autocast_within(builder.autocast, builder.traced, None)
    if here is None:
        return out
    weights = next((p.spec.dtype for p in result.parameters), out.dtype)
    return replace(out, dtype=made_by(result.op, specs, weights, here, builder.traced))


SCALING = (*UNCHANGED, "detach", "neg")


def follows(node: Node, losses: Mapping[str, str], elements: Callable[[Ref], int]) -> str | None:
    """The reduction of a call's result from losses (a mapping to their reductions); None if it is not a loss.

    elements: counts a tensor's elements. A loss combined with several elements gives several numbers, which are no
    loss.
    """
    first, *rest = node.arguments.values()
    if any(isinstance(v, Ref) and v.name not in losses and elements(v) != 1 for v in (first, *rest[:1])):
        return None
    taken = [losses.get(v.name, "") if isinstance(v, Ref) else "" for v in (first, *rest[:1])]
    reductions = {reduction for reduction in taken if reduction}
    if len(reductions) != 1:
        return None
    (reduction,) = reductions
    both, name = all(taken), base_name(node.target)
    if name in SCALING:
        allowed = True
    elif name in ("add", "sub", "rsub"):
        allowed = both or reduction == "mean"  # one more number for every sample changes a sum
    elif name == "mul":
        allowed = not both
    else:
        allowed = name == "div" and not both and bool(taken[0]) and node.arguments.get("rounding_mode") is None
    return reduction if allowed else None
