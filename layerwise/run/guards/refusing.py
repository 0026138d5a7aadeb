"""What an nn.Module can and a parallel one cannot: each is refused with a sentence."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor, nn

from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError


class Names(nn.Module):
    """A node of the tree of parameters' names: no layer, though a model has one of this name."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise LayerwiseError(
            "the parallel module computes its layers by itself, none is called as a module: a hook of one, or a call, "
            "is not supported"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor | nn.Module):
            raise LayerwiseError(
                f"{name!r} cannot be replaced in the parallel module, which would go on with the old one: replace it "
                "before the model is made parallel"
            )
        super().__setattr__(name, value)

    forward = _refuse
    register_forward_hook = register_forward_pre_hook = _refuse
    register_full_backward_hook = register_full_backward_pre_hook = register_backward_hook = _refuse


class Refusing(nn.Module):
    """What else an nn.Module can, and a parallel one cannot."""

    comm: Comm

    def named_modules(self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True) -> Any:
        """For a module that has this one. LayerwiseError where a loop looks for layers: it would find none."""
        if memo is None:
            raise LayerwiseError(
                "the parallel module has no layers of PyTorch's to look through: do to the model what modules() is "
                "for (freezing statistics, dropout rates, hooks) before it is made parallel"
            )
        return super().named_modules(memo, prefix, remove_duplicate)

    def apply(self, fn: Any) -> NoReturn:
        """LayerwiseError: there are no layers of PyTorch's to apply it to."""
        raise LayerwiseError(
            "apply() finds no layers of PyTorch's in the parallel module: initialise the model before it is made "
            "parallel"
        )

    def compile(self, *_: Any, **__: Any) -> NoReturn:
        """LayerwiseError."""
        raise LayerwiseError("torch.compile of the parallel module is not supported: leave it out")

    @property
    def _initialize_hook(self) -> NoReturn:  # what torch.compile asks a module for
        self.compile()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise LayerwiseError(
            "the parallel module cannot be pickled: layerwise.save(model, file) writes the whole model's state dict"
        )
