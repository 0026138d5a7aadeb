"""Rows about the model as a module: modes, attributes, hooks, types, sizes."""

import copy
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from tests.loops.row import Numbers, changed, minimise, row, train
from tests.loops.setting import IMAGES, Balanced, Cast, Inceptive, Labelled, Net, Setting, Supervised, batch, whole


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
def other_in_evaluation(setting: Setting) -> Numbers:
    """another output in evaluation (`if self.training:`)"""
    model = setting.parallel(Inceptive(), IMAGES)
    optimizer, seen = SGD(model.parameters(), lr=0.1), []
    for x, y in setting.batches():
        model.train()
        optimizer.zero_grad()
        made = model(x)
        (F.cross_entropy(made["out"], y) + 0.3 * F.cross_entropy(made["auxiliary"], y)).backward()
        optimizer.step()
        with torch.no_grad():
            seen.append(model.eval()(x))
    model.zero_grad()
    F.nll_loss(model(x).log(), y).backward()
    none = sorted(name for name, p in model.named_parameters() if p.grad is None)
    return {"rows.first": seen[0], "rows.last": seen[-1], "none": str(none), **whole(model)}


@row
def without_labels(setting: Setting) -> Numbers:
    """evaluation without labels"""
    model = setting.parallel(Labelled(), labels=True)
    optimizer, seen = SGD(model.parameters(), lr=0.1), []
    for x, y in setting.batches():
        model.train()
        optimizer.zero_grad()
        model(x, y)[0].backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            seen += [model(x), model(x, labels=y)[1], model(x[:1])]
    return {**{f"rows.{i}": made for i, made in enumerate(seen) if i % 3 < 2}, **whole(model)}


@row
def attributes(setting: Setting) -> Numbers:
    """attributes, methods and `.config` of the model through the parallel one"""
    net = Net()
    net.loss, net.steps = nn.CrossEntropyLoss(), 7
    model = setting.parallel(net)
    train(setting, model)
    return {"classes": model.classes(), "config": str(model.config), "loss": str(model.loss), "steps": model.steps}


@row
def unwrapped(setting: Setting) -> Numbers:
    """unwrapping: `getattr(model, "module", model)`, as timm and others have it"""
    model = setting.net()
    inner: Any = model
    for _ in range(2):  # timm and others look until there is none
        inner = getattr(inner, "module", inner)
    assert inner is model
    train(setting, model)
    again = copy.deepcopy([model, inner])[1]
    again.load_state_dict(inner.state_dict())
    (x, _), *_ = setting.batches()
    return {"classes": inner.classes(), "rows.out": inner.eval()(x), "rows.again": again.eval()(x)}


@row
def hooks_of_the_model(setting: Setting) -> Numbers:
    """forward hooks of the model itself"""
    model, seen = setting.net(), []
    model.register_forward_hook(lambda module, given, out: seen.append(out.detach()))
    train(setting, model)
    return {"rows.out": seen[0]}


@changed
def initialise(model: Any) -> None:
    """`model.apply(fn)`: random initial values"""

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 0, 0.02)
            nn.init.zeros_(module.bias)
        elif type(module).__name__.startswith("Conv"):
            nn.init.kaiming_normal_(module.weight)

    torch.manual_seed(3)
    model.apply(init)
    model.head.apply(lambda module: module.weight.data.uniform_(-0.1, 0.1))


@changed
def initialise_constants(model: Any) -> None:
    """`nn.init.zeros_(model.head.bias)`, and other constants"""
    nn.init.zeros_(model.head.bias)
    nn.init.constant_(model.hidden.weight, 0.01)
    model.norm.weight.data.fill_(0.5)


@changed
def initialise_at_random(model: Any) -> None:
    """`nn.init.normal_(model.head.weight)`"""
    torch.manual_seed(3)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()


@row
def unlike_modes(setting: Setting) -> Numbers:
    """`train()` on some ranks and `eval()` on the others"""
    model = setting.net()
    model.train(setting.rank == 0)
    (x, y), *_ = setting.batches()
    F.cross_entropy(model(x), y).backward()
    return {"gradient": 0}


@changed
def evaluated_training(model: Any) -> None:
    """fine-tuning in evaluation mode"""
    model.eval()


@row
def noise(setting: Setting) -> Numbers:
    """noise on weights: `p.add_(torch.randn_like(p))`"""
    model = setting.net()
    train(setting, model)
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.data.mul_(0.9).add_(torch.randn_like(p), alpha=0.01)
    return train(setting, model)


