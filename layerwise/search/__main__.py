"""python -m layerwise.search MODEL --gpus N: the best strategy, its proof, and what it saves."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

from layerwise.cli import check_files, command, console, global_batch, present, run_main, search_space, settle_machine
from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel, CostOptions
from layerwise.errors import LayerwiseError
from layerwise.files import read_json
from layerwise.graph.fuse import fuse
from layerwise.importers.load import load_model, names_code
from layerwise.importers.with_loss import model_with
from layerwise.machine import DeviceGraph, load
from layerwise.plan import parse_strategy
from layerwise.program import StepKind
from layerwise.progress import progress_bar
from layerwise.quantities import parse_bytes
from layerwise.report.content import Picture, Report
from layerwise.report.figures import check_drawable, check_plot, save_plot
from layerwise.search.baselines import NAMES, baselines, configurations, fixed_layers, named_strategy
from layerwise.search.export import export_costs
from layerwise.search.find import candidate, search
from layerwise.search.flags import fixed_degrees, parser
from layerwise.search.make_plan import make_plan, write_timeline
from layerwise.search.plot.devices import layers
from layerwise.search.remedies import Remedy, remedies
from layerwise.search.report.found import found, priced
from layerwise.search.report.page import Planned, plan_report
from layerwise.search.report.sentences import nothing_fits
from layerwise.search.result import Candidate, SearchResult


@command(parser)
def main(args: argparse.Namespace) -> None:
    """Parses, searches and prints."""
    settle_machine(args)
    args.model = model_with(args.model, args.loss)
    devices = load(args.profile).device_graph(args.gpus, args.gpus_per_node)
    devices.processor.peak(args.dtype)
    batch = global_batch(args.batch, args.global_batch, args.gpus)
    space = replace(search_space(args, spread=devices.nodes > 1), replicas=args.replicas)
    wanted = fixed_degrees(args)
    limit = devices.usable_bytes if args.memory_limit is None else parse_bytes(args.memory_limit, "--memory-limit")
    if args.price is not None and args.export_costs:
        raise LayerwiseError("--price does not search: leave out --export-costs")
    if args.price is not None and args.fix:
        raise LayerwiseError("--price does not search: leave out --fix")
    if args.plot is not None:
        check_plot(args.plot)
    if args.html is not None:
        check_drawable("--html")
    files = {"--out": args.out, "--export-costs": args.export_costs, "--timeline": args.timeline}
    check_files(files | {"--plot": args.plot, "--html": args.html})
    started = time.perf_counter()
    model = _model(args, devices, batch)
    space = replace(space, fixed=tuple(fixed_layers(model.graph, args.gpus, wanted).items()))
    seconds = {"import": time.perf_counter() - started}
    if args.price is not None:
        _price(model, space, limit, args)
        return
    result, tried = _searched(model, space, limit, args)
    seconds |= result.seconds
    if args.export_costs is not None:
        configs = configurations(model, space, baselines(model, space))
        export_costs(model.tables(configs), args.export_costs, args.model)
    shown = found(result, args.model, seconds, every_layer=args.layers, memory=args.memory, tried=tried)
    _deliver(model, space, result, shown, args)
    if args.out is not None and names_code(args.model) and not args.json:
        console().print(
            f"a plan cannot run code: pass --model {args.model} to layerwise.run and explain, too", soft_wrap=True
        )


def _model(args: argparse.Namespace, devices: DeviceGraph, batch: int) -> CostModel:
    """The network on the devices, with the assumptions of the flags."""
    kind: StepKind = "inference" if args.inference else "training"
    options = CostOptions(args.link_model, args.sync, args.io, args.optimizer, args.dtype, args.local_batch_norm, kind)
    raw = load_model(args.model, batch, args.input_shape)
    model = CostModel(raw if args.no_fuse else fuse(raw), devices, options)
    model.check_measured()
    return model


def _searched(
    model: CostModel, space: SearchSpace, limit: float, args: argparse.Namespace
) -> tuple[SearchResult, list[Remedy]]:
    """The result, and remedies if nothing fits."""
    with progress_bar("pricing transfers", quiet=args.json) as progress:
        result = search(
            model,
            space,
            objective=args.objective,
            memory_bytes=args.search_memory * 2**30,
            memory_limit_bytes=limit,
            offer=args.offer,
            effort=args.effort,
            progress=progress,
        )
    tried: list[Remedy] = []
    if not result.best.fits:
        twice = _twice(args, model.devices)
        tried = remedies(model, space, result.memory_bytes, offer=args.offer, more_devices=twice)
        if args.memory_limit is not None:  # asked for, and cannot be had
            raise LayerwiseError(f"--memory-limit {args.memory_limit}: {nothing_fits(result, tried)}")
    return result, tried


def _twice(args: argparse.Namespace, devices: DeviceGraph) -> DeviceGraph | None:
    """Twice as many devices; None if the machine cannot have so many."""
    try:
        return load(args.profile).device_graph(2 * devices.count, args.gpus_per_node)
    except LayerwiseError:
        return None


def _price(model: CostModel, space: SearchSpace, limit: float, args: argparse.Namespace) -> None:
    """--price: prices one strategy and the baselines."""
    strategy = None if Path(args.price).is_file() else named_strategy(model, args.price, space.replicas)
    name = args.price
    if strategy is None and name and not (Path(name).suffix or Path(name).exists()):
        raise LayerwiseError(
            f"--price {name!r} is neither a file nor one of {', '.join(NAMES)} or, for an MLP, grid:RxC"
        )
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
    """Writes the requested files and the answer."""
    best = chosen.best if isinstance(chosen, SearchResult) else chosen
    fused, shape = not args.no_fuse, args.input_shape
    plan = make_plan(args.model, args.profile, model, space, chosen, fused=fused, input_shape=shape)
    if args.out is not None:
        plan.save(args.out)
    if args.timeline is not None:
        write_timeline(best, args.timeline)
    if args.plot is not None:
        save_plot(layers(best), args.plot)
    files = {"plan": args.out, "cost tables": args.export_costs, "timeline": args.timeline, "picture": args.plot}
    told = [part for part in shown.parts if not isinstance(part, Picture)]
    present(
        shown, args, files, page=lambda: plan_report(Planned(plan, model, space, best.memory_limit_bytes), more=told)
    )


if __name__ == "__main__":
    sys.exit(run_main(main))
