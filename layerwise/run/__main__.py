"""python -m layerwise.run PLAN: trains the planned network on real data, one process a rank (torchrun starts them)."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence

import torch

from layerwise.api.race import STEPS, WARM_UP, agreed_plans, kept, line, next_best, timed
from layerwise.cache import answers
from layerwise.checkpoint.step_folders import sole_writer
from layerwise.cli import MODEL_HELP, Parser, check_files, console, count, global_batch, positive, run_main
from layerwise.comm.base import Comm
from layerwise.comm.start import leave, start
from layerwise.comm.together import agree
from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel, CostOptions
from layerwise.errors import LayerwiseError
from layerwise.files import write_text
from layerwise.graph.fuse import fuse
from layerwise.importers.load import load_model
from layerwise.machine import DEFAULT, precision
from layerwise.machine import load as load_profile
from layerwise.plan import Plan, load_plan
from layerwise.report import as_json, html, text
from layerwise.report.content import Lines, Picture, Report, Table
from layerwise.report.figures import svg
from layerwise.run.compiling import settings_of
from layerwise.run.options import RuntimeOptions, searched_with, uses_local_batch_norm
from layerwise.run.trace import Trace
from layerwise.search.baselines import grid_strategy, parse_grid
from layerwise.search.find import candidate
from layerwise.search.make_plan import make_plan
from layerwise.search.rebuild import rebuild, replan
from layerwise.train import compare_times, data
from layerwise.train.compare import ALLOWED, ARITHMETIC
from layerwise.train.loop import OPTIMIZERS, Settings
from layerwise.train.report import Result, beginning, check_tensorboard, ending, scalars, steps_shown
from layerwise.train.session import Session, enough_memory

PATIENCE_S = 10.0  # of ranks other than 0, before they report a mistake that all ranks can see

EPILOG = """examples:
  python -m layerwise.search lenet5 --gpus 2 --global-batch 64 --out plan.json
  torchrun --nproc-per-node 2 -m layerwise.run plan.json --data mnist5k
      search first, then train with as many processes as the plan has GPUs
  torchrun --nproc-per-node 2 -m layerwise.run plan.json --dtype float64 \\
      --steps 10 --compare-single
      the same ten steps on one device, and how far the numbers are apart
  torchrun --nproc-per-node 2 -m layerwise.run plan.json \\
    --checkpoint ck --resume
      goes on where it was stopped, also with another plan or number of ranks
  torchrun --nproc-per-node 2 -m layerwise.run plan.json \\
    --steps 5 --trace t.json
      what every rank does when: open t.json in ui.perfetto.dev
  torchrun --nproc-per-node 4 -m layerwise.run mlp:64x256x256x10 --grid 2x2
      an MLP on a process grid: two batch groups, each layer cut in two parts

