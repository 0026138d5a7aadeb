"""Keywords: models that are called with named tensors, as those of Hugging Face are: model(**batch)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from layerwise.errors import LayerwiseError
from layerwise.run.parallel import ParallelModule


class ByPosition(nn.Module):
    """The same model (the same parameters, under the same names), called by position."""

    called: nn.Module

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self._parameters, self._buffers, self._modules = model._parameters, model._buffers, model._modules
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self.__dict__["called"] = model  # no child: its parameters are here already
        self.names, self.training = names, model.training

    def forward(self, *inputs: Tensor) -> Any:
        """Not by `__call__`: its hooks are not a part of the network."""
        return self.called.forward(**dict(zip(self.names, inputs, strict=True)))


def by_name(module: ParallelModule, names: tuple[str, ...]) -> None:
    """Lets the module be called as the model was: with all of `names`, or by position, in their order."""

    def positional(_: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[tuple[Any, ...], Any]:
        rest = dict(named)
        batch = {"batch": rest.pop("batch")} if "batch" in rest and "batch" not in names else {}
        if not rest:
            return inputs, batch
        wanted = names[len(inputs) :]
        if set(rest) != set(wanted):
            odd = sorted(set(rest) ^ set(wanted))[0]
            raise LayerwiseError(
                f"the model was made parallel for inputs {', '.join(names)}; {odd!r} is "
                f"{'missing' if odd in wanted else 'not one of them'}: give parallelize the inputs that it is called "
                "with"
            )
        return (*inputs, *(rest[name] for name in wanted)), batch

    module.register_forward_pre_hook(positional, with_kwargs=True)
