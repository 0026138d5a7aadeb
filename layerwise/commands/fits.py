"""layerwise fits MODEL --gpu a100-80: will it fit, on how many, how large a batch; `layerwise.memory` for a module."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Literal

from layerwise.arguments import Count, checked
from layerwise.cli import (
    Parser,
    check_files,
    command,
    count,
    counts,
    output_arguments,
    present,
    profile_arguments,
    run_main,
    search_space,
    settle_machine,
    space_arguments,
    step_arguments,
)
from layerwise.cost.model import CostOptions
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.load import HELP, load_model, names_code, network_of
from layerwise.importers.named_code import called
from layerwise.importers.sizes import CalledGraph, Resizable, sizes_of_model, sizes_of_module
from layerwise.importers.with_loss import LOSSES, model_with
from layerwise.machine import DEFAULT, MAX_GPUS, load, precision
from layerwise.quantities import parse_bytes
from layerwise.search.fits import FitQuestion, Fits, fits

if TYPE_CHECKING:
    from torch import nn

EPILOG = """examples:
  layerwise fits resnet50 --gpu t4 --optimizer adam
      one T4, and up to as many as a node has
  layerwise fits unet3d:256 --gpu a100-80 --gpus 1..64 --global-batch 2
      how many GPUs two volumes need, and how large they may be
  layerwise fits mypackage.nets:build --input-shape 3x512x512 --inference
      a model of your own, for answers alone"""


def parser() -> argparse.ArgumentParser:
    """The parser of the command's flags."""
    p = Parser(
        prog="layerwise fits",
        main="--gpu --gpus --global-batch --input-shape --optimizer --dtype --memory-limit --inference --loss --html "
        "--json",
        description="Says whether a model fits: the memory of a step on one device and several, the\n"
        "largest batch, and what recomputing or sharding would save. No GPU is needed.",
        epilog=EPILOG,
    )
    p.add_argument("model", metavar="MODEL", help=HELP)
    p.add_argument("--loss", choices=list(LOSSES), help="loss behind a built-in network, as in layerwise search")
    g = p.add_argument_group("machine")
    g.add_argument(
        "--gpus", type=counts, metavar="N", help="numbers of GPUs: 4; 1,2,4; or 1..64 (default: 1 to a node's)"
    )
    profile_arguments(g)
    g.add_argument(
        "--memory-limit", metavar="14GB", help="memory of a device (default: what it has, less what libraries take)"
    )
    g = p.add_argument_group("step")
    g.add_argument(
        "--global-batch",
        type=count,
        default=32,
        metavar="B",
        help="samples of a step on all GPUs together (default: 32)",
    )
    step_arguments(g)
    g.add_argument("--inference", action="store_true", help="plan the forward pass alone, with nothing saved")
    space_arguments(p.add_argument_group("plans"))
    output_arguments(p.add_argument_group("output"))
    return p


@command(parser)
def main(args: argparse.Namespace) -> None:
    """Asks, and prints the answer."""
    check_files({"--html": args.html})
    settle_machine(args)
    profile = load(args.profile)
    profile.check_equal("fits")
    profile.processor.peak(args.dtype)
    node = args.gpus_per_node or profile.gpus_per_node
    gpus = args.gpus or tuple(n for n in (1, 2, 4, 8, 16) if n <= node)
    name, batch = model_with(args.model, args.loss), args.global_batch
    args.gpus = max(gpus)  # for the space
    kind: Literal["inference", "training"] = "inference" if args.inference else "training"
    options = CostOptions(io=args.io, optimizer=args.optimizer, dtype=args.dtype, kind=kind)
    limit, space = _limit(args.profile, args.memory_limit), search_space(args, spread=False)
    module, inputs = called(name, args.input_shape) if names_code(name) else (None, ())
    if module is not None and len(inputs) == 1 and callable(inputs[0]) and not hasattr(inputs[0], "shape"):
        question = _of_calls(module, inputs[0], FitQuestion(name, (), profile, gpus, options, limit, space=space))
    else:
        graph, sizes = fuse(load_model(name, batch, args.input_shape)), sizes_of_model(name, batch, args.input_shape)
        question = FitQuestion(name, (CalledGraph(graph),), profile, gpus, options, limit, sizes, space)
    present(fits(question).report(), args)


