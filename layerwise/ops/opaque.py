"""Operators of PyTorch that run as they are, by name.

Layerwise knows only what they return for tensors with shapes and no values. So they are not split, and every device
that computes one has all of its inputs. If the importer's table says that an operator treats a dimension's indices
independently (samples in a Fourier transform along another dimension), it is split there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from math import lcm, prod
from threading import get_ident
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, Union

import numpy as np

from layerwise.errors import LayerwiseError
from layerwise.geometry import identity, whole
from layerwise.ops.base import Op
from layerwise.ops.facts import Counts, Extents, Local, Maps, Parameter, Saved
from layerwise.tensor import TensorSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor


Shaped = tuple[tuple[int, ...], str]  # shape and element type


@dataclass(frozen=True, slots=True)
class Made:
    """A function's result, its FLOPs and its memory in bytes, beside its inputs and result."""

    shape: tuple[int, ...]
    dtype: str
    flops: float  # of matrix products
    saved: int  # saved for the backward pass
    forward: int  # allocated during the forward pass, freed or not
    backward: int  # allocated during the backward pass


@contextmanager
def unlogged() -> Iterator[None]:
    """A context in which PyTorch logs no failing call on this thread: the exception says enough."""
    thread, loggers = get_ident(), [logging.getLogger(name) for name in LOGGERS]

    def of_others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    for logger in loggers:
        logger.addFilter(of_others)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(of_others)


LOGGERS = (
    "torch._subclasses.fake_tensor",
    "torch.export._trace",
    "torch._export.non_strict_utils",
    "torch.fx.experimental.symbolic_shapes",
)


def dry_run(function: Callable[[list[Tensor]], Tensor], inputs: Sequence[Shaped]) -> Made:
    """Runs forward, and backward if there is a derivative, on shapes only. Raises what PyTorch raises."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.autograd.graph import saved_tensors_hooks
    from torch.utils.flop_counter import FlopCounterMode

    held: list[Any] = []  # the storages seen, so that no other gets the address of one
    own, forward, saved, backward = (dict[int, int]() for _ in range(4))  # bytes by storage

    def noting(sizes: dict[int, int]) -> Callable[[Tensor], Tensor]:
        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            held.append(storage)
            sizes[storage._cdata] = storage.nbytes()
            return tensor

        return note

    counter, observer = FlopCounterMode(display=False), _observer()
    with unlogged(), FakeTensorMode(), torch.enable_grad():
        given = [noting(own)(torch.empty(shape, dtype=getattr(torch, dtype))) for shape, dtype in inputs]
        leaves = [t.requires_grad_() for t in given if t.is_floating_point() or t.is_complex()]
        with counter, observer(noting(forward)), saved_tensors_hooks(noting(saved), lambda tensor: tensor):
            out = noting(own)(function(given))
        with observer(noting(backward)):
            try:
                if out.requires_grad:
                    torch.autograd.grad(out, leaves, out, allow_unused=True)
            except RuntimeError:  # it has no derivative; PyTorch says so when one is asked for
                backward.clear()
    kept, taken = (sum(n for key, n in sizes.items() if key not in own) for sizes in (saved, forward))
    dtype = str(out.dtype).removeprefix("torch.")
    return Made(tuple(out.shape), dtype, float(counter.get_total_flops()), kept, taken, sum(backward.values()))


@cache
def _observer() -> Any:
    """A mode that sees every new tensor, created here because this module must be importable without torch."""
    import torch
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode

    class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __init__(self, see: Callable[[Tensor], object]) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.see = see

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self.see(leaf)
            return result

    return Observer


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a tensor among the arguments: an index of the operator's inputs or parameters."""

    number: int
    parameter: bool = False


@dataclass(frozen=True, slots=True)
class ElementType:
    """An element type as an argument: `float32`."""

    name: str


@dataclass(frozen=True, slots=True)
class Here:
    """The computing device, as an argument."""


Argument: TypeAlias = Union[Slot, ElementType, Here, bool, int, float, complex, str, "tuple[Argument, ...]", None]
Free: TypeAlias = tuple[tuple[int | None, ...], ...]


