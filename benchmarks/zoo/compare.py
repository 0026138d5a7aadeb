"""Two steps under a plan on some ranks (threads), evaluation and a checkpoint, against plain PyTorch on one device."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils import _pytree as pytree

from benchmarks.zoo.example import SAMPLES, Example
from layerwise import checkpoint
from layerwise.comm.base import Comm
from layerwise.comm.solo import SoloComm
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.importers.load import Network
from layerwise.importers.torch.read.arguments import tensors
from layerwise.plan import Plan
from layerwise.run import shapes
from layerwise.run.load import load
from layerwise.run.local_tensor import local_tensor
from layerwise.run.parallel import ParallelModule
from tests.comm.thread import run_threads
from tests.run.plans import KINDS, PREDICTED, difference, random_plan

# Rounding by 16 bits is 4e-3 of a number, and grows from layer to layer.
TOLERANCES = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.1}
# Where a network takes a part of itself to float32, as norms and rotary positions of language models do: sums that
# another plan makes in another order, and so rounds otherwise by 1e-16, may fall to the other side there, which is
# 6e-8.
NARROW = 1e-6
TIMEOUT_S = 120.0
RATE = 1e-2  # of the parameters' norm that a step changes


@dataclass(frozen=True)
class Reference:
    """What one device makes of a step: outputs that are numbers, their weights in the loss, gradients; the state later.

    rate: with which the optimizer then steps, after this batch and another; loss_after: the other batch's.
    """

    loss: float
    rate: float
    loss_after: float
    outputs: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    state: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    random: bool  # the network draws: this is of one rank's layers, not of the user's module
    evaluated: Mapping[str, tuple[Tensor, ...]]  # by stage: outputs in evaluation, of the batch and of another


def reference(given: Example, inputs: tuple[Tensor, ...], network: Network) -> Reference:
    """Of the whole batch."""
    random = any(stage.op.random for layer in network.graph.layers for stage in layer.stages)
    own: nn.Module
    if random:
        plan = random_plan(fuse(network.graph), 1, 0, "sample")
        dtype = getattr(torch, network.graph.dtype)
        # What is computed again goes through the layers, and so draws by position; evaluation is traced anew.
        own = load(plan, network, comm=SoloComm(), dtype=dtype, checkpoint_activations=True)
    else:
        own = copy.deepcopy(given.model)
    outputs = _called(own, given, inputs)
    generator = torch.Generator().manual_seed(0)
    weights = tuple(torch.randn(out.shape, generator=generator).to(out.dtype) for out in outputs)
    total = _loss(outputs, weights)
    total.backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad for name, p in own.named_parameters(remove_duplicate=False) if p.grad is not None}
    norms = _norm(p.detach() for p in own.parameters()), _norm(gradients.values())
    rate = RATE * norms[0] / max(norms[1], 1e-30)
    loss_after, _ = _trained_on(own, given, _another(inputs), weights, rate)
    state = {name: value.detach().clone() for name, value in own.state_dict().items()}
    own.eval()
    with torch.no_grad():
        evaluated = {stage: _called(own, given, _first(inputs, size)) for stage, size in stages(inputs).items()}
    made = tuple(out.detach() for out in outputs)
    return Reference(total.item(), rate, loss_after, made, weights, state, gradients, random, evaluated)


def _norm(values: Iterable[Tensor]) -> float:
    """Of the elements of all."""
    return torch.stack([torch.zeros(()), *(torch.linalg.vector_norm(x.to_dense()).cpu() for x in values)]).norm().item()


def _another(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Other samples: mirrored where they are numbers, and of other ranks."""
    return tuple(x if not x.dim() else (x.flip(-1) if x.is_floating_point() else x).roll(1, 0) for x in inputs)


