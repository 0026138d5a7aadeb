"""layerwise predict PLAN.json: a planned network's predictions for volumes, one process a rank
(start with torchrun).
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial

from layerwise.cli import MODEL_HELP, Parser, command, console, positive, run_main, shape
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
            "Computes a network's predictions for volumes that fit no device: every rank\nreads, computes, reduces and "
            "writes its boxes."
        ),
        epilog=EPILOG,
    )
    p.add_argument("plan", metavar="PLAN.json", help="written by layerwise search --inference --io boxes --out")
    p.add_argument("--model", metavar="MODEL", help=MODEL_HELP)
    p.add_argument("--weights", metavar="FILE.safetensors", required=True, help="the model's state dict")
    p.add_argument(
        "--data",
        metavar="FILE",
        nargs="+",
        required=True,
        help="one .npy, .zarr or .h5::name of all volumes (samples first), or a file for each, also .nii or .nii.gz",
    )
    p.add_argument(
        "--out", metavar="OUT", required=True, help="a .npy for all, or a .zarr or folder with one array each"
    )
    g = p.add_argument_group("what is computed")
    g.add_argument("--reduce", choices=["argmax", "softmax", "sigmoid"], help="reduction of the outputs")
    g.add_argument("--output", type=int, default=0, metavar="I", help="which of the network's outputs (default: 0)")
    g.add_argument(
        "--mirror", default="", metavar="DIMS", help="take the mean over volumes mirrored along these, as in dhw"
    )
    g.add_argument("--window", type=shape, metavar="DxHxW", help="extents of windows, used even if a volume would fit")
    g.add_argument(
        "--overlap", type=float, default=0.5, metavar="X", help="overlap of two windows, as a fraction (0.5)"
    )
    g.add_argument("--memory-limit", metavar="SIZE", help="of a device, as in 14GB: beyond it, windows are used")
    g.add_argument(
        "--dtype", type=precision, choices=["float32", "float64", "bf16"], default="float32", help="default: float32"
    )
    g = p.add_argument_group("output")
    g.add_argument("--overwrite", action="store_true", help="also predict volumes that have results")
    g.add_argument("--json", action="store_true", help="write what was done as JSON")
    g.add_argument("--timeout", type=positive, default=30.0, metavar="S", help="seconds to wait for a rank (30)")
    return p


@command(parser)
def main(args: argparse.Namespace) -> int:
    """Parses, predicts and prints. With several ranks it ends the process (`layerwise.comm.start.leave`)."""
    plan = load_plan(args.plan)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != plan.gpus:
        raise LayerwiseError(
            f"the plan is for {plan.gpus} ranks, but there {'is' if world == 1 else 'are'} {world}: start with "
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

    with start(args.timeout) as comm:
        flags = {name: str(value) for name, value in vars(args).items() if name not in ("plan", "weights", "json")}
        comm.handshake(flags)
        weights = agree(comm, lambda: (weights_file(args.weights), None))[0]
        dtype, autocast = ARITHMETIC[args.dtype]
        load_model = partial(load, plan, args.model, comm=comm, weights=weights, dtype=dtype, autocast=autocast)
        model = load_model().eval().requires_grad_(False)
        stacked = len(args.data) == 1 and not args.data[0].lower().endswith((".nii", ".nii.gz"))
        samples = args.data[0] if stacked else args.data
        done = predict(
            model,
            samples,
            args.out,
            output=args.output,
            reduce=args.reduce,
            window=args.window,
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


if __name__ == "__main__":
    sys.exit(run_main(main))
