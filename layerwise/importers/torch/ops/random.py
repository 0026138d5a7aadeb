"""Rows of the PyTorch importer's table: random numbers. https://pytorch.org/docs/stable/torch.html#random-sampling"""

from __future__ import annotations

from dataclasses import replace

from layerwise.errors import LayerwiseError
from layerwise.importers.registry import Build, Built, Call, Operand, Result, Table
from layerwise.ops.tensor.draw import Distribution, Draw
from layerwise.ops.tensor.pointwise import Binary, Cast
from layerwise.tensor import TensorSpec


def draw(distribution: Distribution, *arguments: str | float) -> Build:
    """A draw. arguments: the distribution's parameters, as numbers or as the names of the call's arguments."""

    def build(call: Call) -> Result:
        _own_generator(call)
        return Built(Draw(distribution, tuple(_number(call, a) for a in arguments), spec_of(call)), ())

    return build


def spec_of(call: Call) -> TensorSpec:
    """The spec of a draw's result: labelled like the tensor it is drawn like, else n if it has a row a sample."""
    out = call.outputs[0]
    like = next((x for x in call.tensors if x.activation and x.shape == out.shape), None)
    if like is not None:
        return replace(like.spec, dtype=out.dtype)
    samples = bool(out.shape) and out.shape[0] == call.batch
    return replace(out, dims=("n", *out.dims[1:])) if samples else out


def bernoulli(call: Call) -> Result:
    """1 with probability `p`, or with the tensor's probability at each position."""
    _own_generator(call)
    p = call.get("p")
    if isinstance(p, (int, float)):
        return Built(Draw("bernoulli", (float(p),), spec_of(call)), ())
    chances = p if isinstance(p, Operand) else call.operand("self")
    numbers = Built(Draw("uniform", (0.0, 1.0), replace(spec_of(call), dtype=chances.spec.dtype)), ())
    return Built(Cast(call.outputs[0].dtype), (Built(Binary("lt"), (numbers, chances)),))


def normal(call: Call) -> Result:
    if any(isinstance(call[name], Operand) for name in ("mean", "std")):
        raise LayerwiseError(
            "normal numbers with a tensor as mean or std are not supported (PyTorch has no gradient for them either): "
            "write mean + std * torch.randn_like(mean)"
        )
    return draw("normal", "mean", "std")(call)


def _number(call: Call, argument: str | float) -> float:
    return call.number(argument) if isinstance(argument, str) else argument


def _own_generator(call: Call) -> None:
    if call.get("generator") is not None:
        raise LayerwiseError("a torch.Generator in the model is not supported: draw without it")


def integers(call: Call) -> Result:
    _own_generator(call)
    low = call.number("low") if "low" in call.arguments else 0.0
    return Built(Draw("integers", (low, call.number("high")), spec_of(call)), ())


RANDOM: Table = (
    dict.fromkeys(("rand", "rand_like"), draw("uniform", 0.0, 1.0))
    | dict.fromkeys(("randn", "randn_like"), draw("normal", 0.0, 1.0))
    | dict.fromkeys(("randint", "randint_like"), integers)
    | {"uniform": draw("uniform", "from", "to"), "normal": normal, "bernoulli": bernoulli}
)
