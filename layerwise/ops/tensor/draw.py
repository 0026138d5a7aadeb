"""Draw: random numbers that a network draws in its forward pass (torch.rand, randn_like, bernoulli, ...)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from layerwise.errors import LayerwiseError
from layerwise.ops.base import Op
from layerwise.ops.facts import Extents, Local, Maps, Saved
from layerwise.ops.random import chance, normal, uniform
from layerwise.ops.specs import at_batch
from layerwise.tensor import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

Distribution = Literal["uniform", "normal", "bernoulli", "integers"]


@dataclass(frozen=True, slots=True)
class Draw(Op):
    """A tensor of random numbers, without inputs; dimension n of `spec` follows the number of samples.

    A number depends on its position in the full tensor and on the step, so every partition draws the same. `arguments`:
    the range [low, high) of "uniform" and "integers", mean and deviation of "normal", the probability of 1 of
    "bernoulli". In evaluation it draws too: the same numbers until the next training step.
    """

    kind: ClassVar[str] = "draw"
    arithmetic: ClassVar[bool] = False
    draws: ClassVar[bool] = True
    draws_always: ClassVar[bool] = True
    distribution: Distribution
    arguments: tuple[float, ...]
    spec: TensorSpec

    @property
    def random(self) -> bool:
        return True

    @property
    def detaches(self) -> bool:
        return True

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        return self.spec

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        return ()

    def saved(self, inputs: Sequence[TensorSpec], lo: Extents, hi: Extents) -> Saved:
        """Memory while it draws: two 64-bit numbers a position; for a normal distribution two uniform numbers more."""
        drawn = (hi - lo).prod(-1).astype(np.float64)
        return Saved(inputs=False, output=False, forward=drawn * (40 if self.distribution == "normal" else 24))

    def at_batch(self, old: int, new: int) -> Op:
        return replace(self, spec=at_batch(self.spec, old, new))

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        import torch

        dtype: torch.dtype = getattr(torch, self.spec.dtype)
        box, shape, device, seed = local.out, local.space.out.shape, local.device, local.seed
        if not isinstance(seed, int):
            raise LayerwiseError("random numbers that the network draws cannot be compiled: leave compile= out")
        if self.distribution == "bernoulli":
            return chance(self.arguments[0], seed, box, shape, device).to(dtype)
        if self.distribution == "normal":
            mean, deviation = self.arguments
            return normal(seed, box, shape, dtype=dtype, device=device).mul_(deviation).add_(mean)
        low, high = self.arguments
        if self.distribution == "uniform":
            return uniform(seed, box, shape, dtype=dtype, device=device).mul_(high - low).add_(low)
        return (
            uniform(seed, box, shape, dtype=torch.float64, device=device).mul_(high - low).floor_().add_(low).to(dtype)
        )
