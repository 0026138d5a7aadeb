"""The law that samples are independent: what a model computes for one depends on no other. Running the model proves it.

The model runs on five samples and on three and two of them: rows must be the same, and a loss must be their mean or
sum. Batch norms are exempt: on parts they use the statistics of all samples. This also shows which inputs have samples,
if several are as long as the batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from itertools import combinations

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from layerwise.errors import LayerwiseError
from layerwise.importers.torch.read.arguments import Arguments, Call, signature_of
from layerwise.importers.torch.read.fed import Fed
from layerwise.importers.torch.runs import NotRunError, Trial, runnable
from layerwise.importers.torch.unfused import UnprovenError, distance

PARTS = (3, 2)  # sizes of the parts that the model runs on: no grouping of several samples fits both
EXACT = 1e-7  # of the largest number, in float64
NARROW = 2e-2  # if parts of a float64 network compute in fewer bits
ROUNDED = {torch.float64: EXACT, torch.float32: 2e-5}  # if it is more, float64 decides
NOTHING = 1e-2  # a smaller loss may be what rounding leaves of numbers that cancel
MOST_CANDIDATES = 4  # inputs as long as the batch, any of which may be shared


class MixedSamplesError(LayerwiseError):
    """Raised if samples are not independent."""

    def __init__(self, what: str, layer: str = "", as_long: Sequence[str] = ()) -> None:
        """as_long: inputs as long as the batch, some of which may be shared."""
        self.what, self.layer = what, layer
        which = (
            f" ({', '.join(as_long)} are as long as the batch: ParallelOptions(shared=...) names those that samples "
            "share, () none)"
        )
        super().__init__(
            f"{f'layer {layer!r}' if layer else 'the model'} combines samples: {what}. layerwise needs independent "
            "samples, except in batch norms and losses; ParallelOptions(samples_together=True) also allows a layer "
            f"that combines any number of samples{which if len(as_long) > 1 else ''}"
        )


def independent(model: nn.Module, call: Call, fed: Fed, *, any_shared: bool) -> tuple[Fed, Trial]:
    """The inputs that have samples, which are independent, and the runs that show it.

    any_shared: whether inputs as long as the batch may be shared. Raises LayerwiseError if samples are not independent,
    and UnprovenError if the model cannot run that way.
    """
    first: MixedSamplesError | None = None
    refused: NotRunError | None = None
    for rows in _subsets(fed) if any_shared else (fed.rows,):
        try:
            trial, uneven = _of_parts(model, call, Fed(fed.batch, rows))
        except MixedSamplesError as error:
            first = first or error
        except NotRunError as error:
            refused = error
        else:
            left = _names(model, call, fed.rows - rows)
            return Fed(fed.batch, rows, (*fed.shared, *left), bool(left), uneven), trial
    if first is None:
        assert refused is not None
        with suppress(NotRunError):
            Trial(model, runnable(call), fed.batch)
            raise of_some_batches(refused)
        raise UnprovenError(f"it cannot be run here: {refused}") from refused
    raise MixedSamplesError(first.what, first.layer, _names(model, call, fed.rows) if any_shared else ())


def of_some_batches(why: LayerwiseError) -> LayerwiseError:
    """The error for a model that runs on its example, but not on every number of samples."""
    return LayerwiseError(
        f"the model does not accept any number of samples ({str(why).partition(';')[0]}): it combines samples in "
        "groups, which layerwise cannot split, or has a number for the batch, in place of x.shape[0]"
    )


def check_decided(model: nn.Module, call: Call, fed: Fed, error: MixedSamplesError) -> None:
    """Raises the error if the model also accepts some inputs as long as the batch as shared by all samples."""
    for rows in _subsets(fed):
        if rows != fed.rows and fed.batch > 1:
            with suppress(NotRunError, UnprovenError):
                with suppress(MixedSamplesError):
                    _of_parts(model, call, Fed(fed.batch, rows))
                raise MixedSamplesError(error.what, as_long=_names(model, call, fed.rows)) from error


def _names(model: nn.Module, call: Call, leaves: Collection[int]) -> tuple[str, ...]:
    named = {id(leaf.value): path for path, leaf in Arguments(signature_of(model), call, 0).leaves.items()}
    return tuple(named.get(id(x), f"input {i}") for i, x in enumerate(pytree.tree_leaves(call)) if i in leaves)


def _mixing(trial: Trial) -> str:
    """The path of the first module whose output rows change with the samples beside them; empty if none is seen."""
    for path, x in trial.every.seen.items() if trial.others else ():
        part = trial.others[0].seen.get(path, x)
        ratio = x.dim() and part.dim() and x.shape[0] * PARTS[0] == part.shape[0] * trial.samples
        if ratio and not distance(part, x[: len(part)]) <= ROUNDED[torch.float32]:
            return path
    return ""


def _subsets(fed: Fed) -> Iterator[frozenset[int]]:
    rows = sorted(fed.rows)
    fewest = 1 if len(rows) <= MOST_CANDIDATES else len(rows)
    for count in range(len(rows), fewest - 1, -1):
        yield from map(frozenset, combinations(rows, count))


def _of_parts(model: nn.Module, call: Call, fed: Fed) -> tuple[Trial, tuple[int, ...]]:
    """The model's results for five samples, and for three and two of them, which must be the same; and `Fed.uneven`.

    Raises MixedSamplesError, UnprovenError or NotRunError.
    """
    many = sum(PARTS)
    every = fed.map(lambda x: _distinct(x, many).requires_grad_(x.requires_grad), runnable(call))
    parts = [
        (fed.map(lambda x, lo=lo, n=count: x.detach()[lo : lo + n], every), count)  # type: ignore[misc]
        for lo, count in ((0, PARTS[0]), PARTS)
    ]
    trial = Trial(model, every, many, parts)
    most = min((ROUNDED.get(t, 0.0) for t in trial.types), default=EXACT)
    while True:
        away, what, uneven = _by_parts(trial)
        if uneven or not away <= most:
            (away, what, uneven), most = _by_parts(trial.wide), NARROW if trial.wide.every.narrow else EXACT
        if away <= most:
            return trial, uneven
        if not trial.settle():  # the cause is not that a second call, or one without gradients, differs
            raise MixedSamplesError(what, _mixing(trial))


def _by_parts(trial: Trial) -> tuple[float, str, tuple[int, ...]]:
    """How much the rows of parts differ, relative to the largest number; what differs; and `Fed.uneven`."""
    many, every, parts = trial.samples, trial.every.leaves, [part.leaves for part in trial.others]
    uneven, worst = list[int](), (0.0, "")
    if any(len(part) != len(every) for part in parts):
        return float("inf"), "the number of values that the model returns depends on the number of samples", ()
    for i, (all_rows, *halves) in enumerate(zip(every, *parts, strict=True)):
        tensors = [x for x in halves if isinstance(x, Tensor)]
        if not isinstance(all_rows, Tensor) or len(tensors) < len(halves):
            continue
        if any(x.shape != all_rows.shape for x in tensors):
            dim = _along(all_rows, tensors)
            if dim is None:
                what = (
                    f"output {i} has shape {tuple(all_rows.shape)} for {many} samples but {tuple(tensors[0].shape)} "
                    f"for {PARTS[0]}: each sample must have the same number of rows"
                )
                return float("inf"), what, ()
            away, what = distance(torch.cat(tensors, dim), all_rows), "has rows that change with the other samples"
        elif all_rows.dim():
            away, what = (
                max(distance(x, all_rows) for x in tensors),
                "depends on all samples, and has no row for each sample",
            )
        else:
            away, what = 0.0, ""
            uneven += [i] * (not _is_loss(all_rows, tensors))
        if not away <= worst[0]:
            worst = away, f"output {i}, of shape {tuple(all_rows.shape)}, {what}"
    return *worst, tuple(uneven)


def _is_loss(all_samples: Tensor, parts: Sequence[Tensor]) -> bool:
    """True if a number is the mean or the sum over parts of the samples, or the same for all."""
    numbers = [x.double() for x in parts]
    mean = torch.stack([x * n for x, n in zip(numbers, PARTS, strict=True)]).sum() / sum(PARTS)
    total = torch.stack(numbers).sum()
    return any(distance(x, all_samples, NOTHING) <= ROUNDED[torch.float32] for x in (mean, total))


def _along(whole: Tensor, parts: Sequence[Tensor]) -> int | None:
    """The sample dimension: the only one whose size is proportional to the number of samples."""
    many = sum(PARTS)
    if any(x.dim() != whole.dim() for x in parts):
        return None
    differ = [d for d in range(whole.dim()) if any(x.shape[d] != whole.shape[d] for x in parts)]
    fits = len(differ) == 1 and all(
        whole.shape[differ[0]] * n == x.shape[differ[0]] * many for x, n in zip(parts, PARTS, strict=True)
    )
    return differ[0] if fits else None


def _distinct(x: Tensor, samples: int) -> Tensor:
    """`samples` samples: the example's, and variations of them if it has fewer, or duplicates."""
    rows = list[Tensor]()
    for i in range(samples):
        row = x[i % len(x)].detach()
        again = i >= len(x) or any(torch.equal(row, other) for other in rows)
        rows.append(_another(row, i) if again else row)
    return torch.stack(rows)


def _another(row: Tensor, number: int) -> Tensor:
    """Another sample of the same kind: integers in another order, or 0 and 1."""
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