@row
def channels_last(setting: Setting) -> Numbers:
    """`to(memory_format=torch.channels_last)`"""
    model = setting.net().to(memory_format=torch.channels_last)
    return minimise(setting, model, lambda x, y: F.cross_entropy(model(x.to(memory_format=torch.channels_last)), y))


@row
def sync_batch_norm(setting: Setting) -> Numbers:
    """`SyncBatchNorm.convert_sync_batchnorm`"""
    model = Net()
    if setting.comm is not None:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return train(setting, setting.parallel(model))


@row
def sum_of_parameters(setting: Setting) -> Numbers:
    """`parameters_to_vector`, norms of parameters"""
    model = setting.net()
    norm = sum(p.detach().norm() ** 2 for p in model.parameters())
    vector = parameters_to_vector(model.parameters())
    return {"norm": getattr(norm, "full_tensor", lambda: norm)(), "size": vector.numel()}


@row
def checkpointed(setting: Setting) -> Numbers:
    """`torch.utils.checkpoint` around the model"""
    model = setting.net(smooth=True)
    return minimise(setting, model, lambda x, y: F.cross_entropy(checkpoint(model, x, use_reentrant=False), y))


def mixed(setting: Setting, model: Any, around: torch.dtype | None) -> Numbers:
    """The usual loop in mixed precision; the numbers rounded, and the type of the outputs."""
    types = set[torch.dtype]()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", around, enabled=around is not None):
            out = model(x.float())
        types.add(out.dtype)
        return F.cross_entropy(out.float(), y)

    state = minimise(setting, model, loss)
    return {"types": types, **{name.replace("state.", "rough."): value for name, value in state.items()}}


@row
def autocast(setting: Setting) -> Numbers:
    """`torch.autocast` around the call"""
    return mixed(setting, setting.parallel(Net().float()), torch.bfloat16)


@row
def autocast_inside(setting: Setting) -> Numbers:
    """`torch.autocast` inside the model"""
    return mixed(setting, setting.parallel(Cast()), None)


@row
def scaler(setting: Setting) -> Numbers:
    """`torch.amp.GradScaler`, `unscale_`, steps that overflow"""
    model, scales = setting.net(), []
    optimizer, scaler = SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", 1024.0)
    for step, (x, y) in enumerate(setting.batches()):
        optimizer.zero_grad()
        losses = F.cross_entropy(model(x), y, reduction="none")
        if step == 1 and setting.last:
            losses = losses * torch.cat([torch.ones(len(y) - 1), torch.tensor([torch.inf])])
        scaler.scale(losses.mean()).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return {"scales": scales, **whole(model)}


@row
def compiled(setting: Setting) -> Numbers:
    """`torch.compile` of the parallel model"""
    model = setting.net()
    quick = torch.compile(model, backend="eager")
    (x, y), *_ = setting.batches()
    F.cross_entropy(quick(x), y).backward()
    return {"rows.out": quick(x).detach()}


