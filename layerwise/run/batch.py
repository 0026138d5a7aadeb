"""Batch: how many samples all ranks feed in one call of the model, as they tell each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from layerwise.plan import Plan
from layerwise.run.execute.reducer import GradientReducer
from layerwise.run.guards.compare_ranks import RankComparison, looks
from layerwise.run.local_tensor import digest as digest_of
from layerwise.run.schedule.schedule import samples


class Batch:
    """The samples of one call of the model. All ranks make one, in the same calls.

    What the ranks have been given travels while they compute; `total` waits for it.
    """

    def __init__(
        self,
        plan: Plan,
        comm: Comm,
        fed: int,
        given: int | None,
        sizes: tuple[tuple[int, ...], ...] | None = None,
        *,
        as_planned: bool = True,
        training: bool | None = None,
        alike: RankComparison | None = None,
        step: int = 0,
        gradients: GradientReducer | None = None,
        shared: Sequence[Tensor] = (),
    ) -> None:
        """fed: this rank's samples. given: `batch=`, or None. sizes: what all ranks must have alike, if anything.

        as_planned: each must feed its share of the batch, because the plan moves samples between ranks. training: the
        mode, where all must have one. alike: what else the ranks compare in a training `step` (0: none). gradients: of
        whose last backward pass the ranks tell each other. shared: inputs that are the same for all samples.
        """
        self._plan, self._comm, self._sizes, self._as_planned = plan, comm, sizes, as_planned
        self._agreement: tuple[int, slice] | None = None
        digest = 0 if sizes is None else hash(sizes)  # of whole numbers: alike in all processes
        report = 0 if gradients is None else gradients.report
        values = sum((i + 1) * digest_of(x) for i, x in enumerate(shared)) if alike and looks(step) else 0
        told = fed, given or 0, digest, int(bool(training)), report, values
        self._told = comm.tell((*told, *(alike.numbers(step) if alike else ())))
        self._alike, self._gradients = alike, gradients

    @property
    def total(self) -> int:
        """Returns the samples of all ranks. LayerwiseError, on each, where one has another number than its share."""
        return self._agreed()[0]

    @property
    def share(self) -> slice:
        """Returns this rank's samples of those of all."""
        return self._agreed()[1]

    def _agreed(self) -> tuple[int, slice]:
        # No cached_property: until Python 3.12 ranks that are threads share its lock, and this communicates.
        if self._agreement is None:
            self._agreement = self._checked()
        return self._agreement

    def _checked(self) -> tuple[int, slice]:
        rows = self._told()
        columns = zip(*(row[:6] for row in rows), strict=True)
        counts, given, sizes, modes, reports, values = (list(column) for column in columns)
        if len(set(modes)) > 1:
            which = [rank for rank, training in zip(self._comm.members.ranks, modes, strict=True) if training]
            raise LayerwiseError(
                f"the model is in training mode on ranks {_listed(which)} and in evaluation mode on the others: call "
                "train() or eval() on all of them"
            )
        if self._alike is not None:
            self._alike.check([row[6:] for row in rows])
        if self._gradients is not None:
            self._gradients.hear(reports)
        if len(set(given)) > 1:
            reported = ", ".join(f"batch={number}" if number else "no batch=" for number in given)
            raise LayerwiseError(
                f"the ranks called the model with {reported}: give all of them the number of samples that they have "
                "together, or none"
            )
        if len(set(sizes)) > 1:
            shapes = sorted(set(self._comm.all_gather_text(str(self._sizes))))
            raise LayerwiseError(
                f"the ranks were given samples of unlike shapes, {' and '.join(shapes)}: pad all of a batch alike"
            )
        if len(set(values)) > 1:
            raise LayerwiseError(
                "an input that is the same for all samples, such as the texts of classes, has other values on some "
                "ranks: give all of it to every rank; if it has a row a sample, the model compares samples with each "
                "other, which a plan does not"
            )
        free = self._plan.io != "sample"
        fed = counts[0] if free else sum(counts)
        total = given[0] or fed
        any_will_do = total == fed and not self._as_planned
        slices = self._one_after_the_other(counts) if any_will_do else samples(self._plan, total)
        shares = [share.stop - share.start for share in slices]
        if not free and total < len(counts):
            raise LayerwiseError(
                f"a batch of {total} samples does not give each of {len(counts)} ranks one: leave it out "
                "(drop_last=True), or pad it"
            )
        if counts != shares or not all(counts):
            each = f"their shares of a batch of {total} are {_listed(shares)}"
            raise LayerwiseError(
                f"the ranks were given {_listed(counts)} samples, and {'all must feed the same' if free else each}: "
                "give each rank x[model.share(B)], where B is the number of samples of all ranks (model(..., batch=B))"
                + (", as layerwise.split(loader, model) does" if self._plan.shares else "")
            )
        return total, slices[self._comm.rank]

    def _one_after_the_other(self, counts: list[int]) -> tuple[slice, ...]:
        """Returns slices of as many samples as each rank has, in the order of the plan's devices."""
        order = self._plan.device_order
        ends = dict(zip(order, accumulate(counts[rank] for rank in order), strict=True))
        return tuple(slice(ends[rank] - count, ends[rank]) for rank, count in enumerate(counts))


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
