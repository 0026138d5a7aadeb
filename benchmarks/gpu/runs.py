"""Runs at all: this device's profile, a search with it, and networks on one device beside eager PyTorch."""

from __future__ import annotations

import copy
import importlib.metadata
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from layerwise.models import find
from torch import Tensor, nn

import layerwise
from benchmarks.gpu.__main__ import NEEDED
from benchmarks.gpu.products import SHAPES, TORCH, constants, fitted, product_s, products
from benchmarks.gpu.rows import Found, Row, Setting, printed, tensor_cores
from layerwise.machine import save
from layerwise.measure.bench import Mode
from layerwise.measure.conditions import conditions, provenance
from layerwise.measure.job import base_profile
from layerwise.measure.timing import Stopwatch
from layerwise.search.__main__ import main as search

# And their batches.
NETWORKS = {"lenet5": 64, "alexnet": 64, "vgg16": 32, "resnet18": 64, "resnet50": 32, "densenet121": 32}
NETWORKS |= {"mobilenet_v2": 32, "inception_v3": 32, "unet2d": 8, "unet3d:64": 2}
COMPILED = ("resnet18", "densenet121", "unet3d:64")  # without dropout: what a graph draws is of another state
SMALL, SMALL_SHAPES, STEPS = {"lenet5": 4, "mlp3": 4}, ((64, 64, 64), (32, 1000, 512)), 3
Step = Callable[[], Tensor]


def rows(setting: Setting) -> list[Row]:
    """A row a network, and how it is run."""
    networks, compiled = (SMALL, ("lenet5",)) if setting.tiny else (NETWORKS, COMPILED)
    ways = {"": False, ", compiled": {"backend": "eager"} if setting.tiny else True}
    ways |= {} if setting.device == "cpu" else {", reduce-overhead": {"mode": "reduce-overhead"}}
    first = [Row(take.__name__, partial(take, setting)) for take in (device, profile, searched)]
    first += [Row(f"{n}, CUDA graph", partial(graphed, setting, n, networks[n])) for n in compiled]
    return first + [
        Row(name + way, partial(beside_eager, setting, name, networks[name], how), 150.0)
        for way, how in ways.items()
        for name in (compiled if way else networks)
    ]


def device(setting: Setting) -> Found:
    """What is here."""
    found: Found = provenance(setting.where) | {"versions": {name: importlib.metadata.version(name) for name in NEEDED}}
    if setting.device == "cuda":
        found |= {"name": torch.cuda.get_device_name(), "free_total_bytes": torch.cuda.mem_get_info()}
        found |= {"nccl": torch.cuda.nccl.version(), "capability": torch.cuda.get_device_capability()}
    return found | {
        "told": f"{found.get('name', found['machine'])}, torch {torch.__version__}, Python {found['python']}"
    }


def profile(setting: Setting) -> Found:
    """The roofline's constants, measured on copies and matrix products, into the profile."""
    where = conditions(Mode(setting.where, torch.float32), "float32", "off", False)
    known, budget_s = base_profile(None, None, where, setting.where), 0.002 if setting.tiny else 0.1
    found, measured = constants(setting.where, budget_s), []
    for dtype in TORCH if setting.device == "cuda" else ("float32",):
        tensor_cores(dtype == "tf32")
        measured += products(setting.where, dtype, budget_s, SMALL_SHAPES if setting.tiny else SHAPES)
    processor = fitted(measured, replace(known.processor, **found))
    source = (
        f"python -m benchmarks.gpu, torch {torch.__version__} on {where.device}, {provenance(setting.where)['date']}"
    )
    paths = [f"device.{name}" for name in found]
    paths += [f"device.tiles[{i}].{n}" for i in range(len(processor.tiles)) for n in ("rows", "columns", "efficiency")]
    sources = {**known.sources, **dict.fromkeys(paths, source)}
    save(replace(known, name="measured", processor=processor, sources=sources), setting.profile)
    off = statistics.median(abs(product_s(row, processor) / float(row["measured_s"]) - 1) for row in measured)
    told = f"{found['memory_bandwidth_bytes_per_s'] / 1e12:.3g} TB/s, floor {found['kernel_floor_s'] * 1e6:.1f} µs, "
    tiles = {f"{t.rows}x{t.columns}": t.efficiency for t in processor.tiles}
    return found | {"products": measured, "tiles": tiles, "told": f"{told}products {off:.0%} off (median)"}


