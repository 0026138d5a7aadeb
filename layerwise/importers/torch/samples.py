"""Samples: the law that what a model makes of a sample is made of that sample alone, proven by running the model.

It is run on five samples and on three and two of them: the same rows, and a loss that is their mean or sum. Where it
takes no such batch, one sample of the example is another: the rows of the others stay. Batch norms are known: on parts
they take the statistics of all. Which inputs have samples is found out so, where several are as long as the batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from layerwise.errors import LayerwiseError, first_line
from layerwise.importers.torch.read.arguments import Arguments, Call, signature_of
from layerwise.importers.torch.read.effects import as_it_was, noted, uncompiled
from layerwise.importers.torch.read.fed import Fed
from layerwise.importers.torch.unfused import UnprovenError, distance, undrawing

PARTS = (3, 2)  # samples of the parts that the model is run on: no grouping of several samples goes into both
EXACT = 1e-7  # of the largest number, in float64
NARROW = 2e-2  # where parts of a network in float64 compute in fewer bits
ROUNDED = {torch.float64: EXACT, torch.float32: 2e-5}  # where it is more, float64 decides
NOTHING = 1e-2  # a loss that is less may be what rounding leaves of numbers that cancel
MOST_CANDIDATES = 4  # inputs as long as the batch, of which any may be shared


class MixedSamplesError(LayerwiseError):
    """Samples are not independent."""

    def __init__(self, what: str, layer: str = "", as_long: Sequence[str] = ()) -> None:
        """as_long: inputs as long as the batch, of which some may be shared."""
        self.what = what
        which = f" ({', '.join(as_long)} are as long as the batch: shared= names those without samples, () none)"
        super().__init__(
            f"{f'layer {layer!r}' if layer else 'the model'} computes something of several samples together: {what}; "
            "layerwise gives one device's numbers where samples are independent, but for batch norms and losses, and, "
            "with samples_together=True in ParallelOptions, where a layer computes them together, however many they "
            f"are{which if len(as_long) > 1 else ''}"
        )


def independent(model: nn.Module, call: Call, fed: Fed, *, any_shared: bool) -> Fed:
    """The inputs that have samples, of which these are independent. LayerwiseError where none are.

    any_shared: whether inputs as long as the batch may be shared. UnprovenError where the model cannot be run so.
    """
    first: MixedSamplesError | None = None
    why = ""
    for rows in _subsets(fed) if any_shared else (fed.rows,):
        try:
            uneven = _proof(model, call, Fed(fed.batch, rows), _by_parts)
        except MixedSamplesError as error:
            first = first or error
        except _NotRunError as error:
            why = why or str(error)
        else:
            left = _names(model, call, fed.rows - rows)
            return Fed(fed.batch, rows, (*fed.shared, *left), bool(left), uneven)
    if first is None:
        try:
            return replace(fed, uneven=_proof(model, call, fed, _by_another))
        except MixedSamplesError as error:
            first = error
        except _NotRunError as error:
            raise UnprovenError(f"it cannot be run here: {error}") from error
    assert first is not None
    raise MixedSamplesError(first.what, _mixing(model, call, fed), _names(model, call, fed.rows) if any_shared else ())


def check_decided(model: nn.Module, call: Call, fed: Fed, error: MixedSamplesError) -> None:
    """The error where the model also takes some of the inputs as long as the batch as the same for all samples."""
    for rows in _subsets(fed):
        if rows != fed.rows and fed.batch > 1:
            with suppress(_NotRunError, UnprovenError):
                with suppress(MixedSamplesError):
                    _proof(model, call, Fed(fed.batch, rows), _by_parts)
                raise MixedSamplesError(error.what, as_long=_names(model, call, fed.rows)) from error


def _names(model: nn.Module, call: Call, leaves: Collection[int]) -> tuple[str, ...]:
    named = {id(leaf.value): path for path, leaf in Arguments(signature_of(model), call, 0).leaves.items()}
    return tuple(named.get(id(x), f"input {i}") for i, x in enumerate(pytree.tree_leaves(call)) if i in leaves)


def _mixing(model: nn.Module, call: Call, fed: Fed) -> str:
    """The path of the first module whose output has other rows on some of the samples; empty where none is seen."""
    seen: list[dict[str, Tensor]] = []

    def look(samples: Call, count: int, norms: Sequence[Statistics | None] | None = None) -> Returned:
        seen.append({})
        with noted(model, seen[-1]):
            return _returned(model, samples, count, norms)

    many = sum(PARTS)
    with suppress(_NotRunError, UnprovenError):
        every = look(fed.map(lambda x: _distinct(x, many), call), many)
        look(fed.map(lambda x: _distinct(x, many)[: PARTS[0]], call), PARTS[0], every.norms)
        for path, x in seen[0].items():
            part = seen[1].get(path, x)
            ratio = x.dim() and part.dim() and x.shape[0] * PARTS[0] == part.shape[0] * many
            if ratio and not distance(part, x[: len(part)]) <= ROUNDED[torch.float32]:
                return path
    return ""


def _subsets(fed: Fed) -> Iterator[frozenset[int]]:
    rows = sorted(fed.rows)
    fewest = 1 if len(rows) <= MOST_CANDIDATES else len(rows)
    for count in range(len(rows), fewest - 1, -1):
        yield from map(frozenset, combinations(rows, count))


def _proof(
    model: nn.Module, call: Call, fed: Fed, compare: Callable[[nn.Module, Call, Fed], Outcome]
) -> tuple[int, ...]:
    """`Fed.uneven`. MixedSamplesError, UnprovenError, _NotRunError."""
    tensors = [x for x in (*model.parameters(), *pytree.tree_leaves(call)) if isinstance(x, Tensor)]
    types = {x.dtype for x in tensors if x.is_floating_point()}
    found = compare(model, call, fed)
    if not found.away <= min((ROUNDED.get(t, 0.0) for t in types), default=EXACT):
        try:  # there, rounding is next to nothing, however much of it a network makes
            doubled = pytree.tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, call)
            found = compare(copy.deepcopy(model).double(), doubled, fed)
        except LayerwiseError:
            raise
        except Exception as error:  # whatever a user's class meets
            raise UnprovenError(f"it rounds much, and has no float64 ({type(error).__name__})") from error
        if not found.away <= (NARROW if found.narrow else EXACT):
            raise MixedSamplesError(found.what)
    return found.uneven


@dataclass(frozen=True, slots=True)
class Outcome:
    """How far away the rows of parts are, relative to the largest number, and what is."""

    away: float
    what: str
    uneven: tuple[int, ...]  # as `Fed` has it
    narrow: bool = False  # whether some of it is computed in fewer than 64 bits


def _by_parts(model: nn.Module, call: Call, fed: Fed) -> Outcome:
    """Compares what is returned of five samples with that of three and two of them."""
    many = sum(PARTS)
    all_five = _returned(model, fed.map(lambda x: _distinct(x, many), call), many)
    parts = []
    for lo, count in ((0, PARTS[0]), PARTS):
        part = fed.map(lambda x, lo=lo, n=count: _distinct(x, many)[lo : lo + n], call)  # type: ignore[misc]
        parts.append(_returned(model, part, count, all_five.norms).leaves)
    every = all_five.leaves
    uneven, worst = list[int](), (0.0, "")
    if any(len(part) != len(every) for part in parts):
        raise MixedSamplesError("how much the model returns depends on the number of samples")
    for i, (all_rows, *halves) in enumerate(zip(every, *parts, strict=True)):
        tensors = [x for x in halves if isinstance(x, Tensor)]
        if not isinstance(all_rows, Tensor) or len(tensors) < len(halves):
            continue
        if any(x.shape != all_rows.shape for x in tensors):
            dim = _along(all_rows, tensors)
            if dim is None:
                raise MixedSamplesError(
                    f"output {i} has shape {tuple(all_rows.shape)} for {many} samples and {tuple(tensors[0].shape)} "
                    f"for {PARTS[0]}, and each sample must have a row, or as many as the others"
                )
            away, what = distance(torch.cat(tensors, dim), all_rows), "has other rows where other samples are there"
        elif all_rows.dim():
            away, what = max(distance(x, all_rows) for x in tensors), "depends on all samples, and has no row for each"
        else:
            away, what = 0.0, ""
            uneven += [i] * (not _is_loss(all_rows, tensors))
        if not away <= worst[0]:
            worst = away, f"output {i}, of shape {tuple(all_rows.shape)}, {what}"
    return Outcome(*worst, tuple(uneven), all_five.narrow)


def _is_loss(all_samples: Tensor, parts: Sequence[Tensor]) -> bool:
    """Whether a number is the mean, or the sum, of those of parts of the samples, or the same for any."""
    numbers = [x.double() for x in parts]
    mean = torch.stack([x * n for x, n in zip(numbers, PARTS, strict=True)]).sum() / sum(PARTS)
    total = torch.stack(numbers).sum()
    return any(distance(x, all_samples, NOTHING) <= ROUNDED[torch.float32] for x in (mean, total))


def _along(whole: Tensor, parts: Sequence[Tensor]) -> int | None:
    """The dimension that samples are along: the only one whose extents are proportional to their number."""
    many = sum(PARTS)
    if any(x.dim() != whole.dim() for x in parts):
        return None
    differ = [d for d in range(whole.dim()) if any(x.shape[d] != whole.shape[d] for x in parts)]
    fits = len(differ) == 1 and all(
        whole.shape[differ[0]] * n == x.shape[differ[0]] * many for x, n in zip(parts, PARTS, strict=True)
    )
    return differ[0] if fits else None


def _by_another(model: nn.Module, call: Call, fed: Fed) -> Outcome:
    """Compares what is returned of the example with that where its first, or its last, sample is another."""
    batch, worst = fed.batch, (0.0, "")
    if batch < 2:
        raise _NotRunError("it takes one sample only")
    every = _returned(model, fed.map(lambda x: _distinct(x, batch), call), batch)
    others = {}
    for place in (0, batch - 1):
        other = fed.map(lambda x, place=place: _with_another(_distinct(x, batch), place), call)  # type: ignore[misc]
        others[place] = _returned(model, other, batch, every.norms).leaves
    for i, one in enumerate(every.leaves):
        if not isinstance(one, Tensor) or not one.dim():
            continue
        dim = next((d for d, extent in enumerate(one.shape) if extent and extent % batch == 0), None)
        for place, leaves in others.items():
            x = leaves[i]
            if not isinstance(x, Tensor) or x.shape != one.shape:
                raise MixedSamplesError(f"the shape of output {i} depends on the numbers of a sample")
            kept = [] if dim is None else [r for r in range(one.shape[dim]) if r // (one.shape[dim] // batch) != place]
            if dim is None:
                away, what = (
                    distance(x, one),
                    f"has shape {tuple(one.shape)} for {batch} samples, and each must have a row",
                )
            else:
                ours, theirs = (t.index_select(dim, _ids(kept, t)) for t in (x, one))
                away, what = distance(ours, theirs), "has other rows where another sample is another"
            if not away <= worst[0]:
                worst = away, f"output {i} {what}"
    numbers = (i for i, x in enumerate(every.leaves) if isinstance(x, Tensor) and not x.dim())
    return Outcome(*worst, tuple(numbers), every.narrow)


def _ids(rows: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(rows, device=like.device)


class _NotRunError(LayerwiseError):
    """The model cannot be run on such a batch."""


@dataclass(frozen=True, slots=True)
class Returned:
    """What a model returned: its leaves, the statistics of its batch norms, and whether some had fewer than 64 bits."""

    leaves: list[object]
    norms: Sequence[Statistics | None]
    narrow: bool


def _returned(model: nn.Module, call: Call, samples: int, norms: Sequence[Statistics | None] | None = None) -> Returned:
    """What a model returns where nothing is drawn. norms: what its batch norms take, in the order of their calls."""
    replay = _BatchNorms(samples, norms)
    positional, named = pytree.tree_map_only(Tensor, Tensor.clone, call)
    try:
        with torch.no_grad(), as_it_was(model), undrawing(), replay:
            leaves = pytree.tree_leaves(uncompiled(model)(*positional, **named))
    except (LayerwiseError, torch.OutOfMemoryError) as error:
        raise UnprovenError(f"it cannot be run here: {first_line(error)}") from error
    except Exception as error:  # the model's own code, which may raise anything
        raise _NotRunError(f"{type(error).__name__}: {first_line(error)}") from error
    return Returned(leaves, replay.seen, replay.narrow)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of one call of a batch norm: rows a sample, and each channel's mean and variance over all samples."""

    rows: int
    mean: Tensor
    var: Tensor