def _trained_on(
    module: nn.Module, given: Example, inputs: Sequence[Tensor], weights: Sequence[Tensor], rate: float
) -> tuple[float, SGD]:
    """The loss of another training batch, after a step with the gradients at hand; it steps with those of that, too."""
    optimizer = SGD(module.parameters(), lr=rate, momentum=0.9)
    optimizer.step()
    optimizer.zero_grad()
    total = _loss(_called(module, given, inputs), weights)
    total.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return total.item(), optimizer


def stages(inputs: tuple[Tensor, ...]) -> dict[str, int]:
    """What comes after the steps, all in evaluation, and of how many samples."""
    return {"evaluation": len(inputs[0]), "another batch": ranks_of(inputs), "saved and loaded": ranks_of(inputs)}


def ranks_of(inputs: Sequence[Tensor]) -> int:
    """How many ranks these are a batch for."""
    return len(inputs[0]) // SAMPLES


def _first(inputs: Sequence[Tensor], size: int) -> tuple[Tensor, ...]:
    return tuple(x[:size] if x.dim() and len(x) == len(inputs[0]) else x for x in inputs)


def _called(module: nn.Module, given: Example, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Outputs that are numbers, of a call as the model is called."""
    positional, named = given.call(inputs)
    return _numbers(module(*positional, **named))


def compared(
    network: Network, plan: Plan, given: Example, inputs: tuple[Tensor, ...], wanted: Reference
) -> dict[str, float]:
    """The largest difference of the loss, of each output, gradient and entry of the state dict.

    Relative to the largest element of the tensor; what is 1e-3 or less in all its elements counts as 1e-3.
    AssertionError where the ranks send other bytes than were predicted.
    """
    with TemporaryDirectory() as folder:
        ranks = run_threads(
            plan.gpus, lambda comm: _steps(network, plan, comm, given, inputs, wanted, folder), timeout_s=TIMEOUT_S
        )
    losses = {
        name: (sum(rank.pop(name) for rank in ranks) / len(ranks), single)
        for name, single in (("loss", wanted.loss), ("loss of the next batch", wanted.loss_after))
    }
    away = {name: max(rank.get(name, 0.0) for rank in ranks) for name in dict.fromkeys(n for r in ranks for n in r)}
    sent = {kind: sum(rank.get(f"sent {kind}", 0.0) for rank in ranks) for kind in KINDS}
    for kind, number in sent.items():
        assert number == round(plan.predicted[PREDICTED[kind]]), f"{kind}: {number:,.0f} bytes sent, not as predicted"
    away = {name: value for name, value in away.items() if not name.startswith("sent ")}
    return away | {name: abs(mean - single) / max(abs(single), 1e-3) for name, (mean, single) in losses.items()}


def _steps(
    network: Network,
    plan: Plan,
    comm: Comm,
    given: Example,
    inputs: tuple[Tensor, ...],
    wanted: Reference,
    folder: str,
) -> dict[str, float]:
    """What one rank has, compared; its own losses, and the bytes that it sent. folder: for a checkpoint."""
    torch.set_num_threads(1)
    module = load(plan, network, comm=comm, dtype=getattr(torch, network.graph.dtype))
    before = dict(comm.sent)
    outputs = _called(module, given, _share(module, inputs))
    if len(outputs) != len(wanted.outputs):
        raise LayerwiseError(f"the plan returns {len(outputs)} tensors of numbers, PyTorch {len(wanted.outputs)}")
    parts = [_part(whole, out, comm) for whole, out in zip(wanted.outputs, outputs, strict=True)]
    weights = [_part(whole, out, comm) for whole, out in zip(wanted.weights, outputs, strict=True)]
    total = _loss(outputs, weights)
    total.backward()  # type: ignore[no-untyped-call]
    away = {"loss": total.item()}
    away |= {f"sent {kind}": float(comm.sent[kind] - before.get(kind, 0)) for kind in KINDS}
    pairs = zip(outputs, parts, strict=True)
    away |= {f"output {i}": difference(out, part) for i, (out, part) in enumerate(pairs) if part.dim()}
    boxes = {shard.name: shard.box for shard in module.shards()}
    found = {
        name: local_tensor(p.grad).clone()
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
        if name in wanted.gradients and name in boxes and name not in found:
            away[f"gradient of {name}"] = float(wanted.gradients[name].abs().max())
    next_batch = _share(module, _another(inputs))
    away["loss of the next batch"], optimizer = _trained_on(module, given, next_batch, weights, wanted.rate)
    state = module.full_state_dict()
    if state.keys() != wanted.state.keys():
        raise LayerwiseError(f"the state dict has other names: {sorted(state.keys() ^ wanted.state.keys())[:3]}")
    away |= {f"state {name}": difference(value, wanted.state[name]) for name, value in state.items()}
    module.eval()
    for stage, size in stages(inputs).items():
        if stage == "saved and loaded":
            away |= _saved_and_loaded(module, optimizer, folder)
        away |= _evaluated(module, given, _first(inputs, size), wanted.evaluated[stage], stage)
    return away


@torch.no_grad()
def _saved_and_loaded(module: ParallelModule, optimizer: SGD, folder: str) -> dict[str, float]:
    """The differences of the optimizer's state; the module's are those of what it computes next."""
    checkpoint.save(folder, module, optimizer, {})
    momenta = {p: local_tensor(state["momentum_buffer"]).clone() for p, state in optimizer.state.items()}
    for tensor in (shard.tensor for shard in module.shards()):
        tensor.zero_()
    for state in optimizer.state.values():
        local_tensor(state["momentum_buffer"]).zero_()
    checkpoint.load(folder, module, optimizer)
    loaded = [(local_tensor(optimizer.state[p]["momentum_buffer"]), before) for p, before in momenta.items()]
    return {f"saved and loaded, momentum {i}": difference(now, before) for i, (now, before) in enumerate(loaded)}


@torch.no_grad()
def _evaluated(
    module: ParallelModule, given: Example, inputs: tuple[Tensor, ...], wanted: Sequence[Tensor], stage: str
) -> dict[str, float]:
    """The differences of outputs in evaluation. LayerwiseError, with the stage, where it is refused."""
    try:
        outputs = _called(module, given, _share(module, inputs))
    except LayerwiseError as error:
        raise LayerwiseError(f"{stage}: {error}") from None
    parts = [_part(whole, out, module.comm) for whole, out in zip(wanted, outputs, strict=True)]
    pairs = enumerate(zip(outputs, parts, strict=True))
    return {f"{stage}, output {i}": difference(out, part) for i, (out, part) in pairs if part.dim()}


def _share(module: ParallelModule, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """A rank's samples."""
    batch = len(inputs[0])
    return tuple(x[module.share(batch)] if x.dim() and len(x) == batch else x for x in inputs)


@contextmanager
def traced_once() -> Iterator[None]:
    """Within it a network is traced once more for evaluation, not by every rank under every plan."""
    lock, known, trace = Lock(), dict[str, Network](), shapes.network_of

    def network(module: nn.Module, examples: Any, batch: Any, name: str, named: Any = None, **how: Any) -> Network:
        key = str((module.training, batch, pytree.tree_map_only(Tensor, lambda x: x.shape, (examples, named))))
        with lock:
            if key not in known:
                known[key] = trace(module, examples, batch, name, named, **how)
            return known[key]

    shapes.network_of = network  # type: ignore[assignment]
    try:
        yield
    finally:
        shapes.network_of = trace


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


def _part(whole: Tensor, mine: Tensor, comm: Comm) -> Tensor:
    """A rank's part of what has samples, along the dimension in which it has fewer; all of what has none."""
    if whole.shape == mine.shape or whole.dim() != mine.dim():
        return whole
    dim = next(d for d, (all_of_it, here) in enumerate(zip(whole.shape, mine.shape, strict=True)) if all_of_it != here)
    return whole.chunk(comm.size, dim)[comm.rank]