def searched(setting: Setting) -> Found:
    """A plan that rests on this device's profile."""
    model = "lenet5" if setting.tiny else "vgg16"
    found = printed(search, [model, "--gpus", "8", "--profile", setting.base(), "--json"])
    return {"optimal": found["optimal"], "told": f"{model} on 8 devices, optimal: {found['optimal']}"}


def case(setting: Setting, name: str, batch: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A network, inputs and targets on the device."""
    torch.manual_seed(0)
    model = find(name).build().to(setting.where)
    x = torch.randn(batch, *find(name).input_shape, device=setting.where)
    with torch.no_grad():
        out = model(x)
    return model, x, torch.randint(out.shape[1], (batch, *out.shape[2:]), device=setting.where)


def step_of(model: nn.Module, x: Tensor, target: Tensor) -> Step:
    """One step of SGD; the loss."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def losses(step: Step) -> list[float]:
    """Of some steps, with the same random numbers each time that it is called."""
    torch.manual_seed(1)
    return [float(step()) for _ in range(STEPS)]


def world_of_one(setting: Setting) -> None:
    """torch.distributed's default group: NCCL on a GPU."""
    if not dist.is_initialized():
        backend = "nccl" if setting.device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(1, device=setting.where))


def beside_eager(setting: Setting, name: str, batch: int, how: object) -> Found:
    """Losses and times of a step, of the model as it is (compiled likewise) and made parallel for a world of one."""
    world_of_one(setting)
    torch.backends.cudnn.deterministic = True
    plain, x, target = case(setting, name, batch)
    mine = layerwise.parallelize(
        copy.deepcopy(plain), x, verbose=False, options=layerwise.ParallelOptions(measure_s=0), compile=how
    )
    expected = losses(step_of(copy.deepcopy(plain), x, target))
    if how:
        plain.compile(**(how if isinstance(how, dict) else {}))
    steps = {"eager": step_of(plain, x, target), "layerwise": step_of(mine, x, target)}
    found = {which: losses(step) for which, step in steps.items()}
    apart = max(abs(a / b - 1) for a, b in zip(found["layerwise"], expected, strict=True))
    assert apart <= (1e-3 if how else 1e-4), f"losses {found['layerwise']} for {expected}"
    torch.backends.cudnn.deterministic = False
    times = {which: timed(step, setting) for which, step in steps.items()}
    told = f"losses {apart:.1e} apart, host and step ms {shown(times['layerwise'])}, without layerwise "
    return {"apart": apart, "host_s_step_s": times, "told": told + shown(times["eager"])}


def shown(times: tuple[float, float]) -> str:
    """In ms."""
    return " ".join(f"{1e3 * seconds:.2f}" for seconds in times)


def timed(step: Step, setting: Setting) -> tuple[float, float]:
    """Seconds of a step on the host, until all is launched; and of one after the other."""
    hosts = []
    for _ in range(2 if setting.tiny else 20):
        if setting.device == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        step()
        hosts.append(time.perf_counter() - begun)
    return statistics.median(hosts), Stopwatch(setting.where, 0.01 if setting.tiny else 2.0)([step]).seconds[0]


def graphed(setting: Setting, name: str, batch: int) -> Found:
    """A whole step of the parallel model, captured as a CUDA graph, takes eager's way."""
    if setting.device == "cpu":
        return {"told": "needs a GPU"}
    plain, x, target = case(setting, name, batch)
    mine = layerwise.parallelize(copy.deepcopy(plain), x, verbose=False, options=layerwise.ParallelOptions(measure_s=0))
    expected, step = step_of(plain, x, target), step_of(mine, x, target)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        before = [float(step()) for _ in range(STEPS)]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    after = [float(replay()) for _ in range(STEPS)]
    whole = [float(expected()) for _ in range(2 * STEPS)]
    apart = max(abs(a / b - 1) for a, b in zip([*before, *after], whole, strict=True))
    assert apart <= 1e-3, f"losses {before} {after} for {whole}"
    times = timed(replay, setting), timed(expected, setting)
    told = f"losses {apart:.1e} apart, host and step ms {shown(times[0])}, eager {shown(times[1])}"
    return {"apart": apart, "host_s_step_s": times, "told": told}
