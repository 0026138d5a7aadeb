"""python -m layerwise.oracle MODEL --gpus 1..1024: what every strategy would cost, why, and which to take."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction

from layerwise.cli import (
    Parser,
    check_files,
    command,
    count,
    counts,
    output_arguments,
    positive,
    present,
    profile_arguments,
    run_main,
    settle_machine,
    step_arguments,
)
from layerwise.cost.model import CostOptions
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.importers.load import HELP, load_model
from layerwise.machine import MAX_GPUS, Profile, load
from layerwise.oracle.ask import Budget, ask, compare_with, plan_of, suggest
from layerwise.oracle.names import NAMES, known
from layerwise.oracle.question import Oracle, Question
from layerwise.oracle.report.found import found
from layerwise.oracle.report.plot import draw, draw_phases
from layerwise.oracle.runs import read_runs
from layerwise.oracle.strategies import SPATIAL, Wishes
from layerwise.plan import MAX_BATCH
from layerwise.progress import progress_bar
from layerwise.report.figures import check_plot, save_plot

BATCH = 32  # default samples a GPU
EPILOG = """examples:
  python -m layerwise.oracle resnet50 --gpus 1..1024 --profile v100
      an epoch of ImageNet under every strategy, and which to take
  python -m layerwise.oracle vgg16 --gpus 64 --max-memory 8
      64 GPUs only: every phase of an iteration; at most 8 GiB a GPU
  python -m layerwise.oracle cosmoflow:512 --gpus 4..1024 --batch 0.25 \\
      --samples 1584 --strategy ds --profile v100 --plot cosmoflow.png
      a sample on four GPUs each, and a figure
  python -m layerwise.oracle lenet5 --gpus 2 --profile cpu --strategy filter \\
      --plan plan.json
      a plan to run: torchrun --nproc-per-node 2 -m layerwise.run plan.json
  python -m layerwise.oracle resnet50 --profile v100 --measured runs.json
      how far the projections are from measured runs

strategies: serial; data (samples split); spatial (height, width, depth; all
that follows --gather-after on one device); filter (output channels), channel
(input channels, from the second layer on); pipeline (GPipe); df (data+filter)
and ds (data+spatial): groups across nodes, the split inside a group; grid (of
an MLP: samples over P_r groups, outputs over P_c parts, the cheapest of all);
layerwise: the searched plan. data+filter and data+spatial are names, too.

"sum": the phases one after the other; the gradients of a bucket share the
latency of its all-reduce. "overlap": gradients travel beside the backward pass;
the segments of a pipeline are simulated.

RUNS.json: {"runs": [{"strategy": "data", "gpus": 16, "batch": 1024,
"iteration_s": 0.23}, ...]}: batch is of all GPUs together; iteration_s may be
a list; or "epoch_s" and "samples"; "inside" (GPUs a group of df, ds),
"segments" (of a pipeline)."""


def parser() -> argparse.ArgumentParser:
    """The parser of the command's flags."""
    p = Parser(
        prog="layerwise oracle",
        main="--gpus --gpu --link --batch --samples --scaling --strategy --max-memory --max-hours --measured --plot "
        "--plan",
        description=(
            "Predicts the time of an epoch and the memory under every\nparallel strategy, explains them, and suggests "
            "one."
        ),
        epilog=EPILOG,
    )
    p.add_argument("model", metavar="MODEL", help=HELP)
    g = p.add_argument_group("machine")
    g.add_argument(
        "--gpus", type=counts, metavar="N", help="16; 1,2,4; or 1..1024, the powers of two (default: a node's)"
    )
    profile_arguments(g)
    g = p.add_argument_group("training")
    g.add_argument(
        "--samples", type=_samples, default=1_281_167, metavar="D", help="samples in an epoch (default: ImageNet's)"
    )
    g.add_argument(
        "--scaling", choices=["weak", "strong"], help="fixed batch a GPU (weak) or a step (strong) (default: weak)"
    )
    batch = g.add_mutually_exclusive_group()
    batch.add_argument(
        "--batch",
        type=_batch,
        metavar="B",
        help="samples a GPU (default: 32; 0.25 is one sample on four GPUs), or a step with --scaling strong",
    )
    batch.add_argument("--global-batch", type=count, metavar="B", help="the same as --scaling strong --batch B")
    step_arguments(g, "as in layerwise search; default: feeding a batch costs no time; below one sample a GPU, boxes")
    g.add_argument("--local-batch-norm", action="store_true", help="statistics of each device's own samples")
    g = p.add_argument_group("strategies")
    g.add_argument("--strategy", metavar="S,S", help=f"{', '.join(NAMES)} (default: all that suit the model)")
    g.add_argument("--segments", type=count, metavar="S", help="segments of a pipelined batch (default: 4 a stage)")
    g.add_argument("--group-size", type=count, metavar="G", help="devices a group of df, ds (default: a node's)")
    g.add_argument("--gather-after", metavar="LAYER", help="the last layer that spatial and ds split")
    g.add_argument(
        "--spatial-dims",
        metavar="h,w",
        help="dimensions that spatial and ds may split (default: the cheapest of d,h,w)",
    )
    g.add_argument(
        "--search-up-to", type=count, default=64, metavar="N", help="search layerwise for up to N GPUs (default: 64)"
    )
    g = p.add_argument_group("answer")
    g.add_argument("--max-gpus", type=count, metavar="N", help="suggest only strategies with at most N GPUs")
    g.add_argument(
        "--max-memory", type=positive, metavar="GIB", help="suggest only strategies with at most this memory a GPU"
    )
    g.add_argument(
        "--max-hours",
        type=positive,
        metavar="H",
        help="suggest the fewest GPU-hours among strategies with an epoch this short",
    )
    g.add_argument("--measured", metavar="RUNS.json", help="compare with measured runs")
    g.add_argument("--phases", action="store_true", help="phases at every number of GPUs, not the suggested one only")
    output_arguments(g)
    g.add_argument("--plot", metavar="FILE.png", help="scaling curves: an epoch and the speed-up, over the GPUs")
    g.add_argument("--plot-phases", metavar="FILE.png", help="phases of an iteration, a panel a strategy")
    g.add_argument("--plan", metavar="PLAN.json", help="write the one strategy at the one number of GPUs as a plan")
    return p


