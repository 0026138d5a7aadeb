"""Parts: modules of a model that are not traced but called, each by one layer (`ops.whole`).

While the model is traced an operator stands in for each of them, which knows the shapes that the example gave.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from layerwise.errors import LayerwiseError
from layerwise.importers.labels import usual_labels
from layerwise.importers.registry import Built, Call, Operand
from layerwise.ops.opaque import Made
from layerwise.ops.whole import Whole

Shape = tuple[int, ...]
PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)


@dataclass(frozen=True, slots=True)
class ModuleInput:
    """A tensor that a part is called with. follows: whether it has a row a sample."""

    shape: Shape  # of a sample, where it follows
    dtype: torch.dtype
    follows: bool


@dataclass(frozen=True)
class WholeModule:
    """A module that is called as it is. module: a copy without the memory of its parameters and buffers."""

    path: str
    why: str
    module: nn.Module
    arguments: tuple[object, ...]  # an ModuleInput, or a value that is no tensor, as they lie in `structure`
    structure: pytree.TreeSpec
    results: tuple[object, ...]  # the shape of a sample, or a value that is no tensor, as they lie in `returned`
    returned: pytree.TreeSpec
    dtype: torch.dtype  # of all that it returns
    differentiable: bool
    work: Made | None = None  # of two samples

    @property
    def inputs(self) -> list[ModuleInput]:
        """The tensors that it is called with."""
        return [x for x in self.arguments if isinstance(x, ModuleInput)]

    @property
    def shapes(self) -> list[Shape]:
        """The shape of a sample of each tensor that it returns."""
        return [x for x in self.results if isinstance(x, tuple)]

    def function(self) -> Callable[[Sequence[Tensor], Mapping[str, Tensor], bool], Tensor]:
        """Returns the function that computes it on one rank, with a copy of the module of its own."""
        return partial(self.packed, copied(self.module))

    def packed(
        self, module: nn.Module, inputs: Sequence[Tensor], tensors: Mapping[str, Tensor], training: bool
    ) -> Tensor:
        """Calls the module; returns its tensors as one, a row a sample: one as it is, several side by side."""
        values = (x.clone() for x in inputs)  # which others read, and it may write to
        arguments = [next(values) if isinstance(x, ModuleInput) else x for x in self.arguments]
        positional, named = pytree.tree_unflatten(arguments, self.structure)
        returned = functional_call(module.train(training), dict(tensors), positional, named)
        samples = next(len(x) for x, known in zip(inputs, self.inputs, strict=True) if known.follows)
        leaves, structure = pytree.tree_flatten(returned)
        shapes = [tuple(x.shape) if isinstance(x, Tensor) else x for x in leaves]
        if structure != self.returned or shapes != [(samples, *x) if isinstance(x, tuple) else x for x in self.results]:
            raise refused(
                self.path, f"it returns {_listed(shapes)}, and on the example a row a sample of {_listed(self.results)}"
            )
        made = [x for x in leaves if isinstance(x, Tensor)]
        whole = made[0] if len(made) == 1 else torch.cat([x.reshape(samples, -1) for x in made], 1)
        graded = torch.is_grad_enabled() and any(x.requires_grad for x in (whole, *inputs, *tensors.values()))
        if graded and whole.is_floating_point() and whole.requires_grad != self.differentiable:
            raise refused(self.path, "whether what it returns has a gradient depends on data")
        return whole

    def unpacked(self, whole: Tensor) -> object:
        """Returns the values that `packed` made one tensor of, in the structure that the module returns."""
        made, start = [whole], 0
        if len(self.shapes) > 1:
            made = []
            for shape in self.shapes:
                made.append(whole[:, start : start + prod(shape)].reshape(whole.shape[0], *shape))
                start += prod(shape)
        values = iter(made)
        return pytree.tree_unflatten([next(values) if isinstance(x, tuple) else x for x in self.results], self.returned)

    def stand_in(self, module: nn.Module, *positional: Any, **named: Any) -> object:
        """Stands in for the module's forward while the model is traced. LayerwiseError where it is called otherwise."""
        leaves, structure = pytree.tree_flatten((positional, named))
        alike = structure == self.structure and all(
            (x.dtype, x.shape[int(known.follows) :]) == (known.dtype, known.shape)
            if isinstance(known, ModuleInput) and isinstance(x, Tensor)
            else type(x) is type(known) and x == known
            for known, x in zip(self.arguments, leaves, strict=True)
        )
        if not alike:
            raise refused(
                self.path,
                "it is called here with other arguments, or with samples of another shape, than on the example",
            )
        tensors = list(held(module).values())
        inputs = [x for x in leaves if isinstance(x, Tensor)]
        return self.unpacked(torch.ops.layerwise.whole(self.path, inputs, tensors))

    @property
    def packed_shape(self) -> Shape:
        """The shape of a sample of `packed`."""
        return self.shapes[0] if len(self.shapes) == 1 else (sum(map(prod, self.shapes)),)

    def layer(self, call: Call) -> Built:
        """Its layer."""
        inputs, tensors = call["inputs"], call["tensors"]
        assert isinstance(inputs, tuple)
        assert isinstance(tensors, tuple)
        operands = [x for x in inputs if isinstance(x, Operand)]
        parameters = [x for x in tensors if isinstance(x, Operand)]
        if len(operands) < len(inputs) or any(
            ("n" in x.spec.dims) != known.follows or (known.follows and x.spec.index("n") != 0)
            for x, known in zip(operands, self.inputs, strict=True)
        ):
            raise refused(self.path, "an input of it has no samples along dimension 0 where the example had as many")
        if any(p.activation or p.transposed for p in parameters):
            raise refused(self.path, "a parameter of it is computed")
        shape = self.packed_shape
        dtype = str(self.dtype).removeprefix("torch.")
        alike = (x.spec.dims for x in operands if x.spec.index("n") == 0 and len(x.shape) == len(shape) + 1)
        labels = next(alike, usual_labels(len(shape) + 1, dtype, signal=False))
        names = zip(held(self.module).items(), parameters, strict=True)
        work = self.work
        assert work is not None
        op = Whole(
            self.path,
            tuple(x.follows for x in self.inputs),
            shape,
            labels[1:],
            dtype,
            tuple((name, p.shape, isinstance(t, nn.Parameter)) for (name, t), p in names),
            self.differentiable,
            work.flops / 2 + prod(shape),
            (work.saved / 2, work.forward / 2, work.backward / 2),
            self.function,
            self.why,
        )
        return Built(op, tuple(operands), tuple(parameters))


