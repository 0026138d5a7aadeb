"""What training loops do: each function is a row of docs/how-to/training_loops.md, by its docstring.

It is called on one device with a plain model and on two ranks with a parallel one. What it returns must be equal:
`state.*` on every rank; `mean.*` as the mean over the ranks; `rows.*` one after the other; anything else on every rank.
"""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from tests.loops.setting import IMAGES, Net, Setting, whole

Numbers = Mapping[str, Any]
Loop = Callable[[Setting], Numbers]
LOOPS: list[Loop] = []


def row(loop: Loop) -> Loop:
    LOOPS.append(loop)
    return loop


def train(
    setting: Setting,
    model: Any,
    optimizer: Optimizer | None = None,
    *,
    after: Callable[[int], None] = lambda _: None,
    before_step: Callable[[], None] = lambda: None,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
) -> dict[str, Any]:
    """The usual loop."""
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9) if optimizer is None else optimizer
    losses = []
    for step, (x, y) in enumerate(setting.batches()):
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        before_step()
        optimizer.step()
        losses.append(value.detach())
        after(step)
    return {"mean.losses": torch.stack(losses), **whole(model)}


# ------------------------------------------------------------------------------------------------------- optimizers


@row
def sgd(setting: Setting) -> Numbers:
    """SGD with momentum"""
    return train(setting, setting.net())


@row
def adamw_foreach(setting: Setting) -> Numbers:
    """AdamW, also `foreach=True`"""
    model = setting.net()
    return train(setting, model, AdamW(model.parameters(), lr=1e-2, foreach=True))


@row
def adamw_fused(setting: Setting) -> Numbers:
    """AdamW with `fused=True`"""
    model = setting.net()
    return train(setting, model, AdamW(model.parameters(), lr=1e-2, fused=True))


@row
def several_optimizers(setting: Setting) -> Numbers:
    """Adagrad, RMSprop, NAdam and the other element-wise ones of torch.optim"""
    numbers: dict[str, Any] = {}
    for kind in (torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.NAdam, torch.optim.Adamax, torch.optim.RAdam):
        model = setting.net()
        made = train(setting, model, kind(model.parameters(), lr=1e-2))
        numbers |= {f"{name}.{kind.__name__}": value for name, value in made.items()}
    return numbers


@row
def parameter_groups(setting: Setting) -> Numbers:
    """parameter groups by name, no weight decay for biases and norms"""
    model = setting.net()
    plain = [p for name, p in model.named_parameters() if name.endswith("bias") or "norm" in name]
    others = [p for name, p in model.named_parameters() if not (name.endswith("bias") or "norm" in name)]
    groups = [{"params": plain, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.1, "lr": 0.05}]
    return train(setting, model, AdamW(groups, lr=1e-2))


@row
def adafactor(setting: Setting) -> Numbers:
    """Adafactor"""
    model = setting.net()
    return train(setting, model, torch.optim.Adafactor(model.parameters(), lr=1e-2))


@row
def muon(setting: Setting) -> Numbers:
    """Muon"""
    model = setting.net()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return train(setting, model, torch.optim.Muon(matrices, lr=1e-2))


@row
def lbfgs(setting: Setting) -> Numbers:
    """LBFGS"""
    model = setting.net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    (x, y), *_ = setting.batches()

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(model(x), y)
        value.backward()
        return value

    optimizer.step(closure)
    return whole(model)


@row
def optimizer_of_before(setting: Setting) -> Numbers:
    """an optimizer built before the model is made parallel"""
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1)
    return train(setting, setting.parallel(model), optimizer)


@row
def schedulers(setting: Setting) -> Numbers:
    """learning-rate schedulers, warm-up"""
    model = setting.net()
    optimizer = SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=5)
    return train(setting, model, optimizer, after=lambda _: schedule.step())


@row
def optimizer_in_hooks(setting: Setting) -> Numbers:
    """an optimizer that steps in `register_post_accumulate_grad_hook`"""
    model = setting.net()
    optimizers = {p: SGD([p], lr=0.1) for p in model.parameters()}

    def update(p: nn.Parameter) -> None:
        optimizers[p].step()
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    for x, y in setting.batches():
        F.cross_entropy(model(x), y).backward()
    return whole(model)


# -------------------------------------------------------------------------------------------------------- gradients


@row
def clip_norm(setting: Setting) -> Numbers:
    """`torch.nn.utils.clip_grad_norm_`"""
    model, norms = setting.net(), []

    def clip() -> None:
        norm = clip_grad_norm_(model.parameters(), 0.1)
        norms.append(getattr(norm, "full_tensor", lambda: norm)().double())

    numbers = train(setting, model, before_step=clip)
    return {**numbers, "norms": torch.stack(norms)}