@dataclass(frozen=True, slots=True)
class TorchOp(Op):
    """Output number `result` of `target(**arguments)`; autograd runs its backward.

    free: for each dimension of each input, the output dimension that it corresponds to index by index; None: it is
    needed in full. Output dimensions without a counterpart are not split: () splits nothing.
    """

    kind: ClassVar[str] = "torch_op"
    target: str  # an overload that is registered with torch: "aten::topk", "mylib::swoosh.out"
    arguments: tuple[tuple[str, Argument], ...]  # by the names of its schema, without defaults
    result: int = 0
    held: tuple[tuple[tuple[int, ...], str], ...] = ()  # shapes and element types of its parameters
    free: Free = ()

    @property
    def fn(self) -> str:
        """The function's name, for display."""
        return self.target

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        """PyTorch's shape and type; a dimension that corresponds to an input's has its label.

        A dimension of the same size as the input's has the label too: it is not split here, but later layers may split
        it.
        """
        made = made_by(self, inputs)
        dims: list[str | None] = []
        units: list[int] = []
        for i, extent in enumerate(made.shape):
            labels, unit = self._named(i, extent, inputs)
            dims.append(next((label for label in labels if label not in dims), None))
            units.append(unit)
        return TensorSpec(made.shape, tuple(dims), made.dtype, tuple(units))

    def _named(self, dim: int, extent: int, inputs: Sequence[TensorSpec]) -> tuple[list[str], int]:
        """Possible labels of an output dimension, and its unit."""
        along = [(x, i) for x, row in zip(inputs, self.free, strict=False) for i, to in enumerate(row) if to == dim]
        if any(x.shape[i] != extent for x, i in along):
            raise LayerwiseError(f"{self.target}: dimension {dim} of size {extent} differs from its input's")
        alike = [x for x in inputs if len(x.shape) > dim and x.shape[dim] == extent and x.dims[dim]]
        if not along:
            return [str(x.dims[dim]) for x in alike[:1]], alike[0].units[dim] if alike else 1
        named = [str(x.dims[i]) for x, i in along if x.dims[i]]
        others = [label for x in inputs[:1] if len(x.dims) > dim and (label := x.dims[dim]) not in (None, "n")]
        return [*named, *map(str, others)] if named else [], lcm(*(x.units[i] for x, i in along))

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        rows = self.free or tuple((None,) * len(x.shape) for x in inputs)
        return tuple(
            tuple(
                whole(extent) if to is None else identity(extent, to) for extent, to in zip(x.shape, row, strict=True)
            )
            for x, row in zip(inputs, rows, strict=True)
        )

    def unsplit(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> frozenset[int]:
        return frozenset(range(len(out.shape))) - {to for row in self.free for to in row if to is not None}

    def parameters(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Parameter, ...]:
        return tuple(Parameter(str(i), shape, tuple(map(whole, shape))) for i, (shape, _) in enumerate(self.held))

    def flops(self, inputs: Sequence[TensorSpec], extents: Extents) -> Counts:
        """FLOPs of its matrix products, as torch counts them, plus one for each element that it reads or writes."""
        made = made_by(self, tuple(inputs))
        share: Counts = np.prod(extents, axis=-1, dtype=np.float64) / prod(made.shape)
        return share * (made.flops + prod(made.shape) + sum(x.volume for x in inputs))

    def saved(self, inputs: Sequence[TensorSpec], lo: Extents, hi: Extents) -> Saved:
        """Memory that autograd saves and that is allocated meanwhile; a box has its share of the elements."""
        made = made_by(self, tuple(inputs))
        share = np.prod(hi - lo, axis=-1, dtype=np.float64) / prod(made.shape)
        return Saved(extra=share * made.saved, forward=share * made.forward, between=share * made.backward)

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        return self.called(inputs, [parameters[str(i)] for i in range(len(self.held))])

    def called(self, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
        """The result, with lazy conjugation or negation resolved, so that numbers can be sent."""
        device = (*inputs, *parameters)[0].device

        def real(value: Argument) -> Any:
            import torch

            match value:
                case Slot():
                    return (parameters if value.parameter else inputs)[value.number]
                case ElementType():
                    return getattr(torch, value.name)
                case Here():
                    return device
                case tuple():
                    return [real(v) for v in value]
            return value

        made = overload_of(self.target)(**{name: real(value) for name, value in self.arguments})
        result: Tensor = made[self.result] if isinstance(made, (tuple, list)) else made
        return result.resolve_conj().resolve_neg()


@lru_cache(maxsize=4096)
def made_by(op: TorchOp, inputs: tuple[TensorSpec, ...]) -> Made:
    """The operator's result on tensors of these shapes. Raises LayerwiseError if PyTorch does not accept them."""
    count = len(inputs)
    shapes = [*((x.shape, x.dtype) for x in inputs), *op.held]
    try:
        return dry_run(lambda tensors: op.called(tensors[:count], tensors[count:]), shapes)
    except LayerwiseError:
        raise
    except Exception as error:  # torch raises whatever a shape leads to
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise LayerwiseError(
            f"{op.target} fails in PyTorch for shapes {', '.join(str(x.shape) for x in inputs)} "
            f"({said[:160].rstrip('.')}): sizes among its arguments are those of the example inputs"
        ) from None


def overload_of(target: str) -> torch._ops.OpOverload:
    """The overload of `aten::sort.stable`, or the default one of `aten::topk`. LayerwiseError if there is none."""
    import torch

    domain, _, name = target.partition("::")
    packet = getattr(getattr(torch.ops, domain), name.partition(".")[0], None)
    overload = getattr(packet, name.partition(".")[2] or "default", None)
    if not isinstance(overload, torch._ops.OpOverload):
        raise LayerwiseError(f"operator {target} is not registered with torch: import the package that defines it")
    return overload