NCCL carries the tensors where every rank has a GPU, else gloo. A plan for one
GPU needs no torchrun. Which samples a step takes, and all random numbers,
depend on --seed alone, not on the plan."""


def parser() -> argparse.ArgumentParser:
    """The flags."""
    p = Parser(
        prog="layerwise run",
        description=(
            "Trains a planned network with the numbers of one device: every rank\ncomputes its part of every layer."
        ),
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("plan", metavar="PLAN.json", help="written by layerwise search --out; with --grid a model")
    p.add_argument("--model", metavar="MODEL", help=MODEL_HELP)
    p.add_argument(
        "--replan", action="store_true", help="on another number of ranks than the plan's, search again for these"
    )
    g = p.add_argument_group("process grid, instead of a plan")
    g.add_argument("--grid", metavar="RxC", help="of an MLP: samples over R groups of ranks, outputs over C parts")
    g.add_argument("--global-batch", type=count, metavar="B", help="samples a batch (default: 32 a rank)")
    g.add_argument(
        "--gpu", "--profile", dest="profile", metavar="NAME", help=f"to predict with (default: {DEFAULT}, or cpu)"
    )
    g = p.add_argument_group("training")
    g.add_argument("--data", default="digits", metavar="NAME", help=f"{data.HELP} (default: digits)")
    length = g.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=count, metavar="E", help="times through the data (default: 1)")
    length.add_argument("--steps", type=count, metavar="N", help="steps in all, those before --resume included")
    g.add_argument("--optimizer", choices=list(OPTIMIZERS), help="default: the one that the plan was searched for")
    usual = ", ".join(f"{name} {lr:g}" for name, lr in OPTIMIZERS.items())
    g.add_argument("--lr", type=positive, metavar="RATE", help=f"learning rate (default: {usual})")
    g.add_argument("--momentum", type=_fraction, default=0.9, metavar="M", help="of momentum (default: 0.9)")
    g.add_argument("--weight-decay", type=_fraction, default=0.0, metavar="W", help="default: 0")
    g.add_argument("--clip-norm", type=positive, metavar="NORM", help="largest norm of the gradient (default: any)")
    g.add_argument(
        "--accumulate", type=count, default=1, metavar="K", help="batches a step; gradients travel once (default: 1)"
    )
    g.add_argument(
        "--race", type=count, default=1, metavar="K", help="try the K best plans of the plan's search, keep the fastest"
    )
    g.add_argument("--seed", type=int, default=0, help="of initial values, order of samples, dropout (default: 0)")
    g.add_argument(
        "--on-nan",
        choices=("stop", "skip", "ignore"),
        default="stop",
        help="where the loss is no finite number: stop, leave the step out, or go on (default: stop)",
    )
    g.add_argument("--weights", metavar="FILE.safetensors", help="initial values: the model's state dict")
    _add_how_it_runs(p)
    return p


def _add_how_it_runs(p: Parser) -> None:
    """The flags of arithmetic, checkpoints and output."""
    g = p.add_argument_group("arithmetic")
    g.add_argument(
        "--dtype",
        type=precision,
        choices=list(ALLOWED),
        default="float32",
        help="bf16: mixed precision, float32 parameters (default: float32)",
    )
    g.add_argument(
        "--local-batch-norm",
        action=argparse.BooleanOptionalAction,
        help="statistics of each rank's own samples, as DDP has them (default: what the plan was searched with)",
    )
    g.add_argument("--compile", action="store_true", help="torch.compile of what each rank computes by itself")
    g.add_argument(
        "--checkpoint-activations",
        action="store_true",
        help="recompute all layers that hold less so, whatever the plan says",
    )
    g = p.add_argument_group("checkpoints")
    g.add_argument("--checkpoint", metavar="DIR", help="save model and optimizer there, at the end at least")
    g.add_argument(
        "--checkpoint-every",
        type=_every,
        metavar="N",
        help="also every N steps, or auto: as often as failures make it worth it",
    )
    g.add_argument(
        "--mtbf", type=positive, default=24.0, metavar="H", help="hours between failures, for auto (default: 24)"
    )
    g.add_argument("--resume", action="store_true", help="go on from the last checkpoint in DIR, if there is one")
    g = p.add_argument_group("output")
    g.add_argument("--compare-single", action="store_true", help="the same steps on one device; exit 1 if they differ")
    g.add_argument(
        "--compare", action="store_true", help="predicted beside measured times, by layer, and why they differ"
    )
    g.add_argument("--trace", metavar="FILE.json", help="write a Chrome trace of every rank")
    g.add_argument("--tensorboard", metavar="DIR", help="write each step's loss and times as scalars of TensorBoard")
    g.add_argument("--json", action="store_true", help="the result for programs on stdout, the rest on stderr")
    g.add_argument("--html", metavar="FILE.html", help="write the result as a page that needs no other file, too")
    g.add_argument(
        "--timeout", type=positive, default=30.0, metavar="S", help="seconds to wait for another rank (default: 30)"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, train, print. With several ranks it ends the process, as `layerwise.comm.start.leave` says."""
    try:
        args = parser().parse_args(argv)
        plan = _grid(args) if args.grid is not None else _planned(args)
        _check(args, plan)
    except LayerwiseError as error:
        if not _first():
            time.sleep(PATIENCE_S)  # rank 0 says the same, and its end is then ours
            _tell(error)  # it is well, and would wait for this rank
        raise
    if plan.gpus == 1:
        return _run(args, plan)
    leave(run_main(lambda _: _hushed(lambda: _run(args, plan)), argv))


