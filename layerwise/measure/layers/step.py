"""What a step does beside its layers: the loss of the outputs, and the update of the parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from layerwise.measure.bench import LossSpec, Mode, UpdateSpec


def optimizer_of(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """As `layerwise.run` makes it."""
    if name == "adam":
        return torch.optim.Adam(parameters, 1e-3)
    return torch.optim.SGD(parameters, 1e-3, 0.9 if name == "momentum" else 0.0)


class UpdateBench:
    """An optimizer's step. `forward` does it; there is no way back."""

    def __init__(self, spec: UpdateSpec, mode: Mode) -> None:
        self.parameters = [nn.Parameter(mode.filled((size,))) for size in spec.sizes]
        self.values = [mode.filled((size,)) for size in spec.sizes]
        self.optimizer = optimizer_of(spec.optimizer, self.parameters)

    @property
    def recent(self) -> tuple[Sequence[Tensor], None]:
        """Gradients were made long ago, but for the last."""
        return (), None

    def forward(self) -> None:
        """The step, without what any step costs however few parameters it has (`overhead`)."""
        for p, g in zip(self.parameters, self.values, strict=True):
            p.grad = g
        self.optimizer.step()

    def backward(self) -> None:
        """Nothing."""

    def forget(self) -> None:
        """Nothing."""


class LossBench:
    """The loss as `layerwise.run` takes it: cross-entropy over dimension 1 in float32, means added up."""

    def __init__(self, spec: LossSpec, mode: Mode) -> None:
        dtypes = spec.dtypes or ("float32",) * len(spec.shapes)
        self.outputs = [
            mode.filled(shape, dtype).requires_grad_() for shape, dtype in zip(spec.shapes, dtypes, strict=True)
        ]
        self.targets = [
            torch.randint(shape[1], (shape[0], *shape[2:]), device=mode.device) if len(shape) > 1 else None
            for shape in spec.shapes
        ]
        self.total: Tensor | None = None

    @property
    def recent(self) -> tuple[Sequence[Tensor], None]:
        """The outputs; and backward follows at once."""
        return self.outputs, None

    def forward(self) -> None:
        """Outputs leave the runtime as copies."""
        made = [out.clone() for out in self.outputs]
        losses = [
            x.mean() if target is None else nn.functional.cross_entropy(x.float() if x.itemsize < 4 else x, target)
            for x, target in zip(made, self.targets, strict=True)
        ]
        self.total = torch.stack(losses).sum()

    def backward(self) -> None:
        """Their gradients are scaled to the mean over the global batch."""
        assert self.total is not None
        for gradient in torch.autograd.grad(self.total, self.outputs):
            gradient.mul_(0.5)

    def forget(self) -> None:
        """Before the next step."""
        self.total = None
