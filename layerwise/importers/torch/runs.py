"""Trial: runs a model as written on samples of its example, with fixed numbers for random draws.

One run has gradients: the imported layers are compared with it (`importers.torch.proof`). In the runs of parts that
follow, samples must be independent (`importers.torch.samples`), and the first must not have changed anything.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from layerwise.errors import LayerwiseError, first_line
from layerwise.importers.torch.read.arguments import Call
from layerwise.importers.torch.read.effects import (
    Numbers,
    as_it_was,
    changed,
    configure,
    noted,
    numbers,
    put_back,
)
from layerwise.importers.torch.unfused import (
    Undrawing,
    UnlikeError,
    UnprovenError,
    distance,
    fixed_weights,
    is_hollow,
    values_like,
)

LARGEST = 1e4  # largest number in an example to run
ALIKE = 1e-3  # relative to the largest number, for a second call


class NotRunError(LayerwiseError):
    """Raised if the model cannot run on such a batch."""


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """The statistics of one batch norm call: rows a sample, and each channel's mean and variance over all samples."""

    rows: int
    mean: Tensor
    var: Tensor


@dataclass(frozen=True, slots=True)
class ModelRun:
    """The results of a model's call, by leaf and by module, and its buffers and numbers afterwards."""

    leaves: list[object]
    seen: Mapping[str, Tensor]
    norms: Sequence[BatchStatistics | None]
    narrow: bool  # whether some of it was computed in fewer than 64 bits
    gradients: Mapping[int, Tensor | None]  # by the id of the tensor; empty if none were asked for
    undifferentiated: UnlikeError | None  # why PyTorch has none
    buffers: Mapping[str, Tensor]
    numbers: Numbers
    moves_again: bool  # whether the backward pass updates buffers too

    def like(self, other: ModelRun) -> bool:
        """True if both runs returned the same."""
        return len(self.leaves) == len(other.leaves) and all(
            distance(a, b) <= ALIKE if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
            for a, b in zip(self.leaves, other.leaves, strict=True)
        )


class Trial:
    """A model run with gradients on a call, and then without on others, such as parts of its samples."""

    def __init__(self, model: nn.Module, given: Call, samples: int, others: Sequence[tuple[Call, int]] = ()) -> None:
        """Raises NotRunError if the model cannot run on the call. samples: in the call; others: calls with theirs.

        given: its inputs have gradients like the example's; the first run gives all of them gradients, if the model
        accepts that.
        """
        self.model, self.given, self.samples, self._others = model, given, samples, others
        self.before, self.numbers = buffers_of(model), numbers(model)
        self.effects: tuple[str, ...] = ()  # a phrase each
        self.others: list[ModelRun] = []
        self.without_gradient: str | None = None  # why inputs have none
        self.call = _differentiated(given)
        with as_it_was(model):
            configure(model)
            try:
                self.first = self.every = self._of_all()
            except (NotRunError, UnprovenError) as error:
                if self.is_as_given:
                    raise
                self.without_gradient, self.call = str(error), given
                put_back_buffers(model, self.before)
                put_back(model, self.numbers)
                self.first = self.every = self._of_all()
            try:
                self.others = [self._further(*other) for other in others]
                self.effects = changed(self.first.numbers, numbers(model))
            except NotRunError:
                self.settle()
        if self.first.moves_again:
            twice = "moves running statistics of batch norms twice a step, as a checkpoint around them does"
            self.effects = (twice, *self.effects)

    def settle(self) -> bool:
        """Checks, once, whether a second call or one without gradients differs; parts are then run from a fresh start.

        Raises NotRunError if the model cannot run on the others.
        """
        if self.every is not self.first:
            return False
        with as_it_was(self.model):
            configure(self.model)
            self.every = self._further(self.call, self.samples)
            try:
                same = self.every.like(self._further(self.call, self.samples)) and self.every.like(self.first)
            except NotRunError:
                same = False
        if not same:
            found = changed(self.numbers, self.first.numbers)
            self.effects = found or ("computes something else in a second call, or without gradients",)
        self.others = []
        for other in self._others:
            with as_it_was(self.model):
                configure(self.model)
                self.others.append(self._further(*other))
        self.__dict__.pop("wide", None)
        return not same

    @property
    def is_as_given(self) -> bool:
        """True if the inputs have gradients only where the example's have."""
        return all(
            x.requires_grad == y.requires_grad for x, y in zip(floating(self.call), floating(self.given), strict=True)
        )

    @property
    def plain(self) -> Trial:
        """The trial in which only the example's inputs have gradients. Raises NotRunError."""
        made = copy.copy(self)
        made.__dict__.pop("wide", None)
        made.call = self.given
        with as_it_was(self.model):
            configure(self.model)
            made.first = made.every = made._of_all()
        return made

    def _of_all(self) -> ModelRun:
        wanted = [x for x in (*self.model.parameters(), *floating(self.call)) if x.requires_grad]
        return _run(self.model, self.call, self.samples, wanted=wanted)

    def _further(self, call: Call, samples: int) -> ModelRun:
        put_back_buffers(self.model, self.before)
        return _run(self.model, call, samples, self.first.norms)

    @property
    def types(self) -> set[torch.dtype]:
        """The floating-point types of parameters, buffers and inputs."""
        tensors = [*self.model.parameters(), *self.model.buffers(), *pytree.tree_leaves(self.call)]
        return {x.dtype for x in tensors if isinstance(x, Tensor) and x.is_floating_point()}

    @cached_property
    def wide(self) -> Trial:
        """The trial in float64, where rounding is negligible.

        Raises UnprovenError if the model cannot run in float64.
        """
        try:
            model = copy.deepcopy(self.model).double()
            others = [(pytree.tree_map(as_double, call), samples) for call, samples in self._others]
            wide = Trial(model, pytree.tree_map(as_double, self.call), self.samples, others)
            if self.every is not self.first:
                wide.settle()
            return wide
        except UnprovenError as error:
            if not isinstance(error, NotRunError):
                raise
            raise UnprovenError(f"its rounding is large, and it does not run in float64 ({error})") from error
        except Exception as error:  # anything that a user's class raises
            raise UnprovenError(
                f"its rounding is large, and it does not run in float64 ({type(error).__name__})"
            ) from error


