"""python -m layerwise.run PLAN: trains the planned network on real data, one process a rank (torchrun starts them)."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from layerwise.api.race import STEPS, WARM_UP, agreed_plans, kept, line, next_best, random_state_kept, timed
from layerwise.checkpoint.reader import SEAL
from layerwise.checkpoint.signals import STOPPED, handled
from layerwise.checkpoint.step_folders import latest
from layerwise.cli import check_files, console, run_main
from layerwise.comm.base import Comm
from layerwise.comm.guard import noted
from layerwise.comm.start import leave, start
from layerwise.comm.together import agree, alone
from layerwise.errors import LayerwiseError
from layerwise.files import check_writable
from layerwise.plan import Plan, load_plan, parse_plan
from layerwise.report import as_json, text
from layerwise.run.compiling import settings_of
from layerwise.run.options import RuntimeOptions, plan_digest, searched_with, uses_local_batch_norm
from layerwise.run.parallel import of
from layerwise.run.step_check import StepCheck
from layerwise.search.rebuild import rebuild, replan
from layerwise.train.compare import ALLOWED, ARITHMETIC
from layerwise.train.flags import parser
from layerwise.train.loop import OPTIMIZERS, Settings
from layerwise.train.report import beginning, ending, steps_shown
from layerwise.train.session import Session, enough_memory

PATIENCE_S = 10.0  # of ranks other than 0, before they report a mistake that all ranks can see


@handled(noted, signal.SIGUSR1)  # outside of the steps there is nothing to save
def main(argv: Sequence[str] | None = None) -> int:
    """Parse, train, print. With several ranks it ends the process, as `layerwise.comm.start.leave` says."""
    try:
        args = parser().parse_args(argv)
        plan = load_plan(args.plan)
        _check(args, plan)
    except LayerwiseError as error:
        if not _first():
            time.sleep(PATIENCE_S)  # rank 0 says the same, and its end is then ours
            _tell(error)  # it is well, and would wait for this rank
        raise
    if _world() == 1:
        return _run(args, plan)
    leave(run_main(lambda _: _hushed(lambda: _run(args, plan)), argv))


def _first() -> bool:
    """True if this is rank 0, the one that speaks."""
    return os.environ.get("RANK", "0") == "0"


def _tell(error: LayerwiseError) -> None:
    """Joins the other ranks only to say what failed here. Nothing where they do not come."""
    with contextlib.suppress(LayerwiseError), start(PATIENCE_S):
        raise error


def _hushed(run: Callable[[], int]) -> int:
    """Ctrl-C interrupts all ranks; one of them says so."""
    try:
        return run()
    except KeyboardInterrupt:
        if _first():
            raise
        return 130


def _run(args: argparse.Namespace, plan: Plan) -> int:
    with start(args.timeout) as comm, contextlib.ExitStack() as memory:
        comm.handshake(_flags(args))
        agree(comm, partial(_check_places, args, comm.rank))
        if args.replan and comm.size != plan.gpus:
            plan = _replanned(args, plan, comm)
        memory.enter_context(enough_memory(plan, comm.rank))
        raced = ""
        if args.race > 1 and comm.size > 1:
            plan, raced = _raced(args, plan, comm)
        session = _session(args, plan, comm)
        resumed = session.resume() if args.resume else None
        steps = args.steps if args.steps is not None else (args.epochs or 1) * session.sampler.per_epoch
        said = list[str]()
        step_check = StepCheck.of(session.plan, said.append) if comm.rank == 0 else None
        of(session.module).step_check = step_check
        if comm.rank == 0:
            lines = [raced] if raced else []
            if args.resume:
                none = f"no checkpoint in {args.checkpoint}: starting anew"
                lines.append(none if resumed is None else f"going on from {resumed}")
            out = console(stderr=args.json)
            out.print(text.parts([beginning(plan, data=session.data_text(), training=session.training_text(steps))]))
            for each in lines:
                out.print(each, soft_wrap=True)
            _trained(args, session, steps)
        else:
            for _ in session.train(steps):
                pass
        if session.stopped:
            return STOPPED
        result = session.finish()
        if comm.rank == 0:
            out = console(stderr=args.json)
            out.print(text.parts([ending(result, ALLOWED[args.dtype], args.dtype)]))
            for note in (*said, *session.notes()):
                out.print(note, soft_wrap=True)
            if args.json:
                told = {"step_check": step_check.outcome} if step_check and step_check.outcome else {}
                print(as_json.text({**result.as_dict(), **told}))
        beyond = result.compare is not None and bool(result.compare.beyond(ALLOWED[args.dtype]))
        return int(comm.broadcast_text(str(int(beyond))))  # rank 0 has compared


def _trained(args: argparse.Namespace, session: Session, steps: int) -> None:
    """Rank 0 trains, and shows each step."""
    where = console(stderr=args.json or sys.stderr.isatty())
    with steps_shown(where, steps, session.first) as show:
        for step in session.train(steps):
            show(step)
    if session.stopped:
        saved = f"SIGTERM: saved {session.latest}, from which --resume goes on; exit status {STOPPED}"
        console(stderr=args.json).print(saved, soft_wrap=True)


def _raced(args: argparse.Namespace, plan: Plan, comm: Comm) -> tuple[Plan, str]:
    """--race: the fastest of the plan and those next to it in its search; what to say.

    Each is a session of its own, which begins as the training will and leaves nothing behind.
    """
    left_out = {"checkpoint": None, "checkpoint_every": None, "trace": None, "compare_single": False}
    alike = argparse.Namespace(**{**vars(args), **left_out})

    def steps_s(other: Plan) -> list[float]:
        return [step.seconds for step in _session(alike, other, comm).train(WARM_UP + STEPS)]

    def others() -> list[Plan]:
        model, space = rebuild(plan, args.model, args.profile)
        return next_best(plan, model, space, args.race - 1)

    plans = agreed_plans(comm, lambda: [plan, *others()])
    with random_state_kept(comm.device):
        winner, runs = timed(plans, comm, steps_s)
    return kept(plans[winner], runs), line(winner, runs, "whole steps")


def _session(args: argparse.Namespace, plan: Plan, comm: Comm) -> Session:
    return Session(
        plan,
        comm,
        RuntimeOptions(
            comm.device,
            *ARITHMETIC[args.dtype],
            args.seed,
            uses_local_batch_norm(plan, args.local_batch_norm),
            recompute=args.checkpoint_activations,
            compile=settings_of(args.compile),
        ),
        Settings(_optimizer(args, plan), args.lr, args.momentum, args.weight_decay, args.clip_norm, args.accumulate),
        data=args.data,
        model=args.model,
        weights=args.weights,
        compare=args.compare_single,
        folder=args.checkpoint,
        every=args.checkpoint_every,
        on_nan=args.on_nan,
        trace=args.trace,
    )


def _world() -> int:
    """The number of ranks, as torchrun says."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _replanned(args: argparse.Namespace, plan: Plan, comm: Comm) -> Plan:
    """--replan: the plan that rank 0 finds for the ranks there are, while the others wait, however long that takes."""
    comm.handshake({"plan": plan_digest(plan)})
    each = int(os.environ.get("LOCAL_WORLD_SIZE", str(comm.size)))
    again = partial(replan, plan, comm.size, each, model=args.model, profile=args.profile)
    found = alone(comm, again)
    return parse_plan(comm.broadcast_text("" if found is None else found.dumps()), "the plan of rank 0")