def refused(path: str, why: str) -> LayerwiseError:
    """The error for a module that cannot be whole."""
    return LayerwiseError(f"module {path!r} cannot be whole, run as it is written by itself: {why}")


def held(module: nn.Module) -> dict[str, Tensor]:
    """Its parameters and buffers that have elements, by their names in it."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return {name: x for name, x in tensors if 0 not in x.shape}


def copied(module: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers have no memory. LayerwiseError where it cannot be copied."""
    memo: dict[int, object] = {}
    for x in held(module).values():
        empty = torch.empty_like(x, device="meta")
        memo[id(x)] = nn.Parameter(empty, x.requires_grad) if isinstance(x, nn.Parameter) else empty
    return copy.deepcopy(module, memo)


PARTS: ContextVar[Mapping[str, WholeModule]] = ContextVar(
    "parts", default=MappingProxyType({})
)  # of the model that is imported now


@contextmanager
def importing(parts: Mapping[str, WholeModule]) -> Iterator[None]:
    """Within it a model that is traced has these parts."""
    token = PARTS.set(parts)
    try:
        yield
    finally:
        PARTS.reset(token)


@contextmanager
def stood_in(model: nn.Module) -> Iterator[None]:
    """Within it the parts of the model are not computed but stood in for.

    And SyncBatchNorm runs where it would refuse to: it is a batch norm, of the full batch as all are here.
    """
    forwards = {path: part.stand_in for path, part in PARTS.get().items()}
    synchronised = (path for path, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm))
    forwards |= dict.fromkeys(synchronised, nn.modules.batchnorm._BatchNorm.forward)
    with ExitStack() as stack:
        for path, forward in forwards.items():
            module = model.get_submodule(path)
            stack.enter_context(mock.patch.object(module, "forward", partial(forward, module)))
        yield


def whole_layer(call: Call) -> Built:
    """The layer of a part."""
    return PARTS.get()[str(call["path"])].layer(call)


def _listed(shapes: Sequence[object]) -> str:
    return ", ".join(map(str, shapes)) or "nothing"


_LIBRARY = torch.library.Library("layerwise", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("whole(str path, Tensor[] inputs, Tensor[] tensors) -> Tensor")  # type: ignore[no-untyped-call]


@torch.library.register_fake("layerwise::whole", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _fake(path: str, inputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:
    part = PARTS.get()[path]
    first = next(x for x, known in zip(inputs, part.inputs, strict=True) if known.follows)
    return first.new_empty((first.shape[0], *part.packed_shape), dtype=part.dtype)