def _first() -> bool:
    """Whether this is rank 0, the one that speaks."""
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
    with start(args.timeout) as comm, enough_memory(plan, comm.rank), contextlib.ExitStack() as places:
        comm.handshake(_flags(args))
        agree(comm, lambda: (_take_places(args, comm.rank, places), None))
        raced = ""
        if args.race > 1 and comm.size > 1:
            plan, raced = _raced(args, plan, comm)
        session = _session(args, plan, comm)
        resumed = session.resume() if args.resume else None
        steps = args.steps if args.steps is not None else (args.epochs or 1) * session.sampler.per_epoch
        if args.compare:
            compare_times.check(plan, steps - session.first, args.accumulate)
            session.module.trace = session.module.trace or Trace(device=comm.device)
        trace = session.module.trace
        if comm.rank == 0:
            out = console(stderr=args.json)
            started = beginning(plan, data=session.data_text(), training=session.training_text(steps))
            out.print(text.parts([started]))
            if raced:
                out.print(raced, soft_wrap=True)
            if args.resume:
                none = f"no checkpoint in {args.checkpoint}: starting anew"
                out.print(none if resumed is None else f"going on from {resumed}", soft_wrap=True)
            where = console(stderr=args.json or sys.stderr.isatty())
            with steps_shown(where, steps, session.first) as show, scalars(args.tensorboard, plan) as note:
                for step in session.train(steps):
                    show(step)
                    note(step)
        else:
            for _ in session.train(steps):
                pass
        result = session.finish()
        times = None
        if args.compare and trace is not None:
            seconds = [step.seconds for step in result.steps]
            times = compare_times.compare_times(trace, session.module, seconds, comm)
        if comm.rank == 0:
            _print(args, started, session, result, times)
        beyond = result.compare is not None and bool(result.compare.beyond(ALLOWED[args.dtype]))
        return int(comm.broadcast_text(str(int(beyond))))  # rank 0 has compared


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
        model=args.model if args.grid is None else args.plan,
        weights=args.weights,
        compare=args.compare_single,
        folder=args.checkpoint,
        every=args.checkpoint_every,
        mtbf_s=3600 * args.mtbf,
        on_nan=args.on_nan,
        trace=args.trace,
    )


def _print(
    args: argparse.Namespace,
    started: Table,
    session: Session,
    result: Result,
    times: compare_times.Comparison | None,
) -> None:
    """The end of a run; with --html the whole of it as a page."""
    out, plan, notes = console(stderr=args.json), result.plan, session.notes()
    parts = [ending(result, ALLOWED[args.dtype], args.dtype), *(compare_times.tables(times) if times else ())]
    out.print(text.parts(parts))
    if args.html is not None:
        picture = Picture(lambda: svg(plan.plot()), "the plan: layers from left to right, ranks from top to bottom")
        shown = Report(plan.model, f" on {plan.gpus} ranks", [picture, started, *parts, Lines(notes)])
        write_text(args.html, html.page(shown))
        notes.append(f"page written to {args.html}")
    for note in notes:
        out.print(note, soft_wrap=True)
    if args.json:
        print(as_json.text(result.as_dict() | ({"times": times.as_dict()} if times else {})))


def _planned(args: argparse.Namespace) -> Plan:
    """The plan; with --replan, on another number of ranks, what every rank finds for these."""
    plan, world = load_plan(args.plan), int(os.environ.get("WORLD_SIZE", "1"))
    if not args.replan or world == plan.gpus:
        return plan
    each = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    return replan(plan, world, each, model=args.model, profile=args.profile, answers=answers())


