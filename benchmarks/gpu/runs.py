"""Runs at all: this device's profile, a search with it, NCCL, and networks on one device beside eager PyTorch."""

from __future__ import annotations

import copy
import importlib.metadata
import multiprocessing
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from layerwise.models import find
from torch import Tensor, nn

import layerwise
from benchmarks.gpu.__main__ import NEEDED
from benchmarks.gpu.roofline import profile
from benchmarks.gpu.rows import Found, Row, Setting, absent, printed
from benchmarks.host_time import step_of
from layerwise.comm.start import join_default_group
from layerwise.measure.conditions import provenance
from layerwise.measure.timing import Stopwatch, nothing
from layerwise.search.__main__ import main as search
from tests.comm.operations import alone

# And their batches.
NETWORKS = {"lenet5": 64, "alexnet": 64, "vgg16": 32, "resnet18": 64, "resnet50": 32, "densenet121": 32}
NETWORKS |= {"mobilenet_v2": 32, "inception_v3": 32, "unet2d": 8, "unet3d:64": 2}
COMPILED = ("resnet18", "densenet121", "unet3d:64")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "exchange")
# Ways to run them, and `compile` of `parallelize`.
COMPILE = {"": False, "CUDA graph": False, "compiled": True, "reduce-overhead": {"mode": "reduce-overhead"}}
ON_GPU = ("CUDA graph", "reduce-overhead")
OPTIONS, STEPS = layerwise.ParallelOptions(measure_s=0, verbose=False), 3
Step = Callable[[], Tensor]


def rows(setting: Setting) -> list[Row]:
    """A row a network, and how it is run."""
    networks, compiled = ({"lenet5": 4, "mlp3": 4}, ("lenet5",)) if setting.tiny else (NETWORKS, COMPILED)
    first = [Row(take.__name__, partial(take, setting)) for take in (device, profile, searched, loader)]
    first += [Row(f"ProcessComm.{name}", partial(collective, setting, name), 60.0) for name in COLLECTIVES]
    return first + [
        Row(f"{name}, {way}" if way else name, partial(beside_eager, setting, name, networks[name], way))
        for way in COMPILE
        for name in (compiled if way else networks)
    ]


def device(setting: Setting) -> Found:
    """What is here."""
    found: Found = provenance(setting.where) | {"versions": {name: importlib.metadata.version(name) for name in NEEDED}}
    if setting.device == "cuda":
        found |= {"name": torch.cuda.get_device_name(), "free_total_bytes": torch.cuda.mem_get_info()}
        found |= {"nccl": torch.cuda.nccl.version(), "capability": torch.cuda.get_device_capability()}
    name = found.get("name", found["machine"])
    return found | {"told": f"{name}, torch {torch.__version__}, Python {found['python']}"}


def searched(setting: Setting) -> Found:
    """A plan that rests on this device's profile."""
    model = "lenet5" if setting.tiny else "vgg16"
    found = printed(search, [model, "--gpus", "8", "--profile", setting.base(), "--json"])
    return {"optimal": found["optimal"], "told": f"{model} on 8 devices, optimal: {found['optimal']}"}


def loader(setting: Setting) -> Found:
    """A BoxLoader's batches are the samples, in pinned memory where there is a GPU, and train."""
    x = torch.randn(8, *find("lenet5").input_shape).numpy()
    model = layerwise.parallelize(find("lenet5").build().to(setting.where), torch.from_numpy(x[:4]), options=OPTIONS)
    multiprocessing.set_start_method("fork", force=True)  # of the loader's worker, as in a script
    batches = [batch for (batch,) in layerwise.BoxLoader(model, x, workers=1)]
    assert torch.equal(torch.cat(batches), torch.from_numpy(x))
    assert all(batch.is_pinned() == (setting.device == "cuda") for batch in batches)
    model(batches[0].to(setting.where, non_blocking=True)).mean().backward()
    return {"told": f"{len(batches)} batches are the samples"}


