"""Rows about the layers of a model: looking through them, and changing them after the model was made parallel."""

from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import prune
from torch.optim import SGD, AdamW
from torch.optim.swa_utils import update_bn

from tests.loops.row import Numbers, changed, row, train
from tests.loops.setting import Net, Pruned, Setting, Tied, whole


@row
def named_modules(setting: Setting) -> Numbers:
    """`named_modules()`, `modules()`, `children()`, `model.head`"""
    model = setting.net()
    named = dict(model.named_modules())
    linear = [m for m in model.modules() if type(m) is nn.Linear]
    return {
        "names": str(list(named)),
        "modules": str([named[name] for name in list(named)[1:]]),
        "children": str([name for name, _ in model.named_children()]),
        "classes": str([type(m).__name__ for m in model.children()]),
        "features": str([(m.in_features, m.out_features, tuple(m.weight.shape)) for m in linear]),
        "head": str(model.head is model.get_submodule("head") is named["head"]),
        "own": str([name for name, _ in named["norm"].named_parameters()]),
        "all": str([name for name, _ in model.named_parameters()]),
        "norm": str((model.norm.eps, model.norm.momentum, isinstance(model.norm, nn.modules.batchnorm._NormBase))),
    }


@row
def decay_by_class(setting: Setting) -> Numbers:
    """weight decay by the modules' classes"""
    model = setting.parallel(Tied(), {"head": {"k": 2}})
    decay, none = set[str](), set[str]()
    for path, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            weighs = name == "weight" and isinstance(module, nn.Linear)
            (decay if weighs else none).add(f"{path}.{name}" if path else name)
    held = dict(model.named_parameters())
    both = [{"params": [held[n] for n in sorted(names & held.keys())]} for names in (decay, none)]
    optimizer = AdamW([{**both[0], "weight_decay": 0.5}, {**both[1], "weight_decay": 0.0}], lr=0.1)
    return {"decay": str(sorted(decay)), "none": str(sorted(none)), **train(setting, model, optimizer)}


@row
def frozen_part(setting: Setting) -> Numbers:
    """`model.hidden.requires_grad_(False)`"""
    model = setting.net()
    model.hidden.requires_grad_(False)
    for p in model.first.parameters():
        p.requires_grad = False
    return train(setting, model, SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))


@changed
def part_in_evaluation(model: Any) -> None:
    """`eval()` of a part without batch norms and dropouts"""
    model.head.eval()


@changed
def frozen_statistics(model: Any) -> None:
    """`eval()` of a batch norm in training"""
    model.norm.eval()


@changed
def another_momentum(model: Any) -> None:
    """setting a layer's attribute later, such as a batch norm's momentum"""
    model.norm.momentum = 0.5


@changed
def part_replaced(model: Any) -> None:
    """`model.head = nn.Linear(...)`"""
    model.head = nn.Linear(12, 10).double()


@changed
def pruned(model: Any) -> None:
    """`prune.l1_unstructured` and the like of a layer"""
    prune.l1_unstructured(model.hidden, "weight", 0.5)  # type: ignore[no-untyped-call]


@changed
def parametrized(model: Any) -> None:
    """`torch.nn.utils.parametrizations.weight_norm` of a layer"""
    nn.utils.parametrizations.weight_norm(model.hidden)


@row
def pruning_removed(setting: Setting) -> Numbers:
    """`prune.remove`"""
    model = setting.parallel(Pruned())
    prune.remove(model.hidden, "weight")  # type: ignore[no-untyped-call]
    return train(setting, model)


@row
def pruned_again(setting: Setting) -> Numbers:
    """pruning a layer once more"""
    model = setting.parallel(Pruned())
    prune.l1_unstructured(model.hidden, "weight", 0.2)  # type: ignore[no-untyped-call]
    return train(setting, model)


@row
def part_called(setting: Setting) -> Numbers:
    """calling a layer by itself, `model.head(x)`"""
    model = setting.net().eval()
    out = model.head(torch.ones(2, 12, dtype=torch.float64))
    return {"out": out.detach()}


@row
def statistics_again(setting: Setting) -> Numbers:
    """`torch.optim.swa_utils.update_bn`"""
    model = setting.net()
    update_bn([x for x, _ in setting.batches()], model)
    return whole(model)


@row
def forward_hooks(setting: Setting) -> Numbers:
    """forward hooks of the model's layers"""
    model, seen = setting.net(), []
    model.hidden.register_forward_hook(lambda module, given, out: seen.append(out.detach()))
    train(setting, model)
    return {"rows.hidden": seen[0]}


@row
def forward_hooks_of_before(setting: Setting) -> Numbers:
    """forward hooks of layers, registered before"""
    model, seen = Net(), []
    model.hidden.register_forward_hook(lambda module, given, out: seen.append(out.detach()))
    train(setting, setting.parallel(model))
    return {"rows.hidden": seen[0]}


@row
def hooks_of_all(setting: Setting) -> Numbers:
    """`register_module_forward_hook` of all modules"""
    model, seen = setting.net(), []
    hook = register_module_forward_hook(lambda module, given, out: seen.append(type(module).__name__))
    try:
        numbers = train(setting, model)
    finally:
        hook.remove()
    return {**numbers, "linear": seen.count("Linear")}
