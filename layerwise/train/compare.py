"""--compare-single: takes the same steps on one device, and measures how far the plan's numbers are from these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from layerwise.run.options import RuntimeOptions
from layerwise.run.parallel import ParallelModule, of

ARITHMETIC = {  # --dtype: the parameters' type, and autocast's
    "float64": (torch.float64, None),
    "float32": (torch.float32, None),
    "bf16": (torch.float32, torch.bfloat16),
}
ALLOWED = {"float64": 1e-9, "float32": 1e-3, "bf16": 1e-1}
"""The largest relative difference that may be rounding.

A plan adds the same numbers in another order, so a sum of m numbers differs by about sqrt(m)·ε, and every further layer
and step multiplies that. With m = 1e5 and growth by 100: float64 (ε 1e-16) 4e-12, for which 1e-9 leaves room for tens
of steps; float32 (6e-8) at worst 2e-3, seldom above 1e-4. bf16 rounds the operands of every product to 8 bits (4e-3),
and sums that differ in the last bit may round apart: it gets 25 times that. float64 is proof, the others are checks.
"""
SMALL = 1e-3
"""A difference is relative to the tensor's own largest magnitude, or to this fraction of the largest among all tensors
of its kind, whichever is more. The gradient of a bias before a batch norm is zero except for rounding, and noise
relative to noise says nothing.
"""


def arithmetic(options: RuntimeOptions) -> str:
    """Returns the --dtype that these options belong to."""
    return next(name for name, types in ARITHMETIC.items() if types == (options.dtype, options.autocast))


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest relative differences, max |a - b| / max |a| over a tensor, and their places."""

    loss: float
    gradients: float
    parameters: float
    buffers: float
    worst: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, float]:
        """Returns the differences by name."""
        return {name: value for name, value in asdict(self).items() if name != "worst"}

    def beyond(self, allowed: float) -> list[str]:
        """Returns the names of what differs by more than `allowed`, or is not a number."""
        return [name for name, value in self.as_dict().items() if not value <= allowed]


@dataclass(frozen=True, slots=True)
class FinalState:
    """The end of a training: every loss, and the full tensors by their names in the model's state dict."""

    losses: Sequence[float]
    gradients: Mapping[str, Tensor]
    state: Mapping[str, Tensor]


def final_state(module: ParallelModule, losses: Sequence[float]) -> FinalState:
    """Gathers what this module holds after its last step. Every rank of the module must call it."""
    return FinalState(losses, full_gradients(module), of(module).full_state_dict())


def full_gradients(module: ParallelModule) -> dict[str, Tensor]:
    """Returns every parameter's full gradient, on the CPU, gathered in the parameters' place by `full_state_dict`.

    Buffers are included, unchanged.
    """
    values = [(p, p.detach().clone()) for p in module.parameters()]
    try:
        with torch.no_grad():
            for p, value in values:
                p.copy_(torch.zeros_like(value) if p.grad is None else p.grad)
        return of(module).full_state_dict()
    finally:
        with torch.no_grad():
            for p, value in values:
                p.copy_(value)


def difference(single: FinalState, planned: FinalState, trained: set[str]) -> Difference:
    """Returns how `planned` differs from `single`. trained: names of parameters; the others are buffers."""
    pairs: dict[str, list[tuple[str, Tensor, Tensor]]] = {
        "loss": [("loss", _column(single.losses), _column(planned.losses))],
        "gradients": [(n, g, planned.gradients[n]) for n, g in single.gradients.items() if n in trained],
        "parameters": [(n, p, planned.state[n]) for n, p in single.state.items() if n in trained],
        "buffers": [(n, b, planned.state[n]) for n, b in single.state.items() if n not in trained],
    }
    ratios, worst = {}, {}
    for what, tensors in pairs.items():
        ratios[what], worst[what] = largest(tensors)
    return Difference(**ratios, worst=worst)


def _column(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def largest(tensors: Sequence[tuple[str, Tensor, Tensor]]) -> tuple[float, str]:
    """Returns the largest relative difference of (name, a, b), and the name; nan counts as the largest."""
    wide = [(name, a.double(), b.double()) for name, a, b in tensors if a.numel()]
    floor = SMALL * max((float(a.abs().max()) for _, a, _ in wide), default=0.0)
    worst, where = 0.0, ""
    for name, a, b in wide:
        apart, scale = float((a - b).abs().max()), max(float(a.abs().max()), floor)
        ratio = apart / scale if scale > 0 else (0.0 if apart == 0 else float("inf"))
        if not ratio <= worst:
            worst, where = ratio, name
        if ratio != ratio:
            break
    return worst, where
