"""layerwise predict PLAN.json: a planned network's answers for volumes, one process a rank (torchrun starts them)."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial

from layerwise.cli import MODEL_HELP, Parser, command, console, positive, run_main
from layerwise.errors import LayerwiseError
from layerwise.machine import precision
from layerwise.plan import Plan, load_plan
from layerwise.report import as_json

EPILOG = """examples:
  layerwise search unet3d:128 --gpus 4 --inference --io boxes \\
      --global-batch 1 --out plan.json
  torchrun --nproc-per-node 4 -m layerwise.predict plan.json \\
      --weights model.safetensors --data images/*.nii.gz --out labels \\
      --reduce argmax
      no GPU holds a volume, its activations or its logits in full
  torchrun --nproc-per-node 4 -m layerwise.predict plan.json \\
      --weights model.safetensors --data images.zarr --out labels.zarr \\
      --reduce argmax --mirror dhw
      the mean over the eight ways to mirror a volume

A run that was interrupted goes on with the volumes that are not there yet. One
that fails is named at the end, with exit status 2; the others are written."""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the flags."""
    p = Parser(
        prog="layerwise predict",
        main="--model --weights --data --out --reduce --mirror --window --memory-limit --dtype --overwrite",
        description=(
            "Computes a network's answers for volumes that fit no device: every rank reads,\ncomputes, reduces and "
            "writes its boxes of them."
        ),
        epilog=EPILOG,
    )
    p.add_argument("plan", metavar="PLAN.json", help="written by layerwise search --inference --io boxes --out")
    p.add_argument("--model", metavar="MODEL", help=MODEL_HELP)
    p.add_argument("--weights", metavar="FILE.safetensors", required=True, help="file of the model's state dict")
    p.add_argument(
        "--data",
        metavar="FILE",
        nargs="+",
        required=True,
        help="a .npy, .zarr or .h5::name of all volumes, samples first; or a file per volume, also .nii or .nii.gz",
    )
    p.add_argument(
        "--out", metavar="OUT", required=True, help="a .npy for all results, or a .zarr or a folder with one each"
    )
    g = p.add_argument_group("what is computed")
    g.add_argument(
        "--reduce",
        choices=["argmax", "softmax", "sigmoid"],
        help="what is written of the outputs (default: the outputs)",
    )
    g.add_argument("--output", type=int, default=0, metavar="I", help="number of the network's output (default: 0)")
    g.add_argument(
        "--mirror",
        default="",
        metavar="DIMS",
        help="dimensions along which volumes are mirrored, whose mean is taken, such as dhw",
    )
    g.add_argument("--window", metavar="DxHxW", help="extents of windows, which are taken even if a volume fits")
    g.add_argument(
        "--overlap",
        type=float,
        default=0.5,
        metavar="X",
        help="share of a window that its neighbour has, too (default: 0.5)",
    )
    g.add_argument(
        "--memory-limit",
        metavar="SIZE",
        help="memory of a device, such as 14GB; a larger volume is computed in windows",
    )
    g.add_argument(
        "--dtype",
        type=precision,
        choices=["float32", "float64", "bf16"],
        default="float32",
        help="type that layers compute in (default: float32)",
    )
    g = p.add_argument_group("output")
    g.add_argument("--overwrite", action="store_true", help="also compute volumes whose results are there")
    g.add_argument("--json", action="store_true", help="write the names of the results as JSON, for programs")
    g.add_argument(
        "--timeout",
        type=positive,
        default=30.0,
        metavar="S",
        help="seconds that a rank waits for another (default: 30)",
    )
    return p


@command(parser)
def main(args: argparse.Namespace) -> int:
    """Parses, predicts, prints. With several ranks it ends the process, as `layerwise.comm.start.leave` says."""
    plan = load_plan(args.plan)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != plan.gpus:
        raise LayerwiseError(
            f"the plan is for {plan.gpus} ranks, there {'is' if world == 1 else 'are'} {world}: start them with "
            f"torchrun --nproc-per-node {plan.gpus} -m layerwise.predict {args.plan} ..."
        )
    if plan.gpus == 1:
        return _predict(plan, args)
    from layerwise.comm.start import leave

    leave(run_main(lambda _: _predict(plan, args)))


def _predict(plan: Plan, args: argparse.Namespace) -> int:
    from layerwise.comm.start import start
    from layerwise.comm.together import agree
    from layerwise.inference.predict import predict
    from layerwise.run.load import load
    from layerwise.tensorfile import weights_file
    from layerwise.train.compare import ARITHMETIC

    window = None if args.window is None else _extents(args.window)
    with start(args.timeout) as comm:
        flags = {name: str(value) for name, value in vars(args).items() if name not in ("plan", "weights", "json")}
        comm.handshake(flags)
        weights = agree(comm, lambda: (weights_file(args.weights), None))[0]
        dtype, autocast = ARITHMETIC[args.dtype]
        load_model = partial(load, plan, args.model, comm=comm, weights=weights, dtype=dtype, autocast=autocast)
        model = load_model().eval().requires_grad_(False)
        samples = args.data[0] if len(args.data) == 1 and _stacked(args.data[0]) else args.data
        done = predict(
            model,
            samples,
            args.out,
            output=args.output,
            reduce=args.reduce,
            window=window,
            overlap=args.overlap,
            mirror=args.mirror,
            memory_limit=args.memory_limit,
            overwrite=args.overwrite,
        )
        if comm.rank == 0:
            if args.json:
                print(as_json.text({"out": args.out, "written": list(done.written), "skipped": list(done.skipped)}))
            else:
                there = f", {len(done.skipped)} were there" if done.skipped else ""
                console().print(f"{len(done.written)} written to {args.out}{there}", soft_wrap=True)
    return 0


def _stacked(path: str) -> bool:
    """Returns whether a file has all samples (samples, ...), not one."""
    return not path.lower().endswith((".nii", ".nii.gz"))


def _extents(text: str) -> tuple[int, ...]:
    """Returns the numbers of DxHxW."""
    try:
        extents = tuple(map(int, text.lower().split("x")))
    except ValueError:
        extents = ()
    if not extents or min(extents) < 1:
        raise LayerwiseError(f"--window takes extents such as 128x128x64, not {text!r}")
    return extents


if __name__ == "__main__":
    sys.exit(run_main(main))