class _BatchNorms(TorchFunctionMode):
    """Within it batch norms of all samples note their statistics, or take those that another batch had."""

    def __init__(self, samples: int, known: Sequence[Statistics | None] | None) -> None:
        super().__init__()
        self.samples, self.known = samples, known
        self.seen: list[Statistics | None] = []
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
        if x.dim() < 2 or x.shape[0] % self.samples:  # of some of the samples, or of weights
            self.seen.append(None)
            return func(*args, **named)
        dims = [d for d in range(x.dim()) if d != 1]
        own = Statistics(x.shape[0] // self.samples, x.mean(dims), x.var(dims, unbiased=False))
        self.seen.append(own)
        other = self.known[number] if self.known is not None and number < len(self.known) else None
        if other is not None and other.rows == own.rows and other.mean.shape == own.mean.shape:
            own = other
        return functional.batch_norm(
            x, own.mean, own.var, given.get("weight"), given.get("bias"), training=False, eps=given.get("eps", 1e-5)
        )


_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_NORMED = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_CALLED = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled")


def _distinct(x: Tensor, samples: int) -> Tensor:
    """So many samples: the example's, and others made of them where it has fewer, or has one several times."""
    rows = list[Tensor]()
    for i in range(samples):
        row = x[i % len(x)].detach()
        again = i >= len(x) or any(torch.equal(row, other) for other in rows)
        rows.append(_another(row, i) if again else row)
    return torch.stack(rows)


def _with_another(x: Tensor, place: int) -> Tensor:
    """The same samples but for one, which is another."""
    rows = list(x.unbind())
    rows[place] = _another(rows[place], len(rows))
    return torch.stack(rows)


def _another(row: Tensor, number: int) -> Tensor:
    """Another sample of the kind of this one: of integers the same ones in another order, or 0 and 1."""
    if row.is_floating_point() or row.is_complex():
        draws = torch.Generator().manual_seed(number)
        drawn = torch.rand(row.shape, generator=draws, dtype=torch.float64).to(row.device) * 2 - 1
        largest = float(row.abs().max()) if row.numel() else 1.0
        return row / 2 + (drawn * (largest or 1.0) / 2).to(row.dtype)
    if row.dtype == torch.bool or not row.numel():
        return row
    if row.numel() > 1 and not bool((row == row.flatten()[0]).all()):
        return row.flatten().roll(number).view(row.shape)
    count = torch.arange(number, number + row.numel(), device=row.device).view(row.shape)
    return (count % 2).to(row.dtype) if int(row.flatten()[0]) in (0, 1) else row - (count % 2).to(row.dtype)