@command(parser)
def main(args: argparse.Namespace) -> None:
    """Parses, asks and prints."""
    settle_machine(args)
    if args.global_batch is not None:
        if args.scaling == "weak":
            raise LayerwiseError("--global-batch is for all GPUs together: with --scaling weak, pass --batch instead")
        args.scaling, args.batch = "strong", args.global_batch
    profile = load(args.profile)
    profile.check_equal("the oracle")
    profile.processor.peak(args.dtype)
    named = _named(args.strategy, "--strategy", NAMES, ", ", known)
    runs = [] if args.measured is None else read_runs(args.measured)
    gpus = args.gpus or (() if runs else (args.gpus_per_node or profile.gpus_per_node,))
    _check(args, named, gpus)
    for devices in gpus:
        profile.device_graph(devices, args.gpus_per_node)
    budget = Budget(
        args.max_gpus, args.max_memory and args.max_memory * 2**30, args.max_hours and args.max_hours * 3600
    )
    oracle = Oracle(_question(args, profile, budget))
    with progress_bar("asking", quiet=args.json) as progress:
        asked = ask(oracle, named, gpus, args.search_up_to, progress)
    compared = compare_with(oracle, runs)
    suggestion = suggest(list(asked.answers.values()), args.samples, budget) if asked.answers else None
    if args.plan is not None:
        (((_, devices), answer),) = asked.answers.items()
        plan_of(args.model, args.profile, oracle.model(devices), answer, input_shape=args.input_shape).save(args.plan)
    heading = f"{args.model} on {profile.processor.name}"
    if args.plot is not None:
        save_plot(draw(oracle.question, asked, args.samples, heading, compared), args.plot)
    if args.plot_phases is not None:
        save_plot(draw_phases(oracle.question, asked, heading), args.plot_phases)
    shown = found(args.model, oracle, asked, args.samples, suggestion, budget, compared, every=args.phases)
    present(shown, args, {"plan": args.plan, "figure": args.plot, "figure of phases": args.plot_phases})


def _check(args: argparse.Namespace, named: Sequence[str], gpus: Sequence[int]) -> None:
    """Raises LayerwiseError for flags that do not go together, and for files that cannot be written."""
    if args.scaling == "strong" and args.batch is None:
        raise LayerwiseError("--scaling strong needs --batch B, the fixed number of samples in a step")
    if args.scaling == "strong" and args.batch % 1:
        raise LayerwiseError("--scaling strong: --batch B is for all GPUs together, and must be an integer")
    batch = (args.batch or BATCH) * (1 if args.scaling == "strong" else max(gpus, default=1))
    if batch > MAX_BATCH:
        raise LayerwiseError(f"--batch: at most {MAX_BATCH:,} samples a step of all GPUs can be planned for")
    if args.plan is not None and (len(named) != 1 or len(gpus) != 1):
        raise LayerwiseError("--plan writes a single plan: pass one --strategy and one number of --gpus")
    if args.plot_phases is not None and not gpus:
        raise LayerwiseError("--plot-phases draws answers for numbers of GPUs: pass --gpus")
    figures = {"--plot": args.plot, "--plot-phases": args.plot_phases}
    for flag, path in figures.items():
        if path is not None:
            check_plot(path, flag)
    check_files({"--plan": args.plan, **figures, "--html": args.html})


def _question(args: argparse.Namespace, profile: Profile, budget: Budget) -> Question:
    """The question that the flags ask about the model."""
    dims = _named(args.spatial_dims, "--spatial-dims", SPATIAL, ",") or SPATIAL
    options = CostOptions(
        io=args.io, optimizer=args.optimizer, dtype=args.dtype, local_batch_norm=args.local_batch_norm
    )
    return Question(
        graph=fuse(load_model(args.model, 1, args.input_shape)),
        profile=profile,
        batch=args.batch or BATCH,
        scaling=args.scaling or "weak",
        gpus_per_node=args.gpus_per_node,
        segments=args.segments,
        wishes=Wishes(args.group_size, args.gather_after, dims),
        options=options,
        memory_limit_bytes=budget.memory_bytes,
    )


def _named(
    text: str | None, flag: str, choices: Sequence[str], joint: str, read: Callable[[str], str] = str
) -> tuple[str, ...]:
    """The names in a comma-separated flag, each read by `read`, without duplicates; () if the flag is missing."""
    if text is None:
        return ()
    names = tuple(dict.fromkeys(read(part.strip()) for part in text.split(",") if part.strip()))
    if not names or not set(names) <= set(choices):
        raise LayerwiseError(f"{flag} {text!r}: choose from {joint.join(choices)}, joined by commas")
    return names


def _batch(text: str) -> Fraction:
    """Samples a GPU: a number above 0."""
    return Fraction(positive(text)).limit_denominator(MAX_GPUS) or Fraction(1, MAX_GPUS)


def _samples(text: str) -> int:
    """Samples of an epoch."""
    if len(text) > 15:  # otherwise the times of an epoch would exceed floats
        raise argparse.ArgumentTypeError(f"{text[:15]}... is not a number of samples below 10^15")
    return count(text)


if __name__ == "__main__":
    sys.exit(run_main(main))