def as_double(x: Any) -> Any:
    """A floating-point tensor in float64; any other value unchanged."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return x.detach().double().requires_grad_(x.requires_grad)


def runnable(call: Call) -> Call:
    """The call with copies of its tensors, with numbers that are not too large to compute with."""

    def real(x: Tensor) -> Tensor:
        some = x.detach()
        if is_hollow(x):
            some = values_like(some)
        elif x.is_floating_point():  # torch.empty may contain anything, and with NaN everywhere all results are equal
            some = some.nan_to_num().clamp(-LARGEST, LARGEST)
        return some.clone().requires_grad_(x.requires_grad)

    made: Call = pytree.tree_map_only(Tensor, real, call)
    return made


def floating(call: Call) -> list[Tensor]:
    """The tensors of a call that may have gradients."""
    tensors = (x for x in pytree.tree_leaves(call) if isinstance(x, Tensor))
    return [x for x in tensors if x.is_floating_point() or x.is_complex()]


def _differentiated(call: Call) -> Call:
    """Returns the call with gradients for all tensors that may have one."""
    able = set(map(id, floating(call)))
    made: Call = pytree.tree_map_only(Tensor, lambda x: x.detach().requires_grad_(id(x) in able), call)
    return made


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the model's buffers, by all their names."""
    return {name: b.detach().clone() for name, b in model.named_buffers(remove_duplicate=False)}