def _check(args: argparse.Namespace, plan: Plan) -> None:
    """LayerwiseError for what is wrong whatever the other ranks say, before they are waited for."""
    if searched_with(plan, "kind") == "inference":
        raise LayerwiseError(
            f"the plan {args.plan} was searched with --inference, and layerwise.run trains: search again without it"
        )
    world = _world()
    if world != plan.gpus and not args.replan:
        raise LayerwiseError(
            f"the plan is for {plan.gpus} ranks, there {'is' if world == 1 else 'are'} {world}: start them with "
            f"torchrun --nproc-per-node {plan.gpus} -m layerwise.run {args.plan}, search again, or give --replan"
        )
    if args.profile is not None and not (args.replan or args.race > 1):
        raise LayerwiseError(
            "--profile names the machine of a new search: give it with --replan or --race, or leave it out"
        )
    if args.checkpoint is None and (args.resume or args.checkpoint_every is not None):
        raise LayerwiseError("--resume and --checkpoint-every need --checkpoint DIR")
    if args.checkpoint == "":
        raise LayerwiseError("--checkpoint is empty: name a folder")
    if args.compare_single and uses_local_batch_norm(plan, args.local_batch_norm):
        raise LayerwiseError(
            "local batch norm has other statistics than one device: leave out --compare-single, or give "
            "--no-local-batch-norm"
        )
    if args.compare_single:  # TF32 rounds to 10 bits, and differently for products of different shapes
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def _flags(args: argparse.Namespace) -> dict[str, str]:
    """Returns the flags that every rank must be given alike.

    Not --json, which is rank 0's, nor the names of files, whose contents are compared.
    """
    said = {True: "yes", False: "no", None: ""}
    own = ("plan", "weights", "json")
    return {
        f"--{name.replace('_', '-')}": said[value] if value is None or isinstance(value, bool) else str(value)
        for name, value in vars(args).items()
        if name not in own
    }


def _check_places(args: argparse.Namespace, rank: int) -> tuple[None, None]:
    """Raises LayerwiseError, before the training, if rank 0 could not write, or would write among another run's."""
    if rank == 0:
        check_files({"--trace": args.trace})
    if rank == 0 and args.checkpoint is not None:
        try:
            Path(args.checkpoint).mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error  # ValueError: a path with a NUL
            raise LayerwiseError(f"--checkpoint {args.checkpoint}: {reason}") from error
        check_writable(Path(args.checkpoint) / SEAL)
        if not args.resume and (saved := latest(args.checkpoint)) is not None:
            raise LayerwiseError(
                f"--checkpoint {args.checkpoint} has a checkpoint already ({saved.name}), and one of this run would be "
                "taken for its next: go on from it with --resume, or name another folder"
            )
    return None, None


def _optimizer(args: argparse.Namespace, plan: Plan) -> str:
    if args.optimizer is not None:
        return str(args.optimizer)
    planned = searched_with(plan, "optimizer")
    return str(planned) if planned in OPTIMIZERS else "sgd"
