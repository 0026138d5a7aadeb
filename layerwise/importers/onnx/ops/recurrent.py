"""Rows of the ONNX importer's table: LSTM, GRU and plain RNN. https://onnx.ai/onnx/operators/onnx__LSTM.html"""

from __future__ import annotations

from layerwise.errors import LayerwiseError
from layerwise.importers.onnx.call import integers, optional, text, weights
from layerwise.importers.registry import Build, Built, Call, Operand, Result, Table, Tensor
from layerwise.importers.tensors import flipped, permuted, reshaped
from layerwise.ops.nn.recurrent import RecurrentInOne, ResetFirst

USUAL: dict[str, tuple[str, ...]] = {"lstm": ("sigmoid", "tanh", "tanh"), "gru": ("sigmoid", "tanh"), "rnn": ("tanh",)}
PLAIN: dict[tuple[str, ...], str] = {("tanh",): "rnn_tanh", ("relu",): "rnn_relu"}
UNSUPPORTED = {"clip": "clipped states", "input_forget": "coupled gates", "P": "peepholes"}


def recurrent(fn: str) -> Build:
    """A layer an output. layout 0: (s, n, c) -> (s, directions, n, h), states (directions, n, h); 1: n comes first."""

    def build(call: Call) -> Result:
        x = call.operand("X")
        if len(x.shape) != 3:
            raise LayerwiseError(f"its input must be (steps, samples, channels), not {x.spec.describe()}")
        samples_first = bool(call.get("layout", 0))
        steps = 1 if samples_first else 0
        kind, direction, both = _checked(call, fn, x.shape[steps])
        stored = (weights(call, "W"), weights(call, "R"), *optional(call, "B"))
        hidden = stored[1].shape[-1]
        ends = [permuted(state, (1, 0, 2)) if samples_first else state for state in _states(call)]
        back = direction == "reverse"
        sequence: Tensor = flipped(x, steps, x.shape[steps]) if back else x
        kernel = ResetFirst if fn == "gru" and not call.get("linear_before_reset", 0) else RecurrentInOne
        how = {"bias": len(stored) == 3, "both": both, "batch_first": samples_first, "given": bool(ends)}
        layers = [kernel(kind, hidden, result=i, **how) for i in range(3 if fn == "lstm" else 2)]  # type: ignore[arg-type]
        made = [Built(layer, (sequence, *ends), stored) for layer in layers]
        count = 2 if both else 1
        whole: Tensor = flipped(made[0], steps, x.shape[steps]) if back else made[0]
        whole = reshaped(whole, (*x.shape[:2], count, hidden))
        if not samples_first:
            whole = permuted(whole, (0, 2, 1, 3))
        return (whole, *(permuted(end, (1, 0, 2)) if samples_first else end for end in made[1:]))

    return build


def _checked(call: Call, fn: str, steps: int) -> tuple[str, str, bool]:
    """The function's name in `Recurrent`, the direction, and whether it runs in both. Raises LayerwiseError."""
    for name, what in UNSUPPORTED.items():
        value = call.get(name)
        zeros = isinstance(value, Operand) and value.value is not None and not value.value.any()
        if not zeros and value not in (None, 0):
            raise LayerwiseError(f"{what} ({name}) are not supported")
    lengths = integers(call, "sequence_lens")
    if lengths is not None and set(lengths) != {steps}:
        raise LayerwiseError(
            "sequences of several lengths are not supported: pad them to one length, and exclude the padding from the "
            "loss"
        )
    direction = text(call, "direction", "forward")
    both = direction == "bidirectional"
    given = call.get("activations")
    named = tuple(str(each).lower() for each in given) if isinstance(given, tuple) else ()
    each = len(USUAL[fn])
    half = named[:each] or USUAL[fn]
    kind = PLAIN.get(half) if fn == "rnn" else fn if half == USUAL[fn] else None
    if kind is None or (both and named and named[each : 2 * each] != half):
        raise LayerwiseError(f"the functions {named} are not supported: use those of PyTorch's layers")
    if call.get("activation_alpha") or call.get("activation_beta"):
        raise LayerwiseError("functions with parameters (activation_alpha, activation_beta) are not supported")
    return kind, direction, both


def _states(call: Call) -> list[Operand]:
    """The initial states; none if they are zeros, which is the default."""
    given = [call.operand(name) for name in ("initial_h", "initial_c") if call.get(name) is not None]
    if all(state.value is not None and not state.value.any() for state in given):
        return []
    if "initial_c" in call.arguments and len(given) == 1:
        raise LayerwiseError("only one of two initial states is given: give both")
    return given


RECURRENT: Table = {"LSTM": recurrent("lstm"), "GRU": recurrent("gru"), "RNN": recurrent("rnn")}