def _grid(args: argparse.Namespace) -> Plan:
    """--grid: every rank makes the same plan; that it is the same is checked when they meet."""
    grid = parse_grid(args.grid)
    if args.plan.endswith(".json"):
        raise LayerwiseError(f"--grid is for a model, such as mlp:64x256x10, and {args.plan!r} is a plan: leave it out")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != grid.processes:
        raise LayerwiseError(
            f"--grid {grid} has {grid.processes} processes, there {'is' if world == 1 else 'are'} {world}: start them "
            f"with torchrun --nproc-per-node {grid.processes} -m layerwise.run {args.plan} --grid {grid}"
        )
    profile = args.profile or (DEFAULT if torch.cuda.is_available() else "cpu")
    devices = load_profile(profile).device_graph(world, int(os.environ.get("LOCAL_WORLD_SIZE", str(world))))
    batch = global_batch(None, args.global_batch, world)
    options = CostOptions(io="sample" if batch >= world else "free", optimizer=args.optimizer or "sgd")
    model = CostModel(fuse(load_model(args.plan, batch)), devices, options)
    priced = candidate(model, f"grid:{grid}", grid_strategy(model, grid))
    return make_plan(args.plan, profile, model, SearchSpace(world), priced, fused=True)


def _check(args: argparse.Namespace, plan: Plan) -> None:
    """What can be said before other ranks are waited for."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != plan.gpus:
        raise LayerwiseError(
            f"the plan is for {plan.gpus} ranks, there {'is' if world == 1 else 'are'} {world}: start them with "
            f"torchrun --nproc-per-node {plan.gpus} -m layerwise.run {args.plan}, search again, or give --replan"
        )
    if searched_with(plan, "kind") == "inference":
        raise LayerwiseError(
            f"the plan {args.plan} was searched with --inference, and layerwise.run trains: search again without it"
        )
    if args.grid is not None and args.model is not None:
        raise LayerwiseError("with --grid the model comes first, in the place of the plan: leave out --model")
    if args.grid is not None and args.race > 1:
        raise LayerwiseError("--race tries plans of a search, and --grid is none: leave out one of them")
    searches = args.replan or args.race > 1
    if args.grid is None and (args.global_batch is not None or (args.profile is not None and not searches)):
        raise LayerwiseError("--global-batch and --profile go with --grid; a plan has been searched with its own")
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
    """What every rank must be given alike. Not the names of files that are compared by what is in them, nor --json and
    --html, of which rank 0 alone takes note.
    """
    said = {True: "yes", False: "no", None: ""}
    own = ("plan", "weights", "json", "html")
    return {
        f"--{name.replace('_', '-')}": said[value] if value is None or isinstance(value, bool) else str(value)
        for name, value in vars(args).items()
        if name not in own
    }


def _take_places(args: argparse.Namespace, rank: int, places: contextlib.ExitStack) -> bool:
    """LayerwiseError where rank 0 could not write: before the training. `places` holds the folder of checkpoints."""
    if rank:
        return False
    check_files({"--trace": args.trace, "--html": args.html})
    check_tensorboard(args.tensorboard)
    if args.checkpoint is not None:
        try:
            places.enter_context(sole_writer(args.checkpoint))
        except (OSError, ValueError) as error:
            if isinstance(error, LayerwiseError):
                raise
            reason = error.strerror if isinstance(error, OSError) else error  # ValueError: a path with a NUL
            raise LayerwiseError(f"--checkpoint {args.checkpoint}: {reason}") from error
    return True


def _optimizer(args: argparse.Namespace, plan: Plan) -> str:
    if args.optimizer is not None:
        return str(args.optimizer)
    planned = searched_with(plan, "optimizer")
    return str(planned) if planned in OPTIMIZERS else "sgd"


def _every(text: str) -> int | str:
    """A number of steps, or auto."""
    return text if text == "auto" else count(text)


def _fraction(text: str) -> float:
    """A number of at least 0 and below 1."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0 and below 1")
    return number


if __name__ == "__main__":
    sys.exit(run_main(main))
