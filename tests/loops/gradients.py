"""Rows about gradients: norms, several losses, those of inputs, parameters that have none."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, AdamW

from tests.loops.row import Numbers, minimise, row, train
from tests.loops.setting import IMAGES, Generator, Net, Setting, Supervised, whole


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
    """`p.grad.norm()`"""
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
        return F.cross_entropy(out, y) + 1e-2 * sum(p.square().sum() for p in model.parameters())

    return train(setting, model, loss=loss)


@row
def noise_on_gradients(setting: Setting) -> Numbers:
    """`p.grad.mul_`, element by element"""
    model = setting.net()

    def halve() -> None:
        for p in model.parameters():
            p.grad.mul_(0.5).clamp_(-0.1, 0.1)

    return train(setting, model, before_step=halve)


@row
def two_losses(setting: Setting) -> Numbers:
    """several losses, `retain_graph`"""
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
    """two forward passes, one backward pass (siamese networks)"""
    model = setting.net()
    return minimise(
        setting, model, lambda x, y: F.cross_entropy(model(x), y) + F.mse_loss(model(0.9 * x), model(1.1 * x))
    )


@row
def inputs(setting: Setting) -> Numbers:
    """gradients of inputs (adversarial samples, saliency)"""
    model, seen = setting.net(), list[Tensor]()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        seen.extend(torch.autograd.grad(F.cross_entropy(model(x), y, reduction="sum"), x))
        return F.cross_entropy(model((x + 0.1 * seen[-1].sign()).detach()), y)

    numbers = minimise(setting, model, loss)
    return {"rows.gradients": seen[0], **numbers}


@row
def gradient_penalty(setting: Setting) -> Numbers:
    """a gradient penalty (`create_graph=True`)"""
    model = setting.net(smooth=True)

    def loss(x: Tensor, _: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = model(x)
        (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.mean() + (g.flatten(1).norm(dim=1) - 1).square().mean()

    return minimise(setting, model, loss, 0.01)


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
def laplacian(setting: Setting) -> Numbers:
    """second derivatives of inputs (physics-informed networks)"""
    model = setting.net(smooth=True)

    def loss(x: Tensor, _: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = model(x).sum(1)
        (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(g.sum(), x, create_graph=True)
        return (second.flatten(1).sum(1) + out).square().mean()

    return minimise(setting, model, loss, 1e-3)


@row
def transformed(setting: Setting) -> Numbers:
    """`torch.func.jvp`, `vmap`"""
    model = setting.net(smooth=True)
    (x, _), *_ = setting.batches()
    return {"rows.slope": torch.func.jvp(model, (x,), (x,))[1].detach()}


@row
def penalty_on_gradients(setting: Setting) -> Numbers:
    """a penalty on `p.grad` (`create_graph=True`)"""
    model = setting.net(smooth=True)
    (x, _), *_ = setting.batches()
    model(x).square().mean().backward(create_graph=True)
    slope = next(p.grad for p in model.parameters() if p.grad is not None)
    penalty = (slope * slope).sum()
    (model(x).square().mean() + penalty).backward()
    return whole(model)


@row
def of_parameters(setting: Setting) -> Numbers:
    """`torch.autograd.grad` of parameters"""
    model = setting.net()
    (x, y), *_ = setting.batches()
    made = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    return {"first": made[0]}


@row
def of_parameters_or_none(setting: Setting) -> Numbers:
    """`torch.autograd.grad(..., allow_unused=True)` of parameters"""
    model = setting.net()
    (x, y), *_ = setting.batches()
    made = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()), allow_unused=True)
    return {"first": made[0]}


@row
def of_a_penalty(setting: Setting) -> Numbers:
    """`torch.autograd.grad` of a penalty on weights alone"""
    model, numbers = setting.net(), {}
    held = dict(model.named_parameters())
    made = torch.autograd.grad(sum(p.square().sum() for p in held.values()), list(held.values()))
    for name, g in zip(held, made, strict=True):
        numbers[f"state.{name}"] = getattr(g, "full_tensor", lambda g=g: g)()
    return numbers


@row
def some_inputs(setting: Setting) -> Numbers:
    """`loss.backward(inputs=...)` of some parameters"""
    model = setting.net()
    optimizer = SGD(model.parameters(), lr=0.1)
    for x, y in setting.batches():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward(inputs=[*model.head.parameters(), *model.first.parameters()])
        none = sorted(name for name, p in model.named_parameters() if p.grad is None)
        optimizer.step()
    return {"none": str(none), **whole(model)}


@row
def some_inputs_twice(setting: Setting) -> Numbers:
    """`loss.backward(inputs=...)` of a second derivative"""
    model = setting.net(smooth=True)
    (x, _), *_ = setting.batches()
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    g.flatten(1).norm(dim=1).square().mean().backward(inputs=list(model.parameters()))
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {f"state.{name}": getattr(g, "full_tensor", lambda g=g: g)() for name, g in gradients.items()}


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


@row
def deep_supervision(setting: Setting) -> Numbers:
    """deep supervision: a loss of several outputs"""
    model = setting.parallel(Supervised(), IMAGES)

    def loss(x: Tensor, _: Tensor) -> Tensor:
        one, two = model(x)
        return one.square().mean() + 0.5 * two.square().mean()

    return minimise(setting, model, loss)


@row
def unused_output(setting: Setting) -> Numbers:
    """an output that some steps' losses do not use: its gradients are `None`"""
    model = setting.parallel(Supervised(), IMAGES)
    optimizer, calls = AdamW(model.parameters(), lr=0.1, weight_decay=0.5), []
    model.get_parameter("second.weight").register_post_accumulate_grad_hook(lambda p: calls.append(1))
    for number, (x, _) in enumerate(setting.batches()):
        optimizer.zero_grad()
        one, two = model(x)
        loss = one.square().mean()
        (loss + two.square().mean() if number == 1 else loss).backward()
        none = [name for name, p in model.named_parameters() if p.grad is None]
        assert none == ([] if number == 1 else ["second.weight", "second.bias"]), none
        optimizer.step()
    return {"calls": len(calls), **whole(model)}


