"""ParallelOptions, what `parallelize` and `fit` are told seldom; and arguments that are wrong for any model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from layerwise.arguments import Count, Range, Seconds, Seed, checked
from layerwise.comm.base import Comm
from layerwise.cost.compute.roofline import OPTIMIZERS
from layerwise.errors import LayerwiseError
from layerwise.importers.torch.read.arguments import Call
from layerwise.machine.profile import Profile
from layerwise.plan import Plan
from layerwise.quantities import parse_bytes
from layerwise.run.guards.hooks import check_plain
from layerwise.run.options import plan_digest
from layerwise.tensorfile import dtype_name
from layerwise.version import __version__


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelOptions:
    """The options of planning a model and running it in parallel that are needed seldom. All ranks give the same.

        model = layerwise.parallelize(model, x, options=layerwise.ParallelOptions(measure_s=0, seed=7))

    Attributes:
        profile: The machine: a profile, its file or its built-in name. None: these ranks are measured.
        measure_s: Seconds to measure in what `~/.cache/layerwise` does not have yet (0: a built-in profile serves).
        race: So many of the best plans take some steps on these ranks, and the fastest is kept (1: none does). That
            leaves the model as it was.
        effort: How long the plan is improved by its simulated step; quick: not at all.
        local_batch_norm: Statistics are of each rank's own samples, as with DistributedDataParallel.
        sync_every: k, for data parallelism only: gradients travel and the optimizer steps every k-th time, for a batch
            k times as large.
        seed: Of dropout, and of the initial values of a model on the meta device.
        timeout_s: Seconds after which a rank that does not come is named.
        compare_ranks: In some of the first steps and every 100th, ranks that have the same parameters compare a sample
            of them, so that a rank whose loop differs is named.
        samples_together: Whether layers may compute samples together, as a batch Dice and a contrastive loss do: of all
            ranks, as on one device. The first dimension must be samples, not time.
        compare_model: Where a plan runs the layers one by one, the model as it is written computes two samples beside
            them in the training steps 2 and 100, if it was also run when it was imported: a number that it reads
            elsewhere (a clock, the environment) and that has changed is noticed.
        comm: How ranks talk, where torch.distributed is not it (None).

    Examples:
        >>> ParallelOptions(profile="h100", measure_s=0).seed
        0
    """

    profile: Profile | str | os.PathLike[str] | None = None
    measure_s: Seconds = 10.0
    race: Count = 1
    effort: Literal["quick", "normal", "thorough"] = "normal"
    local_batch_norm: bool = False
    sync_every: Count = 1
    seed: Seed = 0
    timeout_s: Annotated[float, Range(0.001)] = 30.0
    compare_ranks: bool = True
    samples_together: bool = False
    compare_model: bool = True
    comm: Comm | None = None


def check(model: object, optimizer: str, memory_limit: float | str | None) -> None:
    """LayerwiseError for the first that will not do."""
    if isinstance(model, torch.nn.Module):
        check_plain(model)
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise LayerwiseError(
            "parallelize is called within torch.autocast, where the model cannot be traced: call it before, and the "
            "model that it returns within"
        )
    if optimizer not in OPTIMIZERS:
        raise LayerwiseError(f"memory is planned for optimizers {', '.join(OPTIMIZERS)}, not for {optimizer!r}")
    if memory_limit is not None:
        parse_bytes(memory_limit, "memory_limit")


def check_autocast(autocast: object, dtype: torch.dtype = torch.float32) -> None:
    """LayerwiseError for a type that autocast does not have, or with a model to which it does nothing."""
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise LayerwiseError(f"autocast is {autocast!r}; it must be torch.bfloat16 or torch.float16")
    if autocast is not None and dtype != torch.float32:
        raise LayerwiseError(
            f"autocast={autocast} plans mixed precision of a float32 model, and this one is {dtype_name(dtype)}: leave "
            "it out"
        )


def check_io(io: object, plan: Plan | None) -> None:
    """LayerwiseError for an io that another argument contradicts."""
    if io is not None and plan is not None and plan.io != io:
        raise LayerwiseError(f"the plan has io {plan.io!r}, not {io!r}: leave io= out")


def facts(plan: Plan | None, call: Call, options: ParallelOptions, arguments: Mapping[str, object]) -> dict[str, str]:
    """Returns what ranks compare before any work, by name."""
    every = {
        "layerwise": __version__,
        "torch": torch.__version__,
        **arguments,
        "sync_every": options.sync_every,
        "local_batch_norm": options.local_batch_norm,
        "race": options.race,
        "samples_together": options.samples_together,
        "measure_s > 0": options.measure_s > 0,
        "profile": "by itself" if options.profile is None else "given",
        "plan": "" if plan is None else plan_digest(plan),
        "example_inputs": ", ".join(filter(None, map(_described, pytree.tree_leaves(call)))),
    }
    return {name: str(value) for name, value in every.items()}


def _described(example: object) -> str:
    return f"{dtype_name(example.dtype)} {list(example.shape)}" if isinstance(example, Tensor) else ""
