"""Rows about values: averages of weights, files, state dicts."""

import copy
import io
import pickle
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.optim import AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.loops.row import Numbers, minimise, row, train
from tests.loops.setting import Net, Setting, whole


@row
def ema(setting: Setting) -> Numbers:
    """`AveragedModel`, EMA"""
    model = setting.net()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    numbers = train(setting, model, after=lambda _: averaged.update_parameters(model))
    (x, _), *_ = setting.batches()
    averaged.eval()
    with torch.no_grad():
        return {**numbers, "rows.averaged": averaged(x)}


@row
def ema_by_hand(setting: Setting) -> Numbers:
    """an average of weights from `state_dict()`"""
    model = setting.net()
    average = copy.deepcopy(model.state_dict())

    def update(_: int) -> None:
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                average[name].lerp_(value, 0.5)

    train(setting, model, after=update)
    model.load_state_dict(average)
    return whole(model)


@row
def copies(setting: Setting) -> Numbers:
    """`copy.deepcopy`; a teacher for distillation"""
    model = setting.net()
    teacher = copy.deepcopy(model).eval().requires_grad_(False)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            soft = teacher(x)
        out = model(x)
        return F.cross_entropy(out, y) + F.mse_loss(out, soft)

    return minimise(setting, model, loss)


@row
def save_and_load(setting: Setting) -> Numbers:
    """`layerwise.save`, `torch.save(model.full_state_dict())`, for a plain model"""
    model = setting.net()
    train(setting, model)
    full = getattr(model, "full_state_dict", model.state_dict)()
    file = io.BytesIO()
    torch.save(full, file)
    file.seek(0)
    plain = Net(seed=9)
    plain.load_state_dict(torch.load(file, weights_only=True))
    return whole(plain)


@row
def torch_save(setting: Setting) -> Numbers:
    """`torch.save(model.state_dict())` and `load_state_dict` on the same ranks"""
    model = setting.net()
    train(setting, model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    again = setting.net(seed=9)
    again.load_state_dict(torch.load(file, weights_only=False))
    return whole(again)


@row
def torch_save_by_one_rank(setting: Setting) -> Numbers:
    """`torch.save(model.state_dict())` by rank 0, and `load_state_dict` by all: DDP's habit"""
    model = setting.net()
    train(setting, model)
    folder = Path(shared_folder(setting))
    torch.save(model.state_dict(), folder / f"{setting.rank}.pt")
    if setting.comm is not None:
        setting.comm.barrier()
    again = setting.net(seed=9)
    for file in sorted(folder.glob("*.pt")):  # rank 0's, and another's, which rank 0 loads
        again.load_state_dict(torch.load(file, weights_only=True))
    return whole(again)


@row
def dcp_resume(setting: Setting) -> Numbers:
    """`torch.distributed.checkpoint` of model and optimizer"""
    model = setting.net()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    train(setting, model, optimizer)
    folder = shared_folder(setting)
    kept, state = get_state_dict(model, optimizer)
    dcp.save({"model": kept, "optimizer": state}, checkpoint_id=folder)
    again = setting.net(seed=9)
    fresh = AdamW(again.parameters(), lr=1e-2)
    kept, state = get_state_dict(again, fresh)
    both = {"model": kept, "optimizer": state}
    dcp.load(both, checkpoint_id=folder)
    set_state_dict(again, fresh, model_state_dict=both["model"], optim_state_dict=both["optimizer"])
    return train(setting, again, fresh)


@row
def full_model_state(setting: Setting) -> Numbers:
    """`get_model_state_dict(full_state_dict=True)`, `set_model_state_dict`"""
    model = setting.net()
    train(setting, model)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    again = setting.net(seed=9)
    set_model_state_dict(again, full, options=StateDictOptions(full_state_dict=True))
    return whole(again)


@row
def optimizer_state(setting: Setting) -> Numbers:
    """`optimizer.state_dict()` and `load_state_dict` on the same ranks"""
    model = setting.net()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    train(setting, model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    fresh = AdamW(model.parameters(), lr=1e-2)
    fresh.load_state_dict(state)
    return train(setting, model, fresh)


@row
def optimizer_state_of_one_device(setting: Setting) -> Numbers:
    """`load_state_dict` of one device's `optimizer.state_dict()`"""
    numbers: dict[str, Any] = {}
    for fused in (False, True):
        model = Net()
        optimizer = AdamW(model.parameters(), lr=1e-2, fused=fused)
        train(Setting(), model, optimizer)
        state = copy.deepcopy(optimizer.state_dict())
        model = setting.parallel(model)
        fresh = AdamW(model.parameters(), lr=1e-2, fused=fused)
        fresh.load_state_dict(state)
        numbers |= {f"{name}.{fused}": value for name, value in train(setting, model, fresh).items()}
    return numbers


@row
def pickled(setting: Setting) -> Numbers:
    """pickling the model"""
    model = setting.net()
    return whole(pickle.loads(pickle.dumps(model)))


def shared_folder(setting: Setting) -> str:
    """The same on all ranks."""
    if setting.comm is None:
        return tempfile.mkdtemp()
    return setting.comm.broadcast_text(tempfile.mkdtemp() if setting.rank == 0 else "")


@row
def part_written(setting: Setting) -> Numbers:
    """`p[0].zero_()`, split there"""
    model = setting.net()
    with torch.no_grad():
        model.hidden.weight[0].zero_()
    return whole(model)


@row
def sums_written(setting: Setting) -> Numbers:
    """sums of parameters, in place"""
    model = setting.net()
    numbers = {}
    for name, p in model.named_parameters():
        total = p.detach().square().sum(0)
        total.view(-1).mul_(2)
        total.add_(1)
        mean = p.detach().abs().mean().clamp_(min=1e-3)
        numbers |= {f"{name}.sum": total, f"{name}.mean": mean}
        own = torch.ones((), dtype=p.dtype)
        numbers[f"{name}.own"] = own.mul_(0.5).add_(p.detach().sum(), alpha=0.5)
    return {name: getattr(x, "full_tensor", lambda x=x: x)() for name, x in numbers.items()}


class Normalised(Net):
    """Images less their mean, by buffers of which the forward pass computes something."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("heat", torch.ones((), dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - self.mean[None, :, None, None]) / self.heat


@row
def same_buffers(setting: Setting) -> Numbers:
    """loading buffers as they were, or unused ones"""
    model = setting.parallel(Normalised())
    model.load_state_dict({**model.state_dict(), "seen": torch.ones(3, dtype=torch.float64)})
    copied = copy.deepcopy(model)
    (x, _), *_ = setting.batches()
    return {**train(setting, model), "rows.copied": copied.eval()(x)}


@row
def buffer_loaded(setting: Setting) -> Numbers:
    """loading other values of a buffer that is computed with, or a number"""
    model = setting.parallel(Normalised())
    model.load_state_dict({**model.state_dict(), "mean": torch.ones(1, dtype=torch.float64)})
    return train(setting, model)