@row
def output_of_some_ranks(setting: Setting) -> Numbers:
    """an output that only some ranks' losses use"""
    model = setting.parallel(Supervised(), IMAGES)
    (x, _), *_ = setting.batches()
    one, two = model(x)
    loss = one.square().mean()
    if setting.comm is None or setting.rank == 1:
        mine = two[5:] if setting.comm is None else two[1:]
        loss = loss + mine.square().sum() / (8 if setting.comm is None else 4)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {f"state.{name}": getattr(g, "full_tensor", lambda g=g: g)() for name, g in gradients.items()}


@row
def frozen(setting: Setting) -> Numbers:
    """freezing layers before `parallelize`"""
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


@row
def thawed_later(setting: Setting) -> Numbers:
    """gradual unfreezing, with `optimizer.add_param_group`"""
    model, none = setting.net(), []
    last = [p for name, p in model.named_parameters() if name.startswith(("hidden", "second"))]
    for p in last:
        p.requires_grad_(False)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)
    for number, (x, y) in enumerate(setting.batches(6)):
        if number == 2:
            for p in last:
                p.requires_grad_(True)
            optimizer.add_param_group({"params": last, "lr": 0.02})
        if number == 4:
            model.first.requires_grad_(False)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        none.append(sorted(name for name, p in model.named_parameters() if p.grad is None))
        optimizer.step()
    return {"none": str(none), **whole(model)}


@row
def accumulated_while_thawing(setting: Setting) -> Numbers:
    """freezing and unfreezing between the backward passes of a step"""
    model = setting.net()
    optimizer, sync = SGD(model.parameters(), lr=0.1, momentum=0.9), getattr(model, "no_sync", nullcontext)
    for number, (x, y) in enumerate(setting.batches(6)):
        model.first.requires_grad_(number != 1)
        model.hidden.requires_grad_(number not in (1, 2))
        model.second.requires_grad_(number not in (2, 3, 5))
        with sync() if number in (0, 3) else nullcontext():
            F.cross_entropy(model(x), y).backward()
        if number in (2, 5):
            clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return whole(model)
