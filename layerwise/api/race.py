"""The race: the best plans take some steps on the real ranks, and the fastest is kept. Measured beats modelled.

A plan runs on copies of the model's tensors, with gradients but no optimizer; the model and all random numbers are as
before.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from layerwise.api.planner import Choice
from layerwise.comm.base import Comm
from layerwise.comm.together import alone
from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel
from layerwise.errors import LayerwiseError
from layerwise.importers.load import Network, planned_shape
from layerwise.importers.torch.read.arguments import Call
from layerwise.plan import Plan, parse_plan
from layerwise.quantities import units
from layerwise.run.load import build_module
from layerwise.run.options import RuntimeOptions
from layerwise.run.parallel import ParallelModule, of
from layerwise.search.find import search
from layerwise.search.make_plan import make_plan
from layerwise.search.rebuild import memory_limit, offered
from layerwise.search.result import Candidate, SearchResult

WARM_UP, STEPS = 2, 5


@dataclass(frozen=True, slots=True)
class RaceRun:
    """A plan's step: predicted, and measured on the slowest rank: the median, and how far off it steps usually are."""

    chosen: str
    predicted_s: float
    measured_s: float
    error_s: float

    def beats(self, other: RaceRun) -> bool:
        """True if it is faster by more than both are uncertain."""
        return self.measured_s + self.error_s + other.error_s < other.measured_s


def contenders(choice: Choice, count: int) -> list[Choice]:
    """Returns the plan that was chosen, and the next best of its search."""
    result = choice.searched
    if result is None:
        raise LayerwiseError("race= compares the plans of a search: leave strategy= out")
    name, profile, order = choice.plan.model, str(choice.plan.provenance["profile"]), choice.plan.device_order
    choices = [choice]
    for other in runners_up(result, count - 1):
        plan = make_plan(name, profile, choice.best.model, choice.space, replace(result, best=other), fused=True)
        choices.append(replace(choice, plan=replace(plan, device_order=order), best=other))
    return choices


def next_best(plan: Plan, model: CostModel, space: SearchSpace, count: int) -> list[Plan]:
    """Returns the plans next to one in its search, which is repeated."""
    p = plan.provenance
    limit = memory_limit(plan, model)
    result = search(model, space, memory_limit_bytes=limit, offer=offered(plan))
    shape, profile = planned_shape(p.get("input_shape")), str(p["profile"])
    plans = [
        make_plan(plan.model, profile, model, space, replace(result, best=c), fused=plan.fused, input_shape=shape)
        for c in [result.best, *runners_up(result, count)]
    ]
    return [other for other in plans if other.strategy != plan.strategy][:count]


def runners_up(result: SearchResult, count: int) -> list[Candidate]:
    """Returns the plans of a search next to its best that fit into memory, the fastest by simulated time first."""
    fitting = [c for c in result.simulated if c.fits and c.key != result.best.key]
    return sorted(fitting, key=lambda c: c.timeline.total_s)[:count]


def agreed_plans(comm: Comm, make: Callable[[], list[Plan]]) -> list[Plan]:
    """Returns the plans that rank 0 makes, on every rank."""
    texts = comm.broadcast_text(json.dumps([plan.dumps() for plan in alone(comm, make) or ()]))
    return [parse_plan(text, "rank 0's plan") for text in json.loads(texts)]


def timed(plans: Sequence[Plan], comm: Comm, steps_s: Callable[[Plan], list[float]]) -> tuple[int, list[RaceRun]]:
    """Returns the fastest plan, of ties the first, and every plan's step: the same on all ranks, which call it alike.

    steps_s: seconds of this rank's steps of a plan.
    """
    runs = []
    for plan in plans:
        slowest = [max(step) for step in zip(*comm.all_gather_object(steps_s(plan)), strict=True)]
        measured_s = statistics.median(slowest[WARM_UP:])
        error_s = statistics.median(abs(step - measured_s) for step in slowest[WARM_UP:])
        runs.append(RaceRun(str(plan.provenance["chosen"]), plan.predicted["timeline_s"], measured_s, error_s))
    winner = 0
    for number, run in enumerate(runs):
        winner = number if run.beats(runs[winner]) else winner
    return winner, runs


