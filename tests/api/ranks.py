"""What the ranks of a pool (tests/comm/pool.py) are called to do."""

import contextlib
import copy
import io
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from layerwise.api.arguments import ParallelOptions
from layerwise.api.fit import Epoch, fit
from layerwise.api.machine import cache_file
from layerwise.api.parallelize import parallelize
from layerwise.api.save import save
from layerwise.api.world import join
from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from layerwise.machine import load as load_profile
from layerwise.machine import save as save_profile
from layerwise.measure import timing
from tests.api.keywords import keywords, quiet
from tests.api.script import BATCH, SEED, data, network, sgd, step
from tests.traces import once


def trained(comm: Comm, how: dict[str, Any], source: Any = None) -> tuple[list[float], dict[str, Tensor], dict, bool]:
    """Two steps: losses, the whole state, the plan's configurations, and whether the states round-trip."""
    dataset = data(2 * BATCH)
    share = BATCH // comm.size
    example = dataset.tensors[0][:share]
    model = parallelize(network(SEED + comm.rank) if source is None else source, example, **keywords(how, comm=comm))
    first = model.full_state_dict()
    optimizer, losses = sgd(model), []
    for start in (0, BATCH):
        x, y = (t[start : start + BATCH][model.share()] for t in dataset.tensors)
        losses.append(step(model, x, y, optimizer) * len(x) / BATCH)
    whole, own = model.full_state_dict(), copy.deepcopy(model.state_dict())
    model.load_state_dict(first)
    back = all(torch.equal(value, first[name]) for name, value in model.full_state_dict().items())
    model.load_state_dict(own)
    back = back and all(torch.equal(value, whole[name]) for name, value in model.full_state_dict().items())
    return losses, whole, {name: dict(c.degrees) for name, c in model.plan.strategy.items()}, back


def predicted_within_inference_mode(comm: Comm, how: dict[str, Any]) -> Tensor:
    """What the model gives where all but its building is within torch.inference_mode()."""
    model, (x, _) = network(SEED).eval(), data(BATCH).tensors
    with torch.inference_mode():
        local = x.clone()[comm.rank * (BATCH // comm.size) :][: BATCH // comm.size]
        out: Tensor = parallelize(model, local, inference=True, **keywords(how, comm=comm))(local)
    return out.clone()


@once()
def refused(comm: Comm, how: dict[str, Any]) -> str:
    """The message of the LayerwiseError."""
    try:
        parallelize(network(), **{"example_inputs": data().tensors[0][:4], **keywords(how, comm=comm)})
    except LayerwiseError as error:
        return str(error)
    raise AssertionError("not refused")


@once()
def fitted(comm: Comm, count: int, how: dict[str, Any]) -> tuple[list[Epoch], dict[str, Tensor]]:
    """`fit` on `count` samples, with the last six held out."""
    x, y = data(count).tensors
    held_out = (x[-6:], y[-6:])
    model = network(SEED + comm.rank)
    asked = keywords(how, comm=comm, verbose=False)
    made = fit(model, (x, y), nn.CrossEntropyLoss(), "momentum", held_out=held_out, **asked)
    return made.history, model.state_dict()


@once()
def fitted_in_part(comm: Comm) -> dict[str, Tensor]:
    """An optimizer over a layer that is on one device: the other rank has nothing of it."""
    model = network()
    optimizer = torch.optim.SGD(model[7].parameters(), 0.5)
    made = fit(
        model, data(8).tensors, nn.CrossEntropyLoss(), optimizer, batch=8,
        strategy={"7": {"n": 1}}, options=ParallelOptions(comm=comm, measure_s=0, verbose=False),
    )  # fmt: skip
    held = [name for name, _ in made.module.named_parameters() if name.startswith("7.")]
    assert len(made.optimizer.param_groups[0]["params"]) == len(held)
    return model.state_dict()


class Volumes(nn.Module):
    """A convolution in space, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(1, 2, 3, padding=1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.conv(x), y)


def loss_of_volumes(comm: Comm) -> tuple[str, list[float], float]:
    """The io, losses of steps that are fed the whole batch and then boxes, and a rank's share of the input."""
    torch.manual_seed(1)
    x, y = torch.randn(1, 1, 8, 4, 4, dtype=torch.float64), torch.randint(2, (1, 8, 4, 4))
    model = parallelize(
        Volumes().double(),
        (x, y),
        **keywords({"batch": 1, "strategy": {"conv": {"d": comm.size}}}, comm=comm),
    )
    optimizer, losses, boxes = sgd(model), [], model.read_boxes()
    for number in range(3):
        feeds = (x, y) if number < 2 else tuple(v[boxes[name].slices()] for name, v in (("x", x), ("y", y)))
        optimizer.zero_grad()
        loss = model(*feeds)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model.plan.io, losses, boxes["x"].volume / x.numel()


def whole_batch(comm: Comm) -> str:
    """One sample for all ranks: each is given it, and all have the loss that one device has."""
    x, y = (t[:1] for t in data().tensors)
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)).double()
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(0.01)
    alone = F.cross_entropy(net(x), y)
    model = parallelize(net, x, **quiet(comm, batch=1))
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    assert abs(loss.item() - alone.item()) < 1e-12
    return model.plan.io


