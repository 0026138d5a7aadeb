"""ParallelOptions, which few scripts need; and checks of arguments that are wrong for any model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
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
    """The options of `parallelize` and `fit` that few scripts need. Every rank gives the same.

        options = layerwise.ParallelOptions(optimizer="adam", seed=7)
        model = layerwise.parallelize(model, x, options=options)

    Attributes:
        optimizer: The optimizer whose state is planned for: "sgd", "momentum" or "adam". Set it where memory is short:
            Adam's state takes twice the bytes of the parameters.
        io: What each rank feeds. Set "boxes" where no rank can hold a sample: each rank feeds its boxes of the inputs
            (`BoxLoader`), and the model returns its loss. Set "free" where every rank feeds the whole batch and needs
            the full outputs. `example_inputs` then have the whole batch, and may be on the meta device. None: each rank
            feeds its own samples, where it has any.
        shared: The names of inputs that are the same for all samples and on all ranks, such as ("texts",). Set it where
            such an input is as long as the batch and is taken for samples. None: a run of the model finds them.
        verbose: Whether rank 0 prints the plan and its gain, and `fit` a line an epoch. Set False where a program reads
            the output.
        profile: The machine's profile, its file or its built-in name. Set it where another machine is to be planned
            for, or `layerwise measure` has written one. None: these ranks are measured.
        measure_s: The seconds that measuring may take; `~/.cache/layerwise` keeps what it finds. Set 0 in short runs
            and tests, for which a built-in profile is good enough.
        race: The number of the best plans that take some steps on these ranks before the fastest is kept. Set 2 or 3
            where a long training is worth a minute of trials. The model is as before after them.
        effort: How long the plan is improved by its simulated step. Set "quick" (not at all) where planning takes too
            long, and "thorough" for a training of days.
        local_batch_norm: Whether batch norm takes the statistics of each rank's own samples. Set True to continue what
            DistributedDataParallel has trained without SyncBatchNorm.
        seed: The seed of dropout, of `fit`'s order of samples, and of the initial values of a model on the meta device.
            Set it to repeat a training with other random numbers.
        timeout_s: The seconds that ranks wait for one that does not come, before it is named. Set more where a rank
            loads data for long.
        samples_together: Whether layers may compute samples together, over all ranks as on one device. Set True for a
            batch Dice or a contrastive loss; the first dimension must then be samples, not time.
        compare_ranks: Whether ranks with the same parameters compare a sample of them in some of the first steps and
            every 100th, to name a rank whose loop differs. Set False where they differ on purpose.
        compare_model: Whether the model as you wrote it computes two samples beside its layers in steps 2 and 100, to
            notice a number that it reads elsewhere (a clock, the environment). Set False where that takes too long.
        comm: How the ranks talk. Set it where torch.distributed does not start them, as in a test with threads.

    Examples:
        >>> ParallelOptions(profile="h100", measure_s=0).seed
        0
    """

    optimizer: str = "sgd"
    io: Literal["boxes", "free"] | None = None
    shared: Sequence[str] | None = None
    verbose: bool = True
    profile: Profile | str | os.PathLike[str] | None = None
    measure_s: Seconds = 10.0
    race: Count = 1
    effort: Literal["quick", "normal", "thorough"] = "normal"
    local_batch_norm: bool = False
    seed: Seed = 0
    timeout_s: Annotated[float, Range(0.001)] = 30.0
    samples_together: bool = False
    compare_ranks: bool = True
    compare_model: bool = True
    comm: Comm | None = None


DEFAULT = ParallelOptions()
ALIKE = ("optimizer", "io", "local_batch_norm", "race", "samples_together")  # plain options that ranks compare


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


def facts(plan: Plan | None, call: Call, options: ParallelOptions, arguments: Mapping[str, object]) -> dict[str, str]:
    """Returns what ranks compare before any work, by name."""
    every = {
        "layerwise": __version__,
        "torch": torch.__version__,
        **arguments,
        **{name: getattr(options, name) for name in ALIKE},
        "measure_s > 0": options.measure_s > 0,
        "profile": "by itself" if options.profile is None else "given",
        "plan": "" if plan is None else plan_digest(plan),
        "shared": ", ".join(options.shared or ()),
        "example_inputs": ", ".join(filter(None, map(_described, pytree.tree_leaves(call)))),
    }
    return {name: str(value) for name, value in every.items()}


def _described(example: object) -> str:
    return f"{dtype_name(example.dtype)} {list(example.shape)}" if isinstance(example, Tensor) else ""
