"""Pass: what a forward pass over a schedule has with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from layerwise.ops.base import Role
from layerwise.run.execute.autograd import ordered
from layerwise.run.execute.gathers import LayerGathers
from layerwise.run.execute.weights import LateWeights

if TYPE_CHECKING:
    from layerwise.run.execute.recompute import Block
    from layerwise.run.execute.within import KeptOutput
    from layerwise.run.schedule.layers import ScheduledLayer


@dataclass(slots=True)
class Pass:
    """A forward pass."""

    parameters: Mapping[str, Any]  # this rank's boxes by name, buffers among them
    training: bool
    seed: int  # of this step's random numbers
    number: int  # the step's, for error messages
    token: Tensor  # the order token; it requires a gradient where there may be a backward pass
    # Layers whose parameters are whole while they compute only, by name, in their order.
    gathers: Mapping[str, LayerGathers] = field(default_factory=dict)
    late: dict[str, tuple[LateWeights, Tensor]] = field(default_factory=dict)  # with their weights, by the layer's name
    blocks: dict[str, Block] = field(default_factory=dict)  # by the names of their recomputed layers, until these come
    within: dict[str, KeptOutput] = field(default_factory=dict)  # by layers, until their output is kept elsewhere

    @property
    def differentiate(self) -> bool:
        """Whether a backward pass may follow."""
        return self.token.requires_grad

    def source(self, scheduled: ScheduledLayer, fed: Mapping[str, Tensor]) -> Tensor | None:
        """This rank's part of what is not computed: a parameter that is used twice, an input, a constant."""
        name = scheduled.layer.name
        if scheduled.layer.role is Role.TIED:
            return None if scheduled.copies else self.parameters[name]
        return fed.get(name)

    def wait_for_one(self, inputs: list[Tensor | None], given: list[Tensor | None]) -> None:
        """The token waits, in the backward pass, for what a layer computes last."""
        for tensors in (inputs, given):
            for i, x in enumerate(tensors):
                if x is not None and x.requires_grad:
                    self.token, tensors[i] = ordered(self.token, x)
                    return
