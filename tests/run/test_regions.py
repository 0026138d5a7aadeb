"""torch.autocast in the model's own code: values, gradients and types are PyTorch's, and 16 bits travel as 16 bits."""

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from layerwise.comm.base import Comm
from layerwise.graph.fuse import fuse
from layerwise.graph.types import TRACED, Region, autocast_within, effective
from layerwise.importers.load import network_of
from layerwise.plan import parse_plan
from layerwise.run.base import PREDICTED
from layerwise.run.load import load
from tests.comm.thread import run_threads
from tests.run.autocasting import BF16, F16, F32, Made, Model, both, check
from tests.run.plans import optimised_plan

exactly = False  # whether regions are left out


def region(dtype: torch.dtype | None, device: str = "cpu", *, cache: bool = True) -> AbstractContextManager[object]:
    if exactly:
        return nullcontext()
    return torch.autocast(device, dtype, enabled=dtype is not None, cache_enabled=cache)


def part(m: Model, y: Tensor, x: Tensor) -> Tensor:
    with region(BF16):
        y = m.second(y).relu()
        y = m.beside(y) @ x  # the latter is of 32 bits
    return y.float() * 2 + x


def left(m: Model, y: Tensor, x: Tensor) -> Tensor:
    with region(BF16):
        y = m.second(y)
    return m.layer_norm(m.batch_norm(y).relu()) * m.table  # in 16 bits, with parameters of 32


def half(m: Model, y: Tensor, x: Tensor) -> Tensor:
    with region(F16):
        return m.fc(m.second(y).softmax(1))


def nested(m: Model, y: Tensor, x: Tensor) -> Tensor:
    with region(BF16):
        y = m.second(y)
        with region(None):
            z = m.second(y.float()).sin()
        with region(F16):  # of another layer: PyTorch's cache has m.second's weight in bfloat16
            x = m.beside(y)
        return m.fc(torch.cat([y + z, x], 1))


def off(m: Model, y: Tensor, x: Tensor) -> Tensor:
    with region(None):
        y = torch.relu(m.second(y.float()))
    return y @ y.transpose(-1, -2)  # in 16 bits again


def twice(m: Model, y: Tensor, x: Tensor) -> Tensor:
    def body(y: Tensor) -> Tensor:
        return m.group_norm(m.second(y))

    inner = body if exactly else torch.autocast("cpu", dtype=BF16)(body)
    return torch.cat([inner(inner(y).float()), m.second(y)], 1)


def casts(m: Model, y: Tensor, x: Tensor) -> Tensor:
    with region(BF16, cache=False):
        y = m.second(y).float().exp().clamp(max=9)
        y = m.second(y) + F.avg_pool2d(y, 3, 1, 1).mean((2, 3), keepdim=True)
    return y.to(F32)


def of_another_device(m: Model, y: Tensor, x: Tensor) -> Tensor:
    with region(BF16):
        with region(F16, "cuda"):
            y = m.second(y)
        with region(None, "cuda"):
            return m.fc(y)


CASES: dict[str, tuple[Made, torch.dtype]] = {
    "a part": (part, BF16),
    "16 bits leave it": (left, BF16),
    "float16": (half, F16),
    "nested": (nested, BF16),
    "a decorated function, called twice": (twice, BF16),
    "casts inside, without a cache": (casts, BF16),
    "of another device": (of_another_device, BF16),
}


def without(model: Model, x: Tensor) -> Tensor:
    """What the model gives without its regions."""
    global exactly
    exactly = True
    try:
        return model(x)
    finally:
        exactly = False


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("case", CASES)
def test_regions_of_a_model(case: str) -> None:
    last, dtype = CASES[case]
    models = both(last)
    check(models, without(models[0], models[2]), dtype)


@pytest.mark.parametrize(("last", "around"), [(nested, F16), (off, BF16)])
def test_regions_within_autocast(last: Made, around: torch.dtype) -> None:
    """Of another type, or off: what is cast around is not used inside."""
    models = both(last)
    check(models, without(models[0], models[2]), BF16, around=around)


def test_regions_of_no_other_device_count() -> None:
    """Also those that turn autocast off: on a CPU one for CUDA does nothing."""
    off, bf16 = Region("cuda", None), Region("cpu", "bfloat16")
    assert effective((bf16, off), "cpu") == (Region(TRACED, "bfloat16"), off)
    assert effective((off, Region("cuda", "float16"), bf16), "cpu") == (Region(TRACED, "bfloat16"),)
    around = effective((bf16, off), "cuda")  # traced on CUDA
    assert [autocast_within(around, device, "float16") for device in ("cpu", "cuda")] == [None, None]
    around = effective((bf16, off), "cpu")
    assert [autocast_within(around, device, "float16") for device in ("cpu", "cuda")] == ["bfloat16", None]
    assert autocast_within((off,), "cpu", "float16") == "float16"


def test_plans_say_what_is_sent() -> None:
    """Bytes of a plan from its file are those of the regions' types, and parameters have theirs."""
    model, same, x = both(left)
    network = network_of(model, (x,), 4, "test")
    graph = fuse(network.graph)
    assert {layer.out.dtype for layer in graph.layers if layer.main.kind == "conv"} == {"float32", "bfloat16"}
    assert {item_bytes for layer in graph.layers for *_, item_bytes in layer.held()} == {4}
    same.forward = lambda x: without(model, x)  # type: ignore[method-assign]
    assert graph.digest != fuse(network_of(same, (x,), 4, "test").graph).digest
    plan = parse_plan(optimised_plan(graph, 2).dumps(), "plan.json")
    assert plan.provenance["mixed_precision"] == {"autocast": None, "device": "cpu"}

    def run(comm: Comm) -> dict[str, int]:
        made = load(plan, network, comm=comm)
        before = comm.sent.copy()
        made(x[made.share()]).float().mean().backward()
        sent = comm.sent - before
        return {name: sent[kind] for kind, name in PREDICTED.items()}

    ranks = run_threads(2, run)
    assert {name: sum(rank[name] for rank in ranks) for name in ranks[0]} == {
        name: plan.predicted[name] for name in ranks[0]
    }
