"""Pass: what a forward pass over a schedule, and the backward passes through it, have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from layerwise.run.execute.autograd import ordered
from layerwise.run.execute.gathers import LayerGathers


@dataclass(slots=True)
class Pass:
    """A forward pass. Functions of autograd's graph refer to it, so it must not refer to the graph once it is over."""

    parameters: Mapping[str, Any]  # this rank's boxes by name, buffers among them
    training: bool
    seed: int  # of this step's random numbers
    number: int  # the step's, for error messages
    token: Tensor  # the order token; it requires a gradient where there may be a backward pass
    # Layers whose parameters are full while they compute only, by name, in their order.
    gathers: Mapping[str, LayerGathers] = field(default_factory=dict)

    @property
    def differentiate(self) -> bool:
        """Whether a backward pass may follow."""
        return self.token.requires_grad

    def order(
        self,
        tensors: list[Tensor | None],
        places: Iterable[int],
        at_backward: Callable[..., Sequence[Tensor] | None] | None = None,
    ) -> None:
        """Back, the token waits for the gradients of those of `tensors`, which are replaced in the list."""
        chosen = {i: x for i in places if (x := tensors[i]) is not None and x.requires_grad}
        self.token, *marked = ordered(self.token, *chosen.values(), at_backward=at_backward)
        for i, x in zip(chosen, marked, strict=True):
            tensors[i] = x
