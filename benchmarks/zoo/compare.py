"""A step under a plan on two ranks (threads) against the same step of plain PyTorch on one device."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from benchmarks.zoo.plans import RANKS
from layerwise.comm.base import Comm
from layerwise.comm.solo import SoloComm
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.importers.load import Network
from layerwise.importers.torch.read.structure import tensors
from layerwise.plan import Plan
from layerwise.run.load import load
from layerwise.run.parts import local_part
from tests.comm.thread import run_threads
from tests.run.plans import KINDS, PREDICTED, difference, random_plan

# Rounding by 16 bits is 4e-3 of a number, and grows from layer to layer.
TOLERANCES = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.1}
# Where a network takes a part of itself to float32, as norms and rotary positions of language models do: sums that
# another plan makes in another order, and so rounds otherwise by 1e-16, may fall to the other side there, which is
# 6e-8.
NARROW = 1e-6
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Reference:
    """What one device makes of a step: outputs that are numbers, their weights in the loss, the state, gradients."""

    loss: float
    outputs: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    state: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    random: bool  # the network draws: this is of one rank's layers, not of the user's module


def reference(model: nn.Module, names: Sequence[str], inputs: tuple[Tensor, ...], network: Network) -> Reference:
    """Of the whole batch."""
    random = any(stage.op.random for layer in network.graph.layers for stage in layer.stages)
    own: nn.Module
    if random:
        plan = random_plan(fuse(network.graph), 1, 0, "sample")
        layered = replace(network, module=None)
        own = load(plan, layered, comm=SoloComm(), dtype=getattr(torch, network.graph.dtype))
        outputs = _numbers(own(*inputs))
    else:
        own = copy.deepcopy(model)
        outputs = _numbers(own(**dict(zip(names, inputs, strict=True))) if names else own(*inputs))
    generator = torch.Generator().manual_seed(0)
    weights = tuple(torch.randn(out.shape, generator=generator).to(out.dtype) for out in outputs)
    total = _loss(outputs, weights)
    total.backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad for name, p in own.named_parameters(remove_duplicate=False) if p.grad is not None}
    state = {name: value.detach().clone() for name, value in own.state_dict().items()}
    return Reference(total.item(), tuple(out.detach() for out in outputs), weights, state, gradients, random)


def compared(network: Network, plan: Plan, inputs: tuple[Tensor, ...], wanted: Reference) -> dict[str, float]:
    """The largest difference of the loss, of each output, gradient and entry of the state dict.

    Relative to the largest element of the tensor; what is 1e-3 or less in all its elements counts as 1e-3.
    AssertionError where the ranks send other bytes than were predicted.
    """
    ranks = run_threads(RANKS, lambda comm: _step(network, plan, comm, inputs, wanted), timeout_s=TIMEOUT_S)
    losses = [rank.pop("loss") for rank in ranks]
    away = {name: max(rank.get(name, 0.0) for rank in ranks) for name in dict.fromkeys(n for r in ranks for n in r)}
    sent = {kind: sum(rank.get(f"sent {kind}", 0.0) for rank in ranks) for kind in KINDS}
    for kind, number in sent.items():
        assert number == round(plan.predicted[PREDICTED[kind]]), f"{kind}: {number:,.0f} bytes sent, not as predicted"
    away = {name: value for name, value in away.items() if not name.startswith("sent ")}
    mean = sum(losses) / RANKS
    return away | {"loss": abs(mean - wanted.loss) / max(abs(wanted.loss), 1e-3)}


def _step(network: Network, plan: Plan, comm: Comm, inputs: tuple[Tensor, ...], wanted: Reference) -> dict[str, float]:
    """What one rank has, compared; its own loss, and the bytes that it sent."""
    torch.set_num_threads(1)
    module = load(plan, network, comm=comm, dtype=getattr(torch, network.graph.dtype))
    before = dict(comm.sent)
    share, batch = module.share(), inputs[0].shape[0]
    outputs = _numbers(module(*(x[share] if x.dim() and x.shape[0] == batch else x for x in inputs)))
    if len(outputs) != len(wanted.outputs):
        raise LayerwiseError(f"the plan returns {len(outputs)} tensors of numbers, PyTorch {len(wanted.outputs)}")
    parts = [_part(whole, out, comm.rank) for whole, out in zip(wanted.outputs, outputs, strict=True)]
    weights = [_part(whole, out, comm.rank) for whole, out in zip(wanted.weights, outputs, strict=True)]
    total = _loss(outputs, weights)
    total.backward()  # type: ignore[no-untyped-call]
    away = {"loss": total.item()}
    away |= {f"sent {kind}": float(comm.sent[kind] - before.get(kind, 0)) for kind in KINDS}
    pairs = zip(outputs, parts, strict=True)
    away |= {f"output {i}": difference(out, part) for i, (out, part) in enumerate(pairs) if part.dim()}
    boxes = {shard.name: shard.box for shard in module.shards()}
    found = {
        name: local_part(p.grad).clone()
        for name, p in module.named_parameters()
        if p.grad is not None and name in boxes
    }
    for name, gradient in found.items():
        if name in wanted.gradients:
            mine = wanted.gradients[name][boxes[name].slices()]
            away[f"gradient of {name}"] = difference(gradient, mine)
        else:
            away[f"gradient of {name}"] = float(gradient.abs().max())
    for name in dict(module.named_parameters()):
        if name in wanted.gradients and name not in found:
            away[f"gradient of {name}"] = float(wanted.gradients[name].abs().max())
    state = module.full_state_dict()
    if state.keys() != wanted.state.keys():
        raise LayerwiseError(f"the state dict has other names: {sorted(state.keys() ^ wanted.state.keys())[:3]}")
    return away | {f"state {name}": difference(value, wanted.state[name]) for name, value in state.items()}


def _numbers(returned: object) -> tuple[Tensor, ...]:
    """The outputs that a loss can be made of."""
    return tuple(out for out in tensors(returned) if out.is_floating_point())


def _loss(outputs: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """A mean over samples: weighted, and squared, so that every element of every output counts by itself.

    What is a mean over samples already, a loss, is not squared: each rank has that of its own.
    """
    pairs = list(zip(outputs, weights, strict=True))
    parts = [(w * out).mean() + (0.5 * out.square().mean() if out.dim() else 0.0) for out, w in pairs]
    return torch.stack([part.double() for part in parts]).sum()


def _part(whole: Tensor, mine: Tensor, rank: int) -> Tensor:
    """A rank's part of what has samples, along the dimension in which it has fewer; all of what has none."""
    if whole.shape == mine.shape or whole.dim() != mine.dim():
        return whole
    dim = next(d for d, (all_of_it, here) in enumerate(zip(whole.shape, mine.shape, strict=True)) if all_of_it != here)
    return whole.chunk(RANKS, dim)[rank]