def race(
    plans: Sequence[Plan],
    network: Network,
    comm: Comm,
    options: RuntimeOptions,
    call: Call,
    *,
    training: bool,
    autocast: torch.dtype | None = None,
) -> tuple[int, list[RaceRun]]:
    """Returns what `timed` does, by forward and backward passes on copies of the network's tensors.

    call: what one rank calls the model with; its samples are taken as often as a plan needs. autocast: of the
    torch.autocast around it.
    """
    copied = replace(network, itself=False, built={}, stored={n: _copied(read) for n, read in network.stored.items()})

    def steps_s(plan: Plan) -> list[float]:
        module = build_module(plan, copied, comm, replace(options, compare_ranks=False, compare_model=False))
        return _steps_s(module.train(training), call, training, autocast)

    with random_state_kept(options.device):
        return timed(plans, comm, steps_s)


def kept(plan: Plan, runs: Sequence[RaceRun]) -> Plan:
    """Returns the plan, with the race in its provenance."""
    return replace(plan, provenance={**plan.provenance, "race": [asdict(run) for run in runs]})


def line(winner: int, runs: Sequence[RaceRun], what: str = "forward and backward, without the optimizer") -> str:
    """Returns what a user is told of a race. what: was measured."""
    said = (
        f"{run.chosen} {units(run.measured_s, 's')} a step measured, {units(run.predicted_s, 's')} predicted"
        for run in runs
    )
    why = "the predicted best" if winner == 0 else f"number {winner + 1} by prediction"
    if min(runs, key=lambda run: run.measured_s) is not runs[winner]:
        why += ", as another is faster by less than their steps vary"
    return f"race ({what}): {'; '.join(said)}: kept {why}"


def _copied(read: Callable[[], object]) -> Callable[[], object]:
    def copy() -> object:
        value = read()
        return value.detach().clone() if isinstance(value, Tensor) else value

    return copy


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Keeps the random state: within it, random numbers are drawn that nobody misses."""
    python, numpy = random.getstate(), np.random.get_state()
    used = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(used, device_type=device.type):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _steps_s(module: ParallelModule, call: Call, training: bool, autocast: torch.dtype | None) -> list[float]:
    """Returns the seconds of this rank's steps."""
    share = of(module).share()
    positional, named = _resized(
        call, share.stop - share.start if of(module).plan.io == "sample" else of(module).plan.batch, module
    )
    seconds = list[float]()
    mixed = nullcontext() if autocast is None else torch.autocast(of(module).device.type, autocast)
    for _ in range(WARM_UP + STEPS):
        of(module).comm.barrier()
        began = time.perf_counter()
        with mixed, nullcontext() if training else torch.inference_mode():
            outputs = module(*positional, **named)
        if training:
            made = [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor) and x.requires_grad]
            sum(x.float().mean() for x in made).backward()  # type: ignore[union-attr]
            module.zero_grad()
        if of(module).device.type == "cuda":
            torch.cuda.synchronize(of(module).device)
        seconds.append(time.perf_counter() - began)
    return seconds


def _resized(call: Call, samples: int, module: ParallelModule) -> Call:
    """Returns the call with so many samples, on the module's device."""
    tensors = [x for x in pytree.tree_leaves(call) if isinstance(x, Tensor)]
    count = tensors[0].shape[0]

    def resized(x: Tensor) -> Tensor:
        x = torch.zeros(x.shape, dtype=x.dtype) if x.is_meta else x.detach()
        if x.dim() and x.shape[0] == count:
            x = x[torch.arange(samples, device=x.device) % count]
        return x.to(of(module).device)

    resized_call: Call = pytree.tree_map_only(Tensor, resized, call)
    return resized_call