@checked
def memory(
    model: nn.Module,
    inputs: object,
    *,
    gpu: str | os.PathLike[str] = DEFAULT,
    gpus: Count = 1,
    optimizer: str = "sgd",
    dtype: str = "float32",
    inference: bool = False,
    memory_limit: float | str | None = None,
) -> Fits:
    """Returns the memory that a step of a model takes on one device, and on several; no GPU is needed.

    Args:
        model: An nn.Module; it may be on the meta device.
        inputs: What a step calls it with: a tensor, a tuple, or a dict of arguments by name. The first dimension is the
            samples of all devices together. Or, for inference, a function that calls the model, as in `parallelize`; if
            it has a parameter, that is a size: `lambda frames=9: vae.decode(latent_of(frames))`. The largest is then
            found, with the time that it takes.
        gpu: A device of `layerwise machines`, a built-in profile, or a profile's file.
        gpus: Devices; all powers of two up to it are looked at, too.
        optimizer: For the memory of its state.
        dtype: "float32", or "bf16" and "float16" for mixed precision.
        inference: Of the forward pass alone, with nothing saved.
        memory_limit: Bytes of a device, or a text such as "14GB". None: what it has, less what libraries take.

    Returns:
        The answer; printed, it is one screen. The largest sequence, image or cube is among it, where the model takes
        another size than the example's: it is traced at some.

    Raises:
        LayerwiseError: The model cannot be traced, or there is no such device.

    Examples:
        >>> from torch import nn, randn
        >>> answer = memory(nn.Linear(1024, 1024), randn(8, 1024), gpu="t4", optimizer="adam")
        >>> answer.kinds["states"], answer.devices.fits.number
        (8396800.0, 1)
    """
    from layerwise.importers.torch.read.arguments import call_of

    if not 1 <= gpus <= MAX_GPUS:
        raise LayerwiseError(f"gpus={gpus} is not a whole number from 1 to {MAX_GPUS:,}")
    profile = load(gpu)
    profile.check_equal("fits")
    profile.processor.peak(dtype)
    options = CostOptions(optimizer=optimizer, dtype=precision(dtype), kind="inference" if inference else "training")
    powers = {2**i for i in range(gpus.bit_length())} | {gpus}
    question = FitQuestion(type(model).__name__, (), profile, tuple(sorted(powers)), options, _limit(gpu, memory_limit))
    if callable(inputs) and not hasattr(inputs, "shape"):
        return fits(_of_calls(model, inputs, question))
    positional, named = call_of(model, inputs)
    graph = fuse(network_of(model, positional, None, question.name, named).graph)
    sizes = sizes_of_module(model, (positional, named), None, question.name)
    return fits(replace(question, name=graph.name, calls=(CalledGraph(graph),), sizes=sizes))


def _of_calls(model: nn.Module, act: Callable[..., object], question: FitQuestion) -> FitQuestion:
    """Returns the question of a model as a function calls it, of any size where the function has one."""
    from layerwise.api.source import network
    from layerwise.importers.torch.proof import left_unproven
    from layerwise.importers.torch.read.calls import recorded, returning_written, unlike

    if question.options.kind != "inference":
        raise LayerwiseError("a function calls the model in inference: ask for that (--inference, inference=True)")
    size = next(iter(signature(act).parameters.values()), None)
    if size is not None and (not isinstance(size.default, int) or size.default < 1):
        raise LayerwiseError(f"{size.name!r}, the size that the function is called with, needs a default, such as 8")

    def at(n: int | None) -> tuple[CalledGraph, ...]:
        calls = recorded(model.eval(), act if n is None else partial(act, n))
        several = unlike(calls)
        graphs = list[LayerGraph]()
        for one in calls:
            written = returning_written(model, one.unread) if several else nullcontext()
            with written, left_unproven("it would take its full memory"):
                graphs.append(fuse(network(model, one.call, 1, as_called=True).graph))
        io: Literal["boxes", "free"] = "boxes" if several else "free"
        return tuple(
            # A plan that gathers what is returned counts it once.
            CalledGraph(graph, one.times, one.returned_bytes * (one.times - (not several)), io)
            for graph, one in zip(graphs, calls, strict=True)
        )

    sizes = None if size is None else Resizable(at, 2, size.default, 1, f"{size.name}={{}}")
    return replace(question, calls=at(None), sizes=sizes, timed=sizes is not None)


def _limit(profile: str | os.PathLike[str], memory_limit: float | str | None) -> float:
    if memory_limit is not None:
        return parse_bytes(memory_limit, "--memory-limit")
    return load(profile).device_graph(1, 1).usable_bytes


if __name__ == "__main__":
    sys.exit(run_main(main))
