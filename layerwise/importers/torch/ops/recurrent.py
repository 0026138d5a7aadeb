"""Rows of the PyTorch importer's table: LSTM, GRU and plain RNN. https://pytorch.org/docs/stable/nn.html#recurrent-layers"""

from __future__ import annotations

from dataclasses import replace

from layerwise.errors import LayerwiseError
from layerwise.importers.registry import Build, Built, Call, Operand, Result, Table, Tensor
from layerwise.importers.tensors import joined, sliced
from layerwise.ops.nn.recurrent import GATES, Recurrent
from layerwise.ops.tensor.pointwise import Dropout


def recurrent(fn: str) -> Build:
    """A layer for each output; with dropout in between, its layers are layers of their own."""

    def build(call: Call) -> Result:
        if not call.target.endswith(".input"):
            raise LayerwiseError("packed sequences are not supported: pad them, and exclude the padding from the loss")
        x = call.operand("input")
        if len(x.shape) != 3:
            raise LayerwiseError(
                f"its input must be a batch (samples, steps, channels), not one sample of shape {x.shape}"
            )
        weights, states = _operands(call, "params"), _operands(call, "hx")
        if any(w.role != "parameter" or w.transposed for w in weights):
            raise LayerwiseError("its weights are computed in the forward pass, but must be parameters")
        both, layers = call.flag("bidirectional"), call.integer("num_layers")
        dropped = call.number("dropout") if layers > 1 else 0.0
        parts = layers if dropped else 1
        each, deep = len(weights) // parts, layers // parts * (2 if both else 1)
        op = Recurrent(
            fn,  # type: ignore[arg-type]
            weights[0].shape[0] // GATES[fn],
            layers // parts,
            call.flag("has_biases"),
            both,
            call.flag("batch_first"),
            given=any(state.value is None or state.role != "constant" or state.value.any() for state in states),
            projected=_projected(weights, both=both, bias=call.flag("has_biases"), layers=layers),
        )
        made: list[list[Tensor]] = []
        sequence: Tensor = x
        for part in range(parts):
            ends = [sliced(state, state.shape, 0, part * deep, (part + 1) * deep) for state in states]
            inputs = (sequence, *ends) if op.given else (sequence,)
            held = weights[part * each : (part + 1) * each]
            results: list[Tensor] = [
                Built(replace(op, result=number), inputs, held) for number in range(len(states) + 1)
            ]
            made.append(results)
            sequence = results[0] if part == parts - 1 else Built(Dropout(dropped), (results[0],))
        return (sequence, *(joined([part[i + 1] for part in made], 0) for i in range(len(states))))

    return build


def _operands(call: Call, name: str) -> tuple[Operand, ...]:
    value = call[name]
    return tuple(v for v in (value if isinstance(value, tuple) else (value,)) if isinstance(v, Operand))


def _projected(weights: tuple[Operand, ...], *, both: bool, bias: bool, layers: int) -> int:
    """The projected size of an LSTM's states, or 0."""
    per = len(weights) // (layers * (2 if both else 1))
    return weights[per - 1].shape[0] if per > (4 if bias else 2) else 0


RECURRENT: Table = {fn: recurrent(fn) for fn in GATES}