@row
def compiled_inside(setting: Setting) -> Numbers:
    """`parallelize(..., compile=True)`"""
    return train(setting, setting.parallel(Net(), compile={"backend": "eager"}))


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
    """images of another size"""
    model = setting.parallel(Supervised(), IMAGES)
    x = torch.randn(8, 1, 12, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return {"rows.out": model(setting.share(x))[1].detach()}


@row
def other_batches(setting: Setting) -> Numbers:
    """batches of another size"""
    model = setting.net()
    x = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model.eval()
    return {"rows.out": model(setting.share(x)).detach()}


@row
def last_batches(setting: Setting) -> Numbers:
    """last batches with unequal shares"""
    model = setting.net()
    optimizer = SGD(model.parameters(), lr=0.1)
    for number, size in enumerate((8, 7, 6, 5, 7)):
        x, y = (part[:size] for part in batch(number))
        named = {} if setting.comm is None or number > 2 else {"batch": size}
        share = slice(None) if setting.comm is None else model.share(size)
        optimizer.zero_grad()
        F.cross_entropy(model(x[share], **named), y[share]).backward()
        optimizer.step()
    return whole(model)


@row
def kept_loss(setting: Setting) -> Numbers:
    """a loss that the model keeps in an attribute"""
    model = setting.parallel(Balanced())
    optimizer = SGD(model.parameters(), lr=0.1)
    for number, size in enumerate((8, 7, 8)):
        x, y = (part[:size] for part in batch(number))
        share = slice(None) if setting.comm is None else model.share(size)
        optimizer.zero_grad()
        (F.cross_entropy(model(x[share]), y[share]) + 0.1 * model.balance).backward()
        optimizer.step()
    return whole(model)


@row
def ddp_around(setting: Setting) -> Numbers:
    """`DistributedDataParallel` around the parallel model"""
    model = setting.net()
    if setting.comm is not None:
        model = nn.parallel.DistributedDataParallel(model)
    return {"classes": 10}


class Holder(nn.Module):
    """Another module around the model, with a parameter of its own, as Lightning has it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleList([inner])
        self.scale = nn.Parameter(torch.ones(10, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner[0](x) * self.scale
        return out


@row
def ddp_of_a_holder(setting: Setting) -> Numbers:
    """`DistributedDataParallel` around a holder of the parallel model (Lightning's `ddp`)"""
    model = setting.net()
    held = Holder(model)
    train(
        setting,
        held if setting.comm is None else nn.parallel.DistributedDataParallel(held),
        SGD(held.parameters(), 0.1),
    )
    return whole(model)


@row
def ddp_of_the_rest(setting: Setting) -> Numbers:
    """`DistributedDataParallel` around a module that ignores the model's tensors"""
    model = setting.net()
    held: Any = Holder(model)
    if setting.comm is not None:
        tensors = (*model.named_parameters(), *model.named_buffers())
        held._ddp_params_and_buffers_to_ignore = [f"inner.0.{name}" for name, _ in tensors]
        held = nn.parallel.DistributedDataParallel(held)
    minimise(setting, held, lambda x, y: F.cross_entropy(held(x), y))
    return whole(model)


@row
def fully_shard_of_a_holder(setting: Setting) -> Numbers:
    """`fully_shard` of the parallel model or a holder"""
    model = setting.net()
    held: Any = Holder(model)
    optimizer = SGD(held.parameters(), 0.1)
    if setting.comm is not None:
        held = fully_shard(held, mesh=init_device_mesh("cpu", (setting.comm.size,)))
    (x, y), *_ = setting.batches()
    F.cross_entropy(held(x), y).backward()
    optimizer.step()
    return whole(model)


@row
def given_model(setting: Setting) -> Numbers:
    """the given model: it is the returned one"""
    given = Net()
    model = setting.parallel(given)
    assert model is given
    assert isinstance(given, Net)
    given.head.load_state_dict(Net(1).head.state_dict())
    torch.manual_seed(1)
    nn.init.normal_(given.second.weight)
    given.hidden.requires_grad_(False)
    optimizer = SGD([p for p in given.parameters() if p.requires_grad], lr=0.1)
    numbers = train(setting, model, optimizer)
    (x, _), *_ = setting.batches()
    return {**numbers, "rows.out": given.eval()(x)}


@row
def save_pretrained(setting: Setting) -> Numbers:
    """`model.save_pretrained` of Hugging Face"""
    model = setting.net()
    train(setting, model)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(f"{folder}/weights.pt")
        full = whole(model)
        if setting.rank == 0:  # which writes on a split plan, while the others wait
            full = {f"state.{name}": value for name, value in torch.load(f"{folder}/weights.pt").items()}
    return full


@row
def another_type(setting: Setting) -> Numbers:
    """`model.float()`, `model.half()`"""
    model = setting.net()
    train(setting, model)
    model = model.float()
    state = minimise(setting, model, lambda x, y: F.cross_entropy(model(x.float()), y), 0.5)
    types = sorted({str(value.dtype) for value in state.values()})
    return {"types": str(types), **{name.replace("state.", "rough."): 100 * value for name, value in state.items()}}


@row
def shared_layers(setting: Setting) -> Numbers:
    """two parallel models that share layers"""
    actor, critic = Net(), Net(1)
    critic.first = actor.first
    models = [setting.parallel(one) for one in (actor, critic)]
    return minimise(setting, models[0], lambda x, y: F.cross_entropy(models[0](x), y) + models[1](x).square().mean())


@row
def weights_of_losses(setting: Setting) -> Numbers:
    """a parameter that only the loss reads"""
    net = Net()
    net.heat = nn.Parameter(torch.ones((), dtype=torch.float64))
    model = setting.parallel(net)
    return minimise(setting, model, lambda x, y: F.cross_entropy(model(x), y) * model.heat)
