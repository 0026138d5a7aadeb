"""The flags of `layerwise run`."""

from __future__ import annotations

import argparse

from layerwise.cli import MODEL_HELP, Parser, argument, count, positive
from layerwise.machine import precision
from layerwise.train import data
from layerwise.train.compare import ALLOWED
from layerwise.train.loop import OPTIMIZERS

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

NCCL carries the tensors where every rank has a GPU, else gloo. A plan for one
GPU needs no torchrun. Which samples a step takes, and all random numbers,
depend on --seed alone, not on the plan."""


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    p = Parser(
        prog="layerwise run",
        main="--model --data --epochs --steps --optimizer --lr --dtype --weights --checkpoint --resume "
        "--compare-single",
        description=(
            "Trains a planned network with the numbers of one device: every rank\ncomputes its part of every layer."
        ),
        epilog=EPILOG,
    )
    p.add_argument("plan", metavar="PLAN.json", help="written by layerwise search --out")
    p.add_argument("--model", metavar="MODEL", help=MODEL_HELP)
    p.add_argument(
        "--replan", action="store_true", help="if the number of ranks differs from the plan's, search again for it"
    )
    p.add_argument(
        "--gpu", "--profile", dest="profile", metavar="NAME", help="machine to search again with (default: the plan's)"
    )
    g = p.add_argument_group("training")
    g.add_argument("--data", default="digits", metavar="NAME", help=f"{data.HELP} (default: digits)")
    length = g.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=count, metavar="E", help="passes over the data (default: 1)")
    length.add_argument("--steps", type=count, metavar="N", help="total steps, including those before --resume")
    g.add_argument("--optimizer", choices=list(OPTIMIZERS), help="default: the one that the plan was searched for")
    usual = ", ".join(f"{name} {lr:g}" for name, lr in OPTIMIZERS.items())
    g.add_argument("--lr", type=positive, metavar="RATE", help=f"learning rate (default: {usual})")
    g.add_argument(
        "--momentum", type=_fraction, default=0.9, metavar="M", help="factor of the momentum optimizer (default: 0.9)"
    )
    g.add_argument("--weight-decay", type=_fraction, default=0.0, metavar="W", help="default: 0")
    g.add_argument(
        "--clip-norm", type=positive, metavar="NORM", help="clip the gradient's norm to this (default: no limit)"
    )
    g.add_argument(
        "--accumulate",
        type=count,
        default=1,
        metavar="K",
        help="batches a step; gradients are summed once (default: 1)",
    )
    g.add_argument(
        "--race", type=count, default=1, metavar="K", help="try the K best plans of the plan's search, keep the fastest"
    )
    g.add_argument("--seed", type=int, default=0, help="for initial values, sample order and dropout (default: 0)")
    g.add_argument(
        "--on-nan",
        choices=("stop", "ignore"),
        default="stop",
        help="what to do if the loss is not finite (default: stop)",
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
        help="statistics of each rank's own samples, like DDP (default: as the plan was searched)",
    )
    g.add_argument("--compile", action="store_true", help="torch.compile of what each rank computes by itself")
    g.add_argument(
        "--checkpoint-activations",
        action="store_true",
        help="recompute every layer that saves memory by it, whatever the plan says",
    )
    g = p.add_argument_group("checkpoints")
    g.add_argument(
        "--checkpoint",
        metavar="DIR",
        help="save model and optimizer there, at least at the end; a folder without checkpoints, or --resume",
    )
    g.add_argument("--checkpoint-every", type=count, metavar="N", help="also every N steps")
    g.add_argument("--resume", action="store_true", help="resume from the last checkpoint in DIR, if there is one")
    g = p.add_argument_group("output")
    g.add_argument(
        "--compare-single", action="store_true", help="take the same steps on one device; exit 1 if they differ"
    )
    g.add_argument("--trace", metavar="FILE.json", help="write a Chrome trace of every rank")
    g.add_argument("--json", action="store_true", help="write the result as JSON to stdout, everything else to stderr")
    g.add_argument(
        "--timeout", type=positive, default=30.0, metavar="S", help="seconds to wait for another rank (default: 30)"
    )


def _fraction(text: str) -> float:
    """A number of at least 0 and below 1."""
    return argument(text, float, lambda number: 0 <= number < 1, "a number of at least 0 and below 1")