@row
def clip_infinity_norm(setting: Setting) -> Numbers:
    """`clip_grad_norm_(..., norm_type=inf)`"""
    model = setting.net()
    return train(setting, model, before_step=lambda: clip_grad_norm_(model.parameters(), 0.01, float("inf")))


@row
def clip_own(setting: Setting) -> Numbers:
    """`model.clip_grad_norm_`, as FSDP1 has it"""
    model = setting.net()
    clip = getattr(model, "clip_grad_norm_", lambda most: clip_grad_norm_(model.parameters(), most))
    return train(setting, model, before_step=lambda: clip(0.1))


@row
def clip_value(setting: Setting) -> Numbers:
    """`clip_grad_value_`"""
    model = setting.net()
    return train(setting, model, before_step=lambda: clip_grad_value_(model.parameters(), 1e-3))


@row
def norms_by_hand(setting: Setting) -> Numbers:
    """norms of gradients by hand, `p.grad.norm()`"""
    model, norms = setting.net(), []

    def look() -> None:
        total = sum(p.grad.norm() ** 2 for p in model.parameters())
        norms.append(getattr(total, "full_tensor", lambda: total)().double())

    return {**train(setting, model, before_step=look), "norms": torch.stack(norms)}


@row
def accumulation(setting: Setting) -> Numbers:
    """gradient accumulation, with or without `no_sync()`"""
    model = setting.net()
    optimizer = SGD(model.parameters(), lr=0.1)
    steps = list(setting.batches(4))
    for number, (x, y) in enumerate(steps):
        if number == 1 and setting.comm is not None:
            with model.no_sync():
                F.cross_entropy(model(x), y).backward()
        else:
            F.cross_entropy(model(x), y).backward()
        if number % 2 == 0 and number:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.step()
    return whole(model)


@row
def zero_in_place(setting: Setting) -> Numbers:
    """`zero_grad(set_to_none=False)`, `model.zero_grad()`"""
    model = setting.net()
    optimizer = SGD(model.parameters(), lr=0.1)
    for x, y in setting.batches():
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        model.zero_grad()
    return whole(model)


@row
def penalty_on_weights(setting: Setting) -> Numbers:
    """a penalty on weights in the loss"""
    model = setting.net()

    def loss(out: Tensor, y: Tensor) -> Tensor:
        penalty = sum(p.square().sum() for p in model.parameters())
        return F.cross_entropy(out, y) + 1e-2 * getattr(penalty, "full_tensor", lambda: penalty)()

    return train(setting, model, loss=loss)


@row
def noise_on_gradients(setting: Setting) -> Numbers:
    """changing gradients in place, element by element (`p.grad.mul_`)"""
    model = setting.net()

    def halve() -> None:
        for p in model.parameters():
            p.grad.mul_(0.5).clamp_(-0.1, 0.1)

    return train(setting, model, before_step=halve)


@row
def two_losses(setting: Setting) -> Numbers:
    """several losses of one output; several backward passes with `retain_graph`"""
    model = setting.net()
    optimizer = SGD(model.parameters(), lr=0.1)
    for x, y in setting.batches():
        optimizer.zero_grad()
        out = model(x)
        F.cross_entropy(out, y).backward(retain_graph=True)
        (out.square().mean() + 0.1 * out.abs().mean()).backward()
        optimizer.step()
    return whole(model)


@row
def two_forwards(setting: Setting) -> Numbers:
    """two forward passes and one backward pass (siamese networks, consistency)"""
    model = setting.net()
    optimizer = SGD(model.parameters(), lr=0.1)
    for x, y in setting.batches():
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) + F.mse_loss(model(0.9 * x), model(1.1 * x))).backward()
        optimizer.step()
    return whole(model)


@row
def inputs(setting: Setting) -> Numbers:
    """gradients of inputs: adversarial samples, saliency"""
    model = setting.net()
    optimizer, seen = SGD(model.parameters(), lr=0.1), []
    for x, y in setting.batches():
        x = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(F.cross_entropy(model(x), y, reduction="sum"), x)
        optimizer.zero_grad()
        F.cross_entropy(model((x + 0.1 * g.sign()).detach()), y).backward()
        optimizer.step()
        seen.append(g)
    return {"rows.gradients": seen[0], **whole(model)}


