"""Rows about optimizers."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from tests.loops.row import Numbers, row, train
from tests.loops.setting import Net, Setting, whole


def optimizer(name: str, title: str, make: Callable[[Iterable[nn.Parameter]], Optimizer | None]) -> None:
    """Adds the row of the usual loop with another optimizer."""

    def loop(setting: Setting) -> Numbers:
        model = setting.net()
        return train(setting, model, make(model.parameters()))

    loop.__name__, loop.__doc__ = name, title
    row(loop)


optimizer("sgd", "SGD with momentum", lambda p: None)
optimizer("adamw_foreach", "AdamW, `foreach=True`", lambda p: AdamW(p, lr=1e-2, foreach=True))
optimizer("adamw_fused", "AdamW, `fused=True`", lambda p: AdamW(p, lr=1e-2, fused=True))
optimizer("adafactor", "Adafactor", lambda p: torch.optim.Adafactor(p, lr=1e-2))
optimizer("muon", "Muon", lambda p: torch.optim.Muon([x for x in p if x.ndim == 2], lr=1e-2))


@row
def several_optimizers(setting: Setting) -> Numbers:
    """the other element-wise optimizers of torch.optim"""
    numbers: dict[str, Any] = {}
    for kind in (torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.NAdam, torch.optim.Adamax, torch.optim.RAdam):
        model = setting.net()
        made = train(setting, model, kind(model.parameters(), lr=1e-2))
        numbers |= {f"{name}.{kind.__name__}": value for name, value in made.items()}
    return numbers


class NovoGrad(Optimizer):
    """A parameter has one mean of squared gradients, a tensor of the optimizer's own, which is no DTensor.

    Ginsburg et al., Stochastic gradient methods with layer-wise adaptive moments, 2019.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.largest = torch.zeros([], dtype=torch.float64)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state, square = self.state[p], torch.sum(p.grad**2)
            if not state:
                state["square"] = torch.zeros([], dtype=p.dtype)
                state["square"].copy_(square)
            state["square"].mul_(0.9).add_(square, alpha=0.1)
            torch.maximum(self.largest, square, out=self.largest)  # as AMSGrad has it, of all parameters before
            trust = (p.norm() / p.grad.norm().clamp_(min=1e-3)).clamp_(max=10)
            p.add_(p.grad / ((state["square"] + self.largest).sqrt() + 1e-8) * trust, alpha=-1e-2)


optimizer("novograd", "NovoGrad, LARS, LAMB", NovoGrad)


@row
def parameter_groups(setting: Setting) -> Numbers:
    """parameter groups by name"""
    model = setting.net()
    plain = [p for name, p in model.named_parameters() if name.endswith("bias") or "norm" in name]
    others = [p for name, p in model.named_parameters() if not (name.endswith("bias") or "norm" in name)]
    groups = [{"params": plain, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.1, "lr": 0.05}]
    return train(setting, model, AdamW(groups, lr=1e-2))


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
    """an optimizer step in `register_post_accumulate_grad_hook`"""
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
