"""Recurrent layers: LSTM, GRU and plain RNN, of several layers, in one or both directions.

https://pytorch.org/docs/stable/generated/torch.nn.LSTM.html. Samples can be split; steps of the sequence cannot, as
each needs the one before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from layerwise.errors import LayerwiseError
from layerwise.geometry import identity, whole
from layerwise.ops.base import Op
from layerwise.ops.facts import Counts, Extents, Gemm, Local, Maps, Parameter, Saved
from layerwise.tensor import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


@dataclass(frozen=True, slots=True)
class Recurrent(Op):
    """(n, s, c) -> (n, s, directions * width), or (s, n, c) if not `batch_first`; without dropout.

    Inputs: the sequence; if `given`, its initial state (layers * directions, n, width), and an LSTM's cell state.
    result: 0 the sequence, 1 the last state, (layers * directions, n, width), 2 an LSTM's last cell state.
    projected: the width of an LSTM's projected states, or 0.
    """

    kind: ClassVar[str] = "recurrent"
    weights: ClassVar[bool] = True
    fn: Literal["lstm", "gru", "rnn_tanh", "rnn_relu"]
    hidden: int
    layers: int = 1
    bias: bool = True
    both: bool = False  # directions
    batch_first: bool = True
    given: bool = False
    result: int = 0
    projected: int = 0

    @property
    def width(self) -> int:
        """The number of elements of a state, in one direction."""
        return self.projected or self.hidden

    @property
    def directions(self) -> int:
        """1 or 2."""
        return 2 if self.both else 1

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        x, *states = inputs
        if len(x.shape) != 3:
            raise LayerwiseError(f"a recurrent layer's input must be (samples, steps, channels), not {x.describe()}")
        n = 0 if self.batch_first else 1
        if x.dims[1 - n] == "n" and x.shape[n] > 1:  # in one sequence, samples may be the steps
            raise LayerwiseError(
                f"its steps lie along dimension {1 - n}, the model's samples, so one sample would be a step of the "
                "next: build it with batch_first=True, or transpose within the model"
            )
        depth = self.layers * self.directions
        wide = [(depth, x.shape[n], self.width), (depth, x.shape[n], self.hidden)]
        for state, shape in zip(states, wide, strict=False):
            if state.shape != shape:
                raise LayerwiseError(f"an initial state has shape {state.shape}, but should have {shape}")
        steps = None if "s" in x.dims else "s"  # they may have the label of the channels that they were made of
        labels = [steps if label == "c" else label for label in x.dims[:2]]
        if self.result:
            shape = wide[self.result - 1]
            return TensorSpec(shape, (None, labels[n], "c"), x.dtype, (1, x.units[n], 1))
        shape = (*x.shape[:2], self.directions * self.width)
        return TensorSpec(shape, (*labels, "c"), x.dtype, (*x.units[:2], 1))

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        x, *states = inputs
        n, to = 0 if self.batch_first else 1, self._samples
        maps = tuple(identity(extent, to) if i == n else whole(extent) for i, extent in enumerate(x.shape))
        rest = ((whole(s.shape[0]), identity(s.shape[1], to), whole(s.shape[2])) for s in states)
        return (maps, *rest)

    @property
    def _samples(self) -> int:
        """The output's sample dimension."""
        return 0 if self.batch_first and not self.result else 1

    def unsplit(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> frozenset[int]:
        return frozenset(range(3)) - {self._samples}

    def shapes(self, channels: int) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the parameters, in PyTorch's order."""
        gates, rows = GATES[self.fn] * self.hidden, list[tuple[str, tuple[int, ...]]]()
        for layer in range(self.layers):
            for suffix in ("", "_reverse")[: self.directions]:
                end, read = f"l{layer}{suffix}", channels if layer == 0 else self.directions * self.width
                rows += [(f"weight_ih_{end}", (gates, read)), (f"weight_hh_{end}", (gates, self.width))]
                rows += [(f"bias_{name}_{end}", (gates,)) for name in ("ih", "hh") if self.bias]
                rows += [(f"weight_hr_{end}", (self.projected, self.hidden))] if self.projected else []
        return rows

    def held(self, parameters: Mapping[str, Tensor], channels: int) -> list[Tensor]:
        """The parameters in the form of PyTorch's kernels."""
        return [parameters[name] for name, _ in self.shapes(channels)]

    def parameters(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Parameter, ...]:
        scale = self.hidden**-0.5
        return tuple(
            Parameter(name, shape, tuple(map(whole, shape)), initial="uniform", scale=scale)
            for name, shape in self.shapes(inputs[0].shape[2])
        )

    def gemms(self, inputs: Sequence[TensorSpec], extents: Extents) -> tuple[Gemm, ...]:
        """A product for each input, and one a step with the previous state."""
        x = inputs[0]
        steps = x.shape[1 if self.batch_first else 0]
        n = extents[..., self._samples].astype(np.float64)
        one = np.ones_like(n)
        made: list[Gemm] = []
        for name, shape in self.shapes(x.shape[2]):
            if len(shape) < 2:
                continue
            rows, count = (n * steps, one) if "_ih_" in name else (n, one * steps)
            made.append(Gemm(rows, one * shape[0], one * shape[1], count))
        return tuple(made)

    def flops(self, inputs: Sequence[TensorSpec], extents: Extents) -> Counts:
        total: Counts = np.sum([gemm.flops for gemm in self.gemms(inputs, extents)], axis=0)
        return total

    def saved(self, inputs: Sequence[TensorSpec], lo: Extents, hi: Extents) -> Saved:
        """An upper bound: every step's gates before and after their functions, states, and what layers pass on.

        For an LSTM, oneDNN's workspace was seen to be up to 21 numbers a hidden unit, which includes these sixteen.
        """
        x = inputs[0]
        n = (hi - lo)[..., self._samples].astype(np.float64)
        steps = x.shape[1 if self.batch_first else 0]
        depth = self.layers * self.directions
        numbers = 24 * -(-self.hidden // 16) * 16 if self.fn == "lstm" else (2 * GATES[self.fn] + 4) * self.hidden
        each = (numbers + 2 * self.width) * depth
        step = n * steps * each * x.item_bytes
        weights = sum(prod(shape) for _, shape in self.shapes(x.shape[2])) * x.item_bytes
        return Saved(extra=step, forward=step + weights, between=step + 2 * weights)

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        import torch
        from torch import _VF

        x, *states = inputs
        if not states:
            depth, n = self.layers * self.directions, x.shape[0 if self.batch_first else 1]
            widths = (self.width, self.hidden)[: 2 if self.fn == "lstm" else 1]
            states = [x.new_zeros(depth, n, width) for width in widths]
        held = self.held(parameters, local.specs[0].shape[2])
        rest = (held, self.bias, self.layers, 0.0, local.training, self.both, self.batch_first)
        if self.fn == "lstm":
            made = _VF.lstm(x, states, *rest)
        else:
            made = getattr(_VF, self.fn)(x, states[0], *rest)
        result: Tensor = made[self.result]
        assert isinstance(result, torch.Tensor)
        return result


# ONNX's gates in PyTorch's order: https://onnx.ai/onnx/operators/onnx__LSTM.html has i, o, f, c, a GRU z, r, h.
IN_PYTORCH = {"lstm": (0, 2, 3, 1), "gru": (1, 0, 2), "rnn_tanh": (0,), "rnn_relu": (0,)}


@dataclass(frozen=True, slots=True)
class RecurrentInOne(Recurrent):
    """One layer with its weights as ONNX stores them: both directions in one tensor, gates in ONNX's order."""

    kind: ClassVar[str] = "recurrent_in_one"

    def shapes(self, channels: int) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of W, R and B."""
        count, gates = self.directions, GATES[self.fn] * self.hidden
        rows: list[tuple[str, tuple[int, ...]]] = [("weight_ih_l0", (count, gates, channels))]
        rows += [("weight_hh_l0", (count, gates, self.hidden))]
        return [*rows, ("bias_l0", (count, 2 * gates))] if self.bias else rows

    def gemms(self, inputs: Sequence[TensorSpec], extents: Extents) -> tuple[Gemm, ...]:
        """The matrix products of a layer with separate weights."""
        return self._apart.gemms(inputs, extents)

    def held(self, parameters: Mapping[str, Tensor], channels: int) -> list[Tensor]:
        """The parameters in the form of PyTorch's kernels."""
        import torch

        made: list[Tensor] = []
        order = IN_PYTORCH[self.fn]
        for direction in range(self.directions):
            tensors = [parameters["weight_ih_l0"][direction], parameters["weight_hh_l0"][direction]]
            tensors += parameters["bias_l0"][direction].chunk(2) if self.bias else ()
            made += [torch.cat([t.chunk(len(order))[i] for i in order]) for t in tensors]
        return made

    def saved(self, inputs: Sequence[TensorSpec], lo: Extents, hi: Extents) -> Saved:
        """Saved memory, including a copy of the weights in PyTorch's order."""
        said = self._apart.saved(inputs, lo, hi)
        copies = sum(prod(shape) for _, shape in self.shapes(inputs[0].shape[2])) * inputs[0].item_bytes
        return replace(
            said, extra=said.extra + copies, forward=said.forward + copies, between=said.between + 2 * copies
        )

    @property
    def _apart(self) -> Recurrent:
        return Recurrent(
            self.fn, self.hidden, self.layers, self.bias, self.both, self.batch_first, self.given, self.result
        )


@dataclass(frozen=True, slots=True)
class ResetFirst(RecurrentInOne):
    """A GRU that resets the state before its product with R, as in Cho et al. (2014).

    h~ = tanh(W_h x + (r * h) R_h + b), where cuDNN, and so PyTorch, computes r * (h R_h + b). ONNX:
    linear_before_reset=0. No kernel of PyTorch's does this, so it runs step by step.
    """

    kind: ClassVar[str] = "gru_reset_first"

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        import torch

        x = inputs[0].transpose(0, 1) if self.batch_first else inputs[0]
        sequences, ends = list[torch.Tensor](), list[torch.Tensor]()
        for direction in range(self.directions):
            start = inputs[1][direction] if self.given else x.new_zeros(x.shape[1], self.hidden)
            states = self._states(x.flip(0) if direction else x, start, direction, parameters)
            ends.append(states[-1])
            sequences.append(torch.stack(states[::-1] if direction else states))
        if self.result:
            return torch.stack(ends)
        whole = torch.cat(sequences, 2)
        return whole.transpose(0, 1) if self.batch_first else whole

    def _states(self, x: Tensor, state: Tensor, direction: int, parameters: Mapping[str, Tensor]) -> list[Tensor]:
        """The states after each step of x (steps, n, channels). Gates: update, reset, hidden."""
        import torch
        import torch.nn.functional as F

        bias = sum(parameters["bias_l0"][direction].chunk(2)) if self.bias else None
        gates, hidden = parameters["weight_hh_l0"][direction].tensor_split((2 * self.hidden,))
        made: list[torch.Tensor] = []
        for step in F.linear(x, parameters["weight_ih_l0"][direction], bias):  # type: ignore[arg-type]
            read, new = step.tensor_split((2 * self.hidden,), 1)
            update, reset = (read + F.linear(state, gates)).sigmoid().chunk(2, 1)
            new = (new + F.linear(reset * state, hidden)).tanh()
            state = torch.lerp(new, state, update)
            made.append(state)
        return made
