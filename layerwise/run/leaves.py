"""What the layers compute with in the parameters' place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor, nn

from layerwise.run.execute.rows import Parts
from layerwise.run.guards.boxes import plain, unguarded
from layerwise.run.guards.wanted import stands_in
from layerwise.run.parts import local_part


class Leaves:
    """A leaf of autograd for each of `parameters`, the gradients of which are to be summed before these have them.

    tensors: all of a network, by name; those that are no such parameters are taken as they are. parts: of parameters
    that are shared out, whose leaf is empty until their layer computes. made: called with a name and its leaf when
    autograd has added up its gradient; it must not hold who holds this, which garbage collection would not see.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        parameters: Mapping[str, nn.Parameter],
        parts: Mapping[str, Parts],
        made: Callable[[str, Tensor], None],
    ) -> None:
        self._parameters, self._parts, self._made = parameters, parts, made
        self.tensors = {
            name: self._leaf(name, plain(tensor)) if name in parameters else plain(tensor)
            for name, tensor in tensors.items()
        }

    def now(self) -> Mapping[str, Tensor]:
        """All of them, by name: with new leaves of parameters that the loop gave other memory, p.data = x."""
        if not self._parameters:
            return self.tensors
        tensors = dict(self.tensors)
        with unguarded():
            for name, p in self._parameters.items():
                if name not in self._parts and tensors[name].data_ptr() != local_part(p).data_ptr():
                    tensors[name] = self._leaf(name, local_part(p))
                tensors[name].requires_grad_(p.requires_grad)
        self.tensors = tensors
        return tensors

    def _leaf(self, name: str, tensor: Tensor) -> Tensor:
        leaf = tensor.detach()
        if name in self._parts:
            leaf = leaf.new_empty(self._parts[name].shape)
        leaf.requires_grad_()
        stands_in(leaf)
        leaf.register_post_accumulate_grad_hook(partial(self._made, name))  # type: ignore[no-untyped-call]
        return leaf
