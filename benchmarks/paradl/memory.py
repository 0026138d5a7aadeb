"""Memory of a device in closed form: table 3's."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.paradl.facts import Facts, LayerFacts


def memory_bytes(
    facts: Facts,
    batch: float,
    *,
    inputs: float = 1.0,
    outputs: float = 1.0,
    weights: float = 1.0,
    copies: int = 0,
    layers: Iterable[LayerFacts] | None = None,
) -> float:
    """sum(delta · 2B(|x| inputs + |y| outputs)) + sum(delta · ((2 + copies)|w| weights + |bi|)).

    delta is that of activations, then that of parameters; they differ in mixed precision.

    batch: samples of a group of devices that share them. inputs, outputs, weights: which share of |x|, |y|, |w| a
    device has. copies: of the weights, that the optimizer keeps (Adam: 2); the paper counts none.
    """
    activations, parameters = 0.0, 0.0
    for layer in facts.layers if layers is None else layers:
        activations += 2 * batch * (layer.inputs * inputs + layer.outputs * outputs)
        parameters += (2 + copies) * layer.weights * weights + layer.biases
    return facts.activation_bytes * activations + facts.item_bytes * parameters
