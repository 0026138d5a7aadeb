"""Batch: how many samples all ranks feed in one call of the model; the ranks tell each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from layerwise.plan import Plan
from layerwise.run.execute.reducer import GradientReducer
from layerwise.run.guards.compare_ranks import RankComparison
from layerwise.run.local_tensor import digest as digest_of
from layerwise.run.schedule.schedule import samples


class Batch:
    """The samples of one call of the model. Every rank makes one in each call.

    The counts travel while the ranks compute; `total` waits for them.
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
        full: Sequence[Tensor] = (),
    ) -> None:
        """fed: this rank's samples. given: the argument `batch=`, or None. sizes: shapes that must be equal on all
        ranks, if any.

        as_planned: each rank must feed its share of the batch, because the plan moves samples between ranks. training:
        the mode, if all ranks must have the same. alike: what else the ranks compare in a training `step` (0: none).
        gradients: the reducer whose last backward pass the ranks report to each other. full: inputs whose values must
        be equal on all ranks, if that is compared in this call.
        """
        self._plan, self._comm, self._sizes, self._as_planned = plan, comm, sizes, as_planned
        self._agreement: tuple[int, slice] | None = None
        digest = 0 if sizes is None else hash(sizes)  # a hash of integers is the same in all processes
        report = 0 if gradients is None else gradients.report
        values = sum((i + 1) * digest_of(x) for i, x in enumerate(full))
        told = fed, given or 0, digest, int(bool(training)), report, values
        self._told = comm.tell((*told, *(alike.numbers(step) if alike else ())))
        self._alike, self._gradients = alike, gradients

    @property
    def total(self) -> int:
        """Returns the samples of all ranks. Raises LayerwiseError, on every rank, if one does not feed its share."""
        return self._agreed()[0]

    @property
    def share(self) -> slice:
        """Returns this rank's samples as a slice of the samples of all ranks."""
        return self._agreed()[1]

    def _agreed(self) -> tuple[int, slice]:
        # No cached_property: until Python 3.12 ranks that are threads would share its lock, and this communicates.
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
                "train() or eval() on all ranks"
            )
        if self._alike is not None:
            self._alike.check([row[6:] for row in rows])
        if self._gradients is not None:
            self._gradients.hear(reports)
        if len(set(given)) > 1:
            reported = ", ".join(f"batch={number}" if number else "no batch=" for number in given)
            raise LayerwiseError(
                f"the ranks called the model with {reported}: pass batch= on every rank, with the number of samples of "
                "all ranks together, or on none"
            )
        if len(set(sizes)) > 1:
            shapes = sorted(set(self._comm.all_gather_text(str(self._sizes))))
            raise LayerwiseError(
                f"the ranks fed samples of different shapes, {' and '.join(shapes)}: pad every sample of a batch to "
                "the same shape"
            )
        free = self._plan.io != "sample"
        if len(set(values)) > 1:
            raise LayerwiseError(
                "the ranks feed different values, but each must feed the same full inputs: draw or load them alike on "
                "every rank, or broadcast those of rank 0 (torch.distributed.broadcast)"
                if free
                else "an input that all samples share, such as the texts of classes, has different values on some "
                "ranks: pass the full input to every rank. If it has a row for each sample, the model compares samples "
                "with each other, which layerwise does not support"
            )
        fed = counts[0] if free else sum(counts)
        total = given[0] or fed
        any_will_do = total == fed and not self._as_planned
        slices = self._one_after_the_other(counts) if any_will_do else samples(self._plan, total)
        shares = [share.stop - share.start for share in slices]
        if not free and total < len(counts):
            raise LayerwiseError(
                f"a batch of {total} samples leaves some of {len(counts)} ranks without one: drop it (drop_last=True) "
                "or pad it"
            )
        if counts != shares or not all(counts):
            each = f"their shares of a batch of {total} are {_listed(shares)}"
            raise LayerwiseError(
                f"the ranks fed {_listed(counts)} samples, but {'all must feed the same number' if free else each}: "
                "feed x[model.share(B)] on each rank, where B is the number of samples of all ranks (model(..., "
                "batch=B))" + (", as layerwise.split(loader, model) does" if self._plan.shares else "")
            )
        return total, slices[self._comm.rank]

    def _one_after_the_other(self, counts: list[int]) -> tuple[slice, ...]:
        """Returns each rank's slice of the batch: as many samples as it feeds, in the order of the plan's devices."""
        order = self._plan.device_order
        ends = dict(zip(order, accumulate(counts[rank] for rank in order), strict=True))
        return tuple(slice(ends[rank] - count, ends[rank]) for rank, count in enumerate(counts))


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