@row
def gradient_penalty(setting: Setting) -> Numbers:
    """a gradient penalty (`create_graph=True`)"""
    model = setting.net(smooth=True)
    optimizer = SGD(model.parameters(), lr=0.01)
    for x, _ in setting.batches():
        x = x.clone().requires_grad_()
        out = model(x)
        (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        optimizer.zero_grad()
        (out.mean() + (g.flatten(1).norm(dim=1) - 1).square().mean()).backward()
        optimizer.step()
    return whole(model)


@row
def gradient_penalty_with_batch_norm(setting: Setting) -> Numbers:
    """a gradient penalty through a batch norm of the whole batch"""
    model = setting.net()
    (x, _), *_ = setting.batches()
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    g.square().sum(dim=(1, 2, 3)).mean().backward()
    return whole(model)


@row
def of_parameters(setting: Setting) -> Numbers:
    """`torch.autograd.grad` with respect to parameters"""
    model = setting.net()
    (x, y), *_ = setting.batches()
    made = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    return {"first": made[0]}


@row
def gan(setting: Setting) -> Numbers:
    """a GAN: two models, two optimizers"""
    critic = setting.net(seed=1)
    generator = setting.parallel(Generator(), IMAGES)
    of_critic, of_generator = SGD(critic.parameters(), lr=0.05), SGD(generator.parameters(), lr=0.05)
    for x, _ in setting.batches():
        of_critic.zero_grad()
        (critic(generator(x).detach()).mean() - critic(x).mean()).backward()
        of_critic.step()
        of_generator.zero_grad()
        (-critic(generator(x)).mean()).backward()
        of_generator.step()
    return {**whole(critic), **{f"state.generator.{k}": v for k, v in whole(generator).items()}}


class Generator(nn.Module):
    """Images of images."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 1, 3, padding=1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


@row
def deep_supervision(setting: Setting) -> Numbers:
    """deep supervision: a loss of several outputs"""
    model = setting.parallel(Supervised(), IMAGES)
    optimizer = SGD(model.parameters(), lr=0.1)
    for x, _ in setting.batches():
        optimizer.zero_grad()
        one, two = model(x)
        (one.square().mean() + 0.5 * two.square().mean()).backward()
        optimizer.step()
    return whole(model)


class Supervised(nn.Module):
    """Two outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.first(x))
        return x, self.second(x)


@row
def frozen(setting: Setting) -> Numbers:
    """freezing layers before the model is made parallel (fine-tuning)"""
    model = Net()
    model.first.requires_grad_(False)
    model = setting.parallel(model)
    return train(setting, model, SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))


@row
def frozen_later(setting: Setting) -> Numbers:
    """freezing parameters later"""
    model = setting.net()
    for name, p in model.named_parameters():
        if name.startswith("hidden"):
            p.requires_grad_(False)
    return train(setting, model, SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))


# ---------------------------------------------------------------------------------------------------------- averages


@row
def ema(setting: Setting) -> Numbers:
    """an average of weights: `AveragedModel`, EMA"""
    model = setting.net()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    numbers = train(setting, model, after=lambda _: averaged.update_parameters(model))
    (x, _), *_ = setting.batches()
    averaged.eval()
    with torch.no_grad():
        return {**numbers, "rows.averaged": averaged(x)}


@row
def ema_by_hand(setting: Setting) -> Numbers:
    """an average of weights kept by hand, from `state_dict()`"""
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
    """`copy.deepcopy` of the model; a teacher for distillation"""
    model = setting.net()
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = SGD(model.parameters(), lr=0.1)
    for x, y in setting.batches():
        optimizer.zero_grad()
        with torch.no_grad():
            soft = teacher(x)
        out = model(x)
        (F.cross_entropy(out, y) + F.mse_loss(out, soft)).backward()
        optimizer.step()
    return whole(model)


# ------------------------------------------------------------------------------------------------------------- state


@row
def save_and_load(setting: Setting) -> Numbers:
    """`layerwise.save`, `torch.save` of `full_state_dict()`, and loading into a plain model"""
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
def dcp_resume(setting: Setting) -> Numbers:
    """`torch.distributed.checkpoint` of model and optimizer, and going on from it"""
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
def pickled(setting: Setting) -> Numbers:
    """pickling the model"""
    model = setting.net()
    return whole(pickle.loads(pickle.dumps(model)))


def shared_folder(setting: Setting) -> str:
    """The same on all ranks."""
    if setting.comm is None:
        return tempfile.mkdtemp()
    return setting.comm.broadcast_text(tempfile.mkdtemp() if setting.rank == 0 else "")


# --------------------------------------------------------------------------------------------------------- the model


@row
def evaluation(setting: Setting) -> Numbers:
    """`train()`, `eval()`, `no_grad`, `inference_mode`"""
    model = setting.net()
    train(setting, model)
    model.eval()
    (x, _), *_ = setting.batches()
    with torch.no_grad():
        one = model(x)
    with torch.inference_mode():
        two = model(x)
    model.train()
    return {"rows.one": one, "rows.two": two.clone(), "training": model.training}


@row
def attributes(setting: Setting) -> Numbers:
    """attributes, methods and `.config` of the model through the parallel one"""
    model = setting.net()
    return {"classes": model.classes(), "config": str(model.config)}