@once()
def plan_text(comm: Comm) -> str:
    """A plan for these ranks."""
    return parallelize(network(), data().tensors[0][:4], **quiet(comm)).plan.dumps()


@once()
def differently(comm: Comm, cases: dict[str, tuple[Any, Any]]) -> dict[str, str]:
    """The ranks are given different values of an argument."""
    return {name: refused(comm, {name: values[comm.rank]}) for name, values in cases.items()}


@once()
def fitted_with(comm: Comm, optimizer: Any, how: dict[str, Any]) -> str:
    """What `fit` says of an optimizer; "" where it trains."""
    try:
        asked = keywords(how, comm=comm, batch=8, verbose=False)
        fit(network(), data(8).tensors, nn.CrossEntropyLoss(), optimizer, **asked)
    except LayerwiseError as error:
        return str(error)
    return ""


@once()
def too_few(comm: Comm) -> str:
    """One sample for two ranks."""
    try:
        fit(network(), data(1).tensors, nn.CrossEntropyLoss(), "sgd", options=ParallelOptions(comm=comm, verbose=False))
    except LayerwiseError as error:
        return str(error)
    raise AssertionError("not refused")


class Named(nn.Module):
    """Called by names, with a loss of its own, a tied weight and a dict for an answer, as Hugging Face's models are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0, dtype=torch.float64), persistent=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.embed(input_ids)
        logits = self.head(hidden + self.body(hidden) * self.scale)
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def named() -> Named:
    torch.manual_seed(SEED)
    return Named().double()


def words(count: int = 4) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(2)
    return {name: torch.randint(0, 11, (count, 6), generator=draw) for name in ("labels", "input_ids")}


@once()
def by_names(comm: Comm, how: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    """One step of a model that is called by names: this rank's loss, the whole state."""
    whole = words()
    part = 4 // comm.size
    example = {name: x[:part] for name, x in whole.items()}
    model = parallelize(named(), example, **keywords(how, comm=comm, verbose=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    out = model(**{name: x[model.share()] for name, x in reversed(whole.items())})
    out["loss"].backward()
    optimizer.step()
    return out["loss"].item(), model.full_state_dict()


@contextlib.contextmanager
def short_rounds() -> Iterator[None]:
    """Links are measured in less time: what comes of it is as noisy as it likes."""
    before = timing.ROUND_S, timing.TRIES
    timing.ROUND_S, timing.TRIES = 0.003, 1
    try:
        yield
    finally:
        timing.ROUND_S, timing.TRIES = before


def in_a_bad_cache(comm: Comm, folder: str) -> tuple[str, str]:
    """What rank 0's table says of the cache when nothing is measured, and when it is."""
    os.environ["LAYERWISE_CACHE"] = folder
    path = cache_file(join(comm.device, comm=comm))
    if comm.rank == 0 and path.parent.parent.is_dir():
        path.parent.mkdir(exist_ok=True)
        path.write_text("{garbage")
    comm.barrier()
    told = []
    for seconds in (0.0, 0.1):
        text = io.StringIO()
        with contextlib.redirect_stdout(text), short_rounds():
            parallelize(network(), data().tensors[0][:4], options=ParallelOptions(comm=comm, measure_s=seconds))
        told.append(" ".join(text.getvalue().split()))
    return told[0], told[1]


def with_a_stale_cache(comm: Comm, folder: str) -> list[str]:
    """What rank 0 says: of no cache, of one with links 1,000 times as fast as they are, and with layers as slow."""
    os.environ["LAYERWISE_CACHE"] = folder
    path, told = cache_file(join(comm.device, comm=comm)), []
    for spoilt in (None, "links", "layers"):
        if comm.rank == 0 and spoilt:
            profile = load_profile(path)
            assert profile.links is not None
            if spoilt == "links":
                curves = [replace(c, knots=tuple((x, y / 1000) for x, y in c.knots)) for c in profile.links.curves]
                profile = replace(profile, links=replace(profile.links, curves=tuple(curves)))
            else:
                (times,) = profile.layers
                cells = {
                    name: {size: replace(t, forward_s=1000 * (t.forward_s + t.backward_s)) for size, t in row.items()}
                    for name, row in times.cells.items()
                }
                profile = replace(profile, layers=(replace(times, cells=cells),))
            save_profile(profile, path)
        comm.barrier()
        text = io.StringIO()
        with contextlib.redirect_stdout(text), short_rounds():
            parallelize(network(), data().tensors[0][:4], options=ParallelOptions(comm=comm, measure_s=20.0))
        told.append(" ".join(text.getvalue().split()))
        comm.barrier()
    return told


def on_the_default_group(comm: Comm) -> tuple[list[float], dict[str, Tensor], tuple[int, ...], str]:
    """As in a script that has called init_process_group itself; the mesh has the ranks the other way round."""
    mesh = DeviceMesh("cpu", torch.tensor([1, 0]))
    dataset = data(BATCH)
    example = dataset.tensors[0][:4]
    model = parallelize(network(SEED + comm.rank), example, strategy="data", device_mesh=mesh)
    x, y = (t[model.share()] for t in dataset.tensors)
    loss = step(model, x, y, sgd(model))
    again = parallelize(
        network(), dataset.tensors[0][:4], strategy="data", options=ParallelOptions(measure_s=0, verbose=False)
    )
    assert again.comm is model.comm
    try:
        parallelize(network(), dataset.tensors[0][:4], device_mesh=DeviceMesh("cpu", torch.tensor([[[0, 1]]])))
    except LayerwiseError as error:
        return [loss], model.full_state_dict(), model.plan.device_order, str(error)
    raise AssertionError("a mesh of three dimensions was taken")


@once()
def fine_tuned(comm: Comm) -> tuple[float, int, dict[str, Tensor]]:
    """One step of the head: the whole loss, bytes of gradients that this rank sent, the whole state."""
    x, y = data(BATCH).tensors
    net = network()
    net[:5].requires_grad_(False)
    model = parallelize(net, x[: BATCH // comm.size], **quiet(comm, strategy="data"))
    before = comm.sent["sync"]
    loss = step(model, x[model.share()], y[model.share()], sgd(model))
    sent = comm.sent["sync"] - before
    whole = sum(comm.all_gather_object(loss)) / comm.size
    return whole, sent, model.full_state_dict()


@once()
def saved(comm: Comm, path: str) -> tuple[dict[str, Tensor], str]:
    """The whole state; it is saved, and not where that is impossible."""
    model = parallelize(network(), data().tensors[0][:4], **quiet(comm, strategy="model"))
    save(model, path)
    assert Path(path).exists()
    try:
        save(model, Path(path) / "below.pt")
    except LayerwiseError as error:
        return model.full_state_dict(), str(error)
    raise AssertionError("saved below a file")
