"""What an nn.Module can and a parallel one cannot: each is refused with a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn, Self

from torch import Tensor, nn

from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from layerwise.run.compiling import refuse

if TYPE_CHECKING:
    from layerwise.graph.layer import LayerGraph
    from layerwise.run.original import Original


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

    def train(self, mode: bool = True) -> NoReturn:
        """LayerwiseError: the whole module has one mode."""
        raise LayerwiseError(
            "train() and eval() of a single layer of the parallel module are not supported: freeze a batch norm, or "
            "leave a dropout out, before the model is made parallel, or parallelize with strategy='data'"
        )

    forward = _refuse
    register_forward_hook = register_forward_pre_hook = _refuse
    register_full_backward_hook = register_full_backward_pre_hook = register_backward_hook = _refuse


class _Norm(nn.Module):
    """Where a loop finds a batch norm of the parallel module, through a module around it."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise LayerwiseError(
            "the parallel module computes its batch norms by itself, and update_bn() or a loop over modules() does not "
            "reach them: do it on the plain model, with the values of full_state_dict(), or parallelize with "
            "strategy='data'"
        )

    reset_running_stats = reset_parameters = train = eval = requires_grad_ = _refuse


class _Norm1d(_Norm, nn.BatchNorm1d):
    def __init__(self) -> None:
        nn.Module.__init__(self)


class _Norm2d(_Norm, nn.BatchNorm2d):
    def __init__(self) -> None:
        nn.Module.__init__(self)


class _Norm3d(_Norm, nn.BatchNorm3d):
    def __init__(self) -> None:
        nn.Module.__init__(self)


_KINDS = {2: _Norm1d, 3: _Norm1d, 4: _Norm2d, 5: _Norm3d}  # by the dimensions of what they normalise


class Refusing(nn.Module):
    """What else an nn.Module can, and a parallel one cannot."""

    comm: Comm
    graph: LayerGraph
    _tree: nn.Module
    _original: Original | None = None

    def train(self, mode: bool = True) -> Self:
        """All of it."""
        self.training = mode
        for node in self._tree.modules():
            node.training = mode
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        """LayerwiseError for what the layers would not follow: another module or parameter, another flag."""
        original = self.__dict__.get("_original")
        layer = isinstance(value, nn.Module | nn.Parameter) and not name.startswith("_")
        if layer or (original is not None and name in original.attributes and name not in self.__dict__):
            raise LayerwiseError(
                f"{name!r} cannot be set on the parallel module, which would go on as it was traced: set it before the "
                "model is made parallel"
            )
        super().__setattr__(name, value)

    def named_modules(self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True) -> Any:
        """For a module that has this one. LayerwiseError where a loop looks for layers: it would find none.

        Batch norms stand for what refuses when a loop finds them (`torch.optim.swa_utils.update_bn`).
        """
        if memo is None:
            raise LayerwiseError(
                "the parallel module has no layers of PyTorch's to look through: do to the model what modules() is "
                "for (freezing statistics, dropout rates, hooks) before it is made parallel"
            )
        return self._below(super().named_modules(memo, prefix, remove_duplicate), prefix)

    def _below(self, modules: Iterator[tuple[str, nn.Module]], prefix: str) -> Iterator[tuple[str, nn.Module]]:
        yield from modules
        for layer in self.graph.layers:
            for name in {name.rpartition(".")[0] for name, *_ in layer.remembered}:
                yield f"{prefix}.{name}" if prefix else name, _KINDS[len(layer.stages[0].space.out.shape)]()

    def apply(self, fn: Any) -> NoReturn:
        """LayerwiseError: there are no layers of PyTorch's to apply it to."""
        raise LayerwiseError(
            "apply() finds no layers of PyTorch's in the parallel module: initialise the model before it is made "
            "parallel"
        )

    @property
    def _initialize_hook(self) -> NoReturn:  # what torch.compile asks a module for
        refuse()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise LayerwiseError(
            "the parallel module cannot be pickled: layerwise.save(model, file) writes the whole model's state dict"
        )