@row
def module_attribute(setting: Setting) -> Numbers:
    """`model.module`, as DistributedDataParallel has it"""
    model = setting.net()
    inner = model if setting.comm is None else model.module
    return {"classes": inner.classes()}


@row
def named_modules(setting: Setting) -> Numbers:
    """`named_modules()` by the model's own names, `model.head`"""
    model = setting.net()
    names = {name for name, _ in model.named_modules()}
    return {"names": str(sorted(names & {"first", "norm", "second", "hidden", "head"})), "head": str(model.head)}


@row
def forward_hooks(setting: Setting) -> Numbers:
    """forward hooks of the model's layers"""
    model, seen = setting.net(), []
    model.hidden.register_forward_hook(lambda module, given, out: seen.append(out.detach()))
    train(setting, model)
    return {"rows.hidden": seen[0]}


@row
def hooks_of_the_model(setting: Setting) -> Numbers:
    """forward hooks of the model itself"""
    model, seen = setting.net(), []
    model.register_forward_hook(lambda module, given, out: seen.append(out.detach()))
    train(setting, model)
    return {"rows.out": seen[0]}


@row
def initialise(setting: Setting) -> Numbers:
    """`nn.init` and `apply` after the model is made parallel"""
    model = setting.net()

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.01)
            nn.init.zeros_(module.bias)

    model.apply(init)
    return train(setting, model)


@row
def channels_last(setting: Setting) -> Numbers:
    """`to(memory_format=torch.channels_last)`"""
    model = setting.net().to(memory_format=torch.channels_last)
    optimizer = SGD(model.parameters(), lr=0.1)
    for x, y in setting.batches():
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(memory_format=torch.channels_last)), y).backward()
        optimizer.step()
    return whole(model)


@row
def sync_batch_norm(setting: Setting) -> Numbers:
    """`SyncBatchNorm.convert_sync_batchnorm`"""
    model = Net()
    if setting.comm is not None:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return train(setting, setting.parallel(model))


@row
def sum_of_parameters(setting: Setting) -> Numbers:
    """`parameters_to_vector`, norms of parameters for a log"""
    model = setting.net()
    norm = sum(p.detach().norm() ** 2 for p in model.parameters())
    vector = parameters_to_vector(model.parameters())
    return {"norm": getattr(norm, "full_tensor", lambda: norm)(), "size": vector.numel()}


@row
def checkpointed(setting: Setting) -> Numbers:
    """`torch.utils.checkpoint` around the model"""
    model = setting.net(smooth=True)
    optimizer = SGD(model.parameters(), lr=0.1)
    for x, y in setting.batches():
        optimizer.zero_grad()
        F.cross_entropy(checkpoint(model, x, use_reentrant=False), y).backward()
        optimizer.step()
    return whole(model)


@row
def autocast(setting: Setting) -> Numbers:
    """`torch.autocast` around the call"""
    model = setting.net()
    optimizer = SGD(model.parameters(), lr=0.1)
    for x, y in setting.batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x).double(), y)
        loss.backward()
        optimizer.step()
    return {name.replace("state.", "rough."): value for name, value in whole(model).items()}


@row
def compiled(setting: Setting) -> Numbers:
    """`torch.compile` of the parallel model"""
    model = setting.net()
    quick = torch.compile(model, backend="eager")
    (x, y), *_ = setting.batches()
    F.cross_entropy(quick(x), y).backward()
    return {"rows.out": quick(x).detach()}


@row
def profiler(setting: Setting) -> Numbers:
    """`torch.profiler` shows layers by name"""
    model = setting.net()
    (x, y), *_ = setting.batches()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        F.cross_entropy(model(x), y).backward()
    if setting.comm is None:
        return {"shown": True}
    names = " ".join(event.key for event in profile.key_averages())
    return {"shown": "conv" in names and (setting.strategy == "data" or "second" in names)}


@row
def other_sizes(setting: Setting) -> Numbers:
    """images of another size than the example's"""
    model = setting.parallel(Supervised(), IMAGES)
    x = torch.randn(8, 1, 12, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return {"rows.out": model(setting.share(x))[1].detach()}


@row
def other_batches(setting: Setting) -> Numbers:
    """batches of another size, a short last one"""
    model = setting.net()
    x = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model.eval()
    return {"rows.out": model(setting.share(x)).detach()}


@row
def ddp_around(setting: Setting) -> Numbers:
    """`DistributedDataParallel` around the parallel model"""
    model = setting.net()
    if setting.comm is not None:
        model = nn.parallel.DistributedDataParallel(model)
    return {"classes": 10}


@row
def another_type(setting: Setting) -> Numbers:
    """moving to another element type: `model.float()`, `model.half()`"""
    model = setting.net().float()
    (x, y), *_ = setting.batches()
    F.cross_entropy(model(x.float()), y).backward()
    return {name.replace("state.", "rough."): value for name, value in whole(model).items()}
