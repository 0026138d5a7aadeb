"""python -m layerwise.search MODEL --gpus N: the best strategy, its proof, and what it saves."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from layerwise.cache import answers
from layerwise.cli import (
    Parser,
    check_files,
    command,
    console,
    constraint_arguments,
    constraints,
    count,
    global_batch,
    machine_arguments,
    output_arguments,
    positive,
    present,
    progress_bar,
    run_main,
    search_space,
    settle_machine,
    space_arguments,
    training_arguments,
)
from layerwise.config import SearchSpace
from layerwise.constraints import check_names
from layerwise.cost.model import CostModel, CostOptions
from layerwise.errors import LayerwiseError
from layerwise.files import read_json
from layerwise.graph.fuse import fuse
from layerwise.graph.layer import LayerGraph
from layerwise.importers.load import HELP, load_model, names_code
from layerwise.importers.with_loss import LOSSES, model_with
from layerwise.machine import DeviceGraph, load
from layerwise.plan import parse_strategy
from layerwise.program import StepKind
from layerwise.quantities import parse_bytes
from layerwise.report.content import Picture, Report
from layerwise.report.figures import save_plot
from layerwise.report.html import check_charts
from layerwise.search.baselines import baselines, named_strategy
from layerwise.search.curve_command import check_curve, show_curve
from layerwise.search.export import constrained, export_costs
from layerwise.search.find import candidate, configurations, search
from layerwise.search.halos import search_halos
from layerwise.search.limit.additive import Costs
from layerwise.search.limit.variants import OFFERS, Configs
from layerwise.search.limit.within import LimitedSearch
from layerwise.search.make_plan import make_plan, write_timeline
from layerwise.search.overlap.polish import EFFORTS
from layerwise.search.remedies import Remedy, remedies
from layerwise.search.report.found import found, priced
from layerwise.search.report.page import Planned, plan_report
from layerwise.search.report.sentences import nothing_fits
from layerwise.search.result import Candidate, SearchResult

EPILOG = """examples:
  python -m layerwise.search vgg16 --gpus 16
      the best strategy on two H100 nodes
  python -m layerwise.search unet3d --gpus 8 --global-batch 2
      fewer samples than GPUs: split space
  python -m layerwise.search net.onnx --gpus 16 --profile p100 --out plan.json
      a model and a machine of your own, and a plan to run
  python -m layerwise.search mlp:784x1024x1024x10 --gpus 8 --price grid:4x2
      a process grid of an MLP, batch x model, beside the baselines
  python -m layerwise.search unet3d --gpus 8 --global-batch 1 --inference
      the quickest answer for one volume
  python -m layerwise.search vgg16 --gpus 4 --profile p100 --link-model sum \\
      --sync parameter-server --io free --objective additive
      the ICML 2018 paper's own choices (its table 5)

