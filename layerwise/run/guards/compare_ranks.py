"""RankComparison: checks that ranks with the same parameters still have the same values.

Each rank runs its own loop: a learning rate, clipping or step that differs on one rank would silently train another
model there. An all-reduce gives all ranks the same bits, and equal hardware computes the same bits from them. There
values are compared bit by bit, elsewhere up to rounding.
"""

from __future__ import annotations

import hashlib
import platform
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from layerwise.comm.base import Members, ranks
from layerwise.errors import LayerwiseError
from layerwise.partition.groups import Group
from layerwise.run.local_tensor import local_tensor

EVERY = 100  # steps, and every power of two: most mistakes are there from the beginning
ELEMENTS = 64  # compared, of each parameter
OF_UPDATE = 1e-2  # share of the change since the last look that may be rounding, as of products in 16 bits
FLIPS = 10.0  # times the random rounding of as many steps
SINGLE = torch.finfo(torch.float32).eps
COLUMNS = 4  # numbers a rank tells for each set of ranks


def hardware() -> int:
    """Returns a number for this process's hardware: where it is equal, the same input gives the same bits."""
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    gpu = torch.cuda.get_device_name() if used else ""
    capability, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    return _digest(f"{_processor()} {capability} {threads} {gpu}".encode())


@cache
def _processor() -> str:
    """Returns the processor's name (the host's, if Linux does not tell)."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
            return next(line for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.node()


def _digest(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)


def looks(step: int) -> bool:
    """True if ranks compare their values in this training step (0: none)."""
    return step > 0 and not (step % EVERY and step & (step - 1))


class RankComparison:
    """The numbers by which ranks that hold the same boxes of parameters compare a sample of them.

    For each such set of ranks there is a digest of the values. Ranks of different hardware need not have equal bits, so
    there are also the sum of the changes since the last look with random signs, the rounding that is allowed, and a
    part of the norm of the changes. These numbers travel with the numbers of samples.
    """

    def __init__(self, parameters: Mapping[str, Tensor], sharing: Mapping[str, Sequence[Group]], who: Members) -> None:
        """sharing: for each trained parameter and every rank, the ranks that hold the same box."""
        self._parameters, self._who = parameters, who
        self._sets: dict[tuple[Group, ...], list[str]] = {}
        for name, groups in sorted(sharing.items()):  # in the same order on every rank
            if any(len(group) > 1 for group in groups):
                self._sets.setdefault(tuple(groups), []).append(name)
        self._before: dict[tuple[Group, ...], Tensor] = {}
        self._looked = 0  # the step of the last look

    def numbers(self, step: int) -> tuple[int, ...]:
        """Returns the step (0: none), the hardware, and then the numbers of each set of ranks, or zeros."""
        if not looks(step):
            return (step, 0, *[0] * (COLUMNS * len(self._sets)))
        told = [x for groups, names in self._sets.items() for x in self._look(groups, names, step)]
        self._looked = step
        return (step, hardware(), *told)

    @torch.no_grad()
    def _look(self, groups: tuple[Group, ...], names: Sequence[str], step: int) -> tuple[int, ...]:
        parts = [local_tensor(self._parameters[name]).detach() for name in names]
        flats = [part.reshape(-1) for part in parts if part.numel()]
        if not flats:
            return (0,) * COLUMNS
        sample = torch.cat([flat[:: max(1, len(flat) // ELEMENTS)][:ELEMENTS] for flat in flats])
        coarse = max(torch.finfo(flat.dtype).eps for flat in flats)
        now = torch.view_as_real(sample).flatten() if sample.is_complex() else sample
        now = now.double().cpu().nan_to_num(0.0, 0.0, 0.0) + 0.0  # no -0.0
        before = self._before.get(groups)
        first = before is None or before.shape != now.shape
        change = now if first or before is None else now - before
        self._before[groups] = now
        signs = torch.randint(2, now.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
        rounding = FLIPS * (max(step - self._looked, 1) * coarse * min(coarse, SINGLE)) ** 0.5 * float(now.norm())
        numbers = float(change @ signs.double()), rounding, 0.0 if first else OF_UPDATE * float(change.norm())
        return (_digest(now.numpy().tobytes()), *struct.unpack("<3q", struct.pack("<3d", *numbers)))

    def check(self, told: Sequence[Sequence[int]]) -> None:
        """Raises LayerwiseError, on every rank, if one rank differs. told: `numbers` of every rank."""
        steps = np.array([row[0] for row in told])
        if (steps != steps[0]).any():
            self._refuse(steps[:, None] == steps, tuple(range(len(self._who))), "is in another step", steps)
        if not any(map(any, (row[1:] for row in told))):
            return
        made_by = np.array([row[1] for row in told])
        for first, groups in zip(range(2, 2 + COLUMNS * len(self._sets), COLUMNS), self._sets, strict=True):
            rows = np.array([row[first : first + COLUMNS] for row in told], np.int64)
            for group in dict.fromkeys(group for group in groups if len(group) > 1):
                digests, (total, rounding, change) = rows[list(group), 0], rows[list(group), 1:].view(np.float64).T
                allowed = np.maximum.outer(rounding, rounding) + np.maximum.outer(change, change)
                close = np.abs(np.subtract.outer(total, total)) <= allowed
                exact = np.equal.outer(made_by[list(group)], made_by[list(group)])
                agree = np.where(exact, np.equal.outer(digests, digests), close)
                self._refuse(agree, group, "has other parameters", steps)

    def _refuse(self, agree: np.ndarray, group: Group, what: str, steps: np.ndarray) -> None:
        """Raises LayerwiseError if some do not agree with the rank that most agree with."""
        most = int(agree.sum(1).argmax())
        others = [rank for rank, same in zip(group, agree[most], strict=True) if not same]
        if others:
            rank, names = others[0], self._who.ranks
            raise LayerwiseError(
                f"{ranks([names[rank]], self._who)} {what} than rank {names[group[most]]}, when it begins step "
                f"{steps[rank]}: their loops differ in learning rate, optimizer, clipping, loaded values or a skipped "
                "step. Run the same loop on every rank; if ranks are meant to differ, pass "
                "ParallelOptions(compare_ranks=False)"
            )