def collective(setting: Setting, name: str) -> Found:
    """What ProcessComm asks of NCCL, of a world of one."""
    if name in ("exchange", "reduce_scatter") and setting.device == "cpu":
        return absent("NCCL: gloo has no messages to oneself, and its reduce-scatter does not tell when it is done")
    world_of_one(setting)
    comm = join_default_group(setting.where)
    alone(comm, name)
    comm.close()
    return {"told": f"{dist.get_backend()} gives what it was given"}


def world_of_one(setting: Setting) -> None:
    """torch.distributed's default group: NCCL on a GPU."""
    if not dist.is_initialized():
        backend = "nccl" if setting.device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def case(setting: Setting, name: str, batch: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A network, inputs and targets on the device."""
    torch.manual_seed(0)
    model = find(name).build().to(setting.where)
    x = torch.randn(batch, *find(name).input_shape, device=setting.where)
    with torch.no_grad():
        out = model(x)
    return model, x, torch.randint(out.shape[1], (batch, *out.shape[2:]), device=setting.where)


def losses(step: Step) -> Tensor:
    """Of some steps, with the same random numbers each time that it is called."""
    torch.manual_seed(1)
    return torch.tensor([float(step()) for _ in range(STEPS)])


def beside_eager(setting: Setting, name: str, batch: int, way: str) -> Found:
    """Losses and times of a step: of the model as it is (compiled likewise) and made parallel for a world of one, as
    the user's module and layer by layer.
    """
    if way in ON_GPU and setting.device == "cpu":
        return absent("a GPU")
    world_of_one(setting)
    torch.backends.cudnn.deterministic = True
    plain, x, target = case(setting, name, batch)
    for module in plain.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # ours draws by position: other values than PyTorch's
    options = {"backend": "eager"} if setting.tiny and way == "compiled" else COMPILE[way]
    graph, reference = way == "CUDA graph", step_of(copy.deepcopy(plain), x, target)
    parallel = partial(layerwise.parallelize, options=OPTIONS, compile=options)
    models = {"layerwise": parallel(copy.deepcopy(plain), x)}
    if not way:
        with patch("layerwise.run.load.replacements", return_value=None):
            models["layer by layer"] = parallel(copy.deepcopy(plain), x)
    if options:
        plain.compile(**(options if isinstance(options, dict) else {}))
    steps = {which: step_of(model, x, target) for which, model in (models | {"eager": plain}).items()}
    if graph:
        steps["layerwise"] = captured(steps["layerwise"])
    expected = {False: losses(reference), True: losses(reference)}  # a graph's replays are later steps
    found = {which: losses(step) for which, step in steps.items()}
    apart = {
        which: float((each / expected[graph and which != "eager"] - 1).abs().max()) for which, each in found.items()
    }
    assert all(apart[which] <= (1e-3 if way else 1e-4) for which in models), f"losses {found} for {expected}"
    torch.backends.cudnn.deterministic = graph  # as it was captured
    times = {which: timed(step, setting) for which, step in steps.items()}
    told = "; ".join(f"{which} {1e3 * host_s:.2f} {1e3 * step_s:.2f}" for which, (host_s, step_s) in times.items())
    return {"apart": apart, "host_s_step_s": times, "told": f"{apart['layerwise']:.1e} apart, host and step ms: {told}"}


def captured(step: Step) -> Step:
    """The replay of a whole step as a CUDA graph, after STEPS of it."""
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        losses(step)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


def timed(step: Step, setting: Setting) -> tuple[float, float]:
    """Seconds of a step on the host, until all is launched; and of one after the other."""
    wait, budget_s = torch.cuda.synchronize if setting.device == "cuda" else nothing, 0.01 if setting.tiny else 1.0
    host = Stopwatch(torch.device("cpu"), budget_s)([step], [wait]).seconds[0]
    return host, Stopwatch(setting.where, budget_s)([step]).seconds[0]