Two times are given. The step time is equation 1, t_C + t_X + t_S summed over
layers: it is what is minimised and proven. The time with overlap is a
simulation of the devices in which gradients travel beside the backward pass,
as DistributedDataParallel has it: by it the plan is chosen among the optima
and the baselines."""


def parser() -> argparse.ArgumentParser:
    """The parser of the command's flags."""
    p = Parser(
        prog="layerwise search",
        description="Finds the cheapest way to split every layer of a network over N\ndevices, and proves it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("model", metavar="MODEL", help=HELP)
    p.add_argument(
        "--loss",
        choices=list(LOSSES),
        help="behind a built-in network, of the classes of positions, its target an input: MODEL+LOSS (default: none)",
    )
    machine_arguments(p)
    training_arguments(p)
    _space_flags(p.add_argument_group("search space"))
    constraint_arguments(p)
    _cost_flags(p.add_argument_group("cost model"))
    _output_flags(p.add_argument_group("output"))
    return p


Flags = argparse._ArgumentGroup


def _space_flags(g: Flags) -> None:
    space_arguments(g)
    g.add_argument(
        "--replicas",
        type=count,
        default=1,
        metavar="R",
        help="outer data parallelism: R groups of N/R neighbouring GPUs, each of which has samples of its own",
    )
    g.add_argument(
        "--memory-limit",
        metavar="14GB",
        help="that a step may take on a device (default: what the profile's devices have, of GPUs less what libraries "
        "take: 1.5 GB, at most a tenth)",
    )
    offers = g.add_mutually_exclusive_group()
    offers.add_argument(
        "--offer",
        type=offered,
        default=OFFERS,
        metavar="recompute,shard",
        help="what may save memory, layer by layer, where a limit binds (default: both)",
    )
    offers.add_argument("--no-offer", type=offered, default=(), metavar="recompute,shard", help="what may not")
    g.add_argument(
        "--whole",
        action="append",
        default=[],
        metavar="MODULE",
        help="of a package.module:callable, called as it is written; so is what cannot be taken apart. Can be repeated",
    )
    g.add_argument("--no-fuse", action="store_true", help="a layer for every operator, element-wise ones too")
    g.add_argument(
        "--search-memory", type=positive, default=2.0, metavar="GIB", help="bound on search tables (default: 2)"
    )
    g.add_argument(
        "--effort",
        choices=EFFORTS,
        default="normal",
        help="how long the plan is improved by simulated time, and that bounded; quick: not at all (default: normal)",
    )
    g.add_argument("--no-cache", action="store_true", help="search anew, though the same search was done before")


def _cost_flags(g: Flags) -> None:
    g.add_argument(
        "--inference",
        action="store_true",
        help="plan for answers alone: the forward pass of one batch, with running statistics and nothing saved",
    )
    g.add_argument(
        "--link-model",
        choices=["port", "sum"],
        default="port",
        help="time of the busiest port, or all bytes over bandwidth (the paper's)",
    )
    g.add_argument(
        "--sync",
        choices=["all-reduce", "parameter-server"],
        default="all-reduce",
        help="how gradients are added (parameter-server: the paper's)",
    )
    g.add_argument(
        "--io",
        choices=["sample", "free", "boxes"],
        help="each device feeds and gets its own samples, or batches come for free, or each reads the boxes that it "
        "needs (default: sample, if each has one)",
    )
    g.add_argument(
        "--local-batch-norm", action="store_true", help="statistics of each device's own samples, as DDP has them"
    )
    g.add_argument(
        "--objective",
        choices=["timeline", "additive"],
        default="timeline",
        help="choose by simulated time, or by equation 1 alone",
    )


def _output_flags(g: Flags) -> None:
    output_arguments(g)
    g.add_argument("--layers", action="store_true", help="a row for every layer")
    g.add_argument("--memory", action="store_true", help="what a step holds where its memory is fullest")
    g.add_argument(
        "--memory-curve",
        metavar="8GB..80GB",
        help="the fastest plan for each of some limits between these, instead of one",
    )
    g.add_argument("--plot", metavar="FILE.svg", help="draw the plan; with --memory-curve that, also as .png or .pdf")
    g.add_argument("--out", metavar="PLAN.json", help="write the plan")
    g.add_argument("--timeline", metavar="FILE.json", help="write the predicted step as a Chrome trace of every device")
    g.add_argument(
        "--price",
        metavar="STRATEGY",
        help="price this strategy instead of searching: data, model, owt; grid:RxC, of an MLP, samples over R groups, "
        "outputs over C; or a .json file, {layer: {dim: degree}}",
    )
    g.add_argument(
        "--export-costs",
        metavar="FILE.cfn",
        help="write the whole cost tables as a toulbar2 problem; under a limit that binds this takes many searches "
        "more, over all forms of all layers, and can take far longer than the search itself",
    )


@command(parser)
def main(args: argparse.Namespace) -> None:
    """Parses, searches, prints."""
    settle_machine(args)
    args.model = model_with(args.model, args.loss)
    devices = load(args.profile).device_graph(args.gpus, args.gpus_per_node)
    devices.processor.peak(args.dtype)
    batch = global_batch(args.batch, args.global_batch, args.gpus)
    rules = constraints(args, devices.devices_per_node)
    space = replace(search_space(args, spread=devices.nodes > 1), replicas=args.replicas, constraints=rules)
    limit = devices.usable_bytes if args.memory_limit is None else parse_bytes(args.memory_limit, "--memory-limit")
    offer = [choice for choice in args.offer if choice not in args.no_offer]
    if args.price is not None and args.export_costs:
        raise LayerwiseError("--price does not search: leave out --export-costs")
    check_curve(args)
    if args.html is not None and args.memory_curve is None:
        check_charts()
    files = {"--out": args.out, "--export-costs": args.export_costs, "--timeline": args.timeline}
    check_files(files | {"--plot": args.plot, "--html": args.html})
    started = time.perf_counter()
    model = _model(args, devices, batch)
    seconds = {"import": time.perf_counter() - started}
    if args.price is not None:
        _price(model, space, limit, args)
        return
    if args.memory_curve is not None:
        show_curve(model, space, offer, args)
        return
    model, result, tried = _searched(model, space, limit, offer, args)
    seconds |= result.seconds
    if args.export_costs is not None:
        _export(model, configurations(model, space, baselines(model, space), {}), result, args)
    shown = found(result, args.model, seconds, every_layer=args.layers, memory=args.memory, tried=tried)
    _deliver(model, space, result, shown, args)
    if args.out is not None and names_code(args.model) and not args.json:
        console().print(
            f"a plan runs no code: give layerwise.run and explain --model {args.model}, too", soft_wrap=True
        )


def _model(args: argparse.Namespace, devices: DeviceGraph, batch: int) -> CostModel:
    """The network on the devices, with the assumptions that the flags make."""
    io: Literal["sample", "free", "boxes"] = args.io or ("sample" if batch >= args.gpus else "free")
    kind: StepKind = "inference" if args.inference else "training"
    options = CostOptions(args.link_model, args.sync, io, args.optimizer, args.dtype, args.local_batch_norm, kind)
    return CostModel(_graph(args.model, batch, args), devices, options)


def _searched(
    model: CostModel, space: SearchSpace, limit: float, offer: Sequence[str], args: argparse.Namespace
) -> tuple[CostModel, SearchResult, list[Remedy]]:
    """The network, the result for it, and remedies where nothing fits."""
    with progress_bar("pricing transfers", quiet=args.json) as progress:
        find = partial(
            search,
            space=space,
            objective=args.objective,
            memory_bytes=args.search_memory * 2**30,
            memory_limit_bytes=limit,
            offer=offer,
            effort=args.effort,
            progress=progress,
            answers=answers(wanted=not args.no_cache),
        )
        model, result = search_halos(model, find)
    tried: list[Remedy] = []
    if not result.best.fits:
        twice = _twice(args, model.devices)
        tried = remedies(model, space, result.memory_bytes, offer=offer, more_devices=twice)
        if args.memory_limit is not None:  # asked for, and cannot be had
            raise LayerwiseError(f"--memory-limit {args.memory_limit}: {nothing_fits(result, tried)}")
    return model, result, tried


def _graph(name: str, batch: int, args: argparse.Namespace) -> LayerGraph:
    raw = load_model(name, batch, args.input_shape, args.whole)
    return raw if args.no_fuse else fuse(raw)


def offered(text: str) -> tuple[str, ...]:
    """`recompute,shard`: of OFFERS, each once."""
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not words or set(words) - set(OFFERS):
        raise argparse.ArgumentTypeError(f"{text!r}: choose of {', '.join(OFFERS)}, joined by commas")
    return words


def _twice(args: argparse.Namespace, devices: DeviceGraph) -> DeviceGraph | None:
    """Twice as many devices; None where the machine cannot have so many."""
    try:
        return load(args.profile).device_graph(2 * devices.count, args.gpus_per_node)
    except LayerwiseError:
        return None


def _export(model: CostModel, configs: Configs, result: SearchResult, args: argparse.Namespace) -> None:
    """--export-costs: the tables, with the limit and what may save memory where the limit binds."""
    tables, rows = model.tables(configs), list[Costs]()
    if result.within is not None and result.within.prices:
        with progress_bar("searching for rows that bind", quiet=args.json) as progress:
            tables, rows = constrained(LimitedSearch(model, configs, offer=result.offer), result.within, progress)
    export_costs(tables, args.export_costs, args.model, rows, result.memory_bytes)


def _price(model: CostModel, space: SearchSpace, limit: float, args: argparse.Namespace) -> None:
    """--price: one strategy beside the baselines."""
    check_names(space.constraints, [layer.name for layer in model.graph.inner])
    strategy = None if Path(args.price).is_file() else named_strategy(model, args.price, space.replicas)
    name = args.price
    if strategy is None:
        strategy, name = parse_strategy(read_json(args.price, "strategy"), model.graph, model.devices.count), "yours"
    for layer in model.graph.inner:
        space.check(strategy[layer.name], layer.space.dims, layer.name)
    yours = candidate(model, name, strategy, limit)
    named = {name: candidate(model, name, other, limit) for name, other in baselines(model, space).items()}
    shown = priced(yours, named, args.model, every_layer=args.layers, memory=args.memory)
    _deliver(model, space, yours, shown, args)


def _deliver(
    model: CostModel, space: SearchSpace, chosen: SearchResult | Candidate, shown: Report, args: argparse.Namespace
) -> None:
    """Writes the files that are asked for, and the answer."""
    best = chosen.best if isinstance(chosen, SearchResult) else chosen
    fused, shape = not args.no_fuse, args.input_shape
    plan = make_plan(args.model, args.profile, model, space, chosen, fused=fused, input_shape=shape)
    if args.out is not None:
        plan.save(args.out)
    if args.timeline is not None:
        write_timeline(best, args.timeline)
    if args.plot is not None:
        save_plot(best.plot(), args.plot)
    files = {"plan": args.out, "cost tables": args.export_costs, "timeline": args.timeline, "picture": args.plot}
    told = [part for part in shown.parts if not isinstance(part, Picture)]
    present(
        shown, args, files, page=lambda: plan_report(Planned(plan, model, space, best.memory_limit_bytes), more=told)
    )


if __name__ == "__main__":
    sys.exit(run_main(main))