def put_back_buffers(model: nn.Module, before: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers(remove_duplicate=False):
            if name in before and buffer.shape == before[name].shape:
                buffer.copy_(before[name])


def _run(
    model: nn.Module,
    call: Call,
    samples: int,
    known: Sequence[BatchStatistics | None] | None = None,
    wanted: Sequence[Tensor] = (),
) -> ModelRun:
    """The result of one call, with gradients of `wanted`. known: statistics for its batch norms, in call order."""
    positional, named = pytree.tree_map_only(Tensor, Tensor.clone, call)
    seen, norms, error = dict[str, Tensor](), _BatchNorms(samples, known), None
    gradients: Sequence[Tensor | None] = ()
    with torch.set_grad_enabled(known is None):
        try:
            with noted(model, seen), Undrawing(), norms:  # type: ignore[no-untyped-call]
                plain = getattr(model, "_orig_mod", model)  # a compiled one would never recompile after such a call
                leaves = pytree.tree_leaves(plain(*positional, **named))
        except (LayerwiseError, torch.OutOfMemoryError) as failed:
            raise UnprovenError(f"it cannot be run here: {first_line(failed)}") from failed
        except Exception as failed:  # the model's own code may raise anything
            raise NotRunError(f"{type(failed).__name__}: {first_line(failed)}") from failed
        counted, moved = numbers(model), buffers_of(model)
        if known is None:
            try:
                with Undrawing():  # type: ignore[no-untyped-call]
                    gradients = gradients_of([x for x in leaves if isinstance(x, Tensor)], wanted)
            except UnlikeError as failed:
                error = failed
    again = known is None and any(distance(b, moved[n]) > 0 for n, b in buffers_of(model).items() if n in moved)
    leaves = [x.detach() if isinstance(x, Tensor) else x for x in leaves]
    found = {id(x): g for x, g in zip(wanted, gradients, strict=False)}
    return ModelRun(leaves, seen, norms.seen, norms.narrow, found, error, moved, counted, again)


def gradients_of(outputs: Sequence[Tensor], of: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Returns the gradients of a fixed weighted sum of the outputs, embeddings' in full. Raises UnlikeError."""
    return [g if g is None else g.to_dense() for g in _as_made(outputs, of)]


def _as_made(outputs: Sequence[Tensor], of: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """The gradients as autograd returns them."""
    total = torch.zeros(())
    for x in outputs:
        if x.requires_grad:
            total = total.to(x.device) + (x.real * fixed_weights(x)).sum()
    if not of or not total.requires_grad:
        return [None] * len(of)
    try:
        return torch.autograd.grad(total, of, allow_unused=True, retain_graph=True)
    except RuntimeError as error:  # reentrant checkpoints support only backward()
        if "checkpoint" not in str(error).lower() or any(p._post_accumulate_grad_hooks for p in of):
            raise UnlikeError("outputs", f"its backward pass raises {error}") from error
    grads = [p.grad for p in of]
    for p in of:
        p.grad = None
    try:
        total.backward()  # type: ignore[no-untyped-call]
        return [p.grad for p in of]
    finally:
        for p, grad in zip(of, grads, strict=True):
            p.grad = grad


class _BatchNorms(TorchFunctionMode):
    """A mode in which batch norms over all samples record their statistics, or use those of another batch."""

    def __init__(self, samples: int, known: Sequence[BatchStatistics | None] | None) -> None:
        super().__init__()
        self.samples, self.known = samples, known
        self.seen: list[BatchStatistics | None] = []
        self.narrow = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        names = {functional.batch_norm: _NORMED, torch.batch_norm: _CALLED}.get(func)
        if names is None:
            made = func(*args, **named)
            self.narrow |= isinstance(made, Tensor) and made.dtype in _NARROW
            return made
        given = dict(zip(names, args, strict=False)) | named
        x, number = given["input"], len(self.seen)
        if not given.get("training"):
            return func(*args, **named)
        if x.dim() < 2 or x.shape[0] % self.samples:  # over some of the samples, or over weights
            self.seen.append(None)
            return func(*args, **named)
        dims, weight = [d for d in range(x.dim()) if d != 1], given.get("weight")
        values = x.detach() if weight is None else x.detach().to(weight.dtype)  # of 16 bits, with parameters of 32
        own = BatchStatistics(x.shape[0] // self.samples, values.mean(dims), values.var(dims, unbiased=False))
        self.seen.append(own)
        other = self.known[number] if self.known is not None and number < len(self.known) else None
        if other is None or other.rows != own.rows or other.mean.shape != own.mean.shape:
            return func(*args, **named)
        return functional.batch_norm(
            x, other.mean, other.var, weight, given.get("bias"), training=False, eps=given.get("eps", 1e-5)
        )


_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_NORMED = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_CALLED = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled")
