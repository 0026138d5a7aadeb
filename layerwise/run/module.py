"""ParallelModule: a plan as an nn.Module, with the habits of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from layerwise.comm.base import Comm, Group, Kind
from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.graph.layer import LayerGraph
from layerwise.graph.load import Network
from layerwise.ops.ends import Input, Sink, Tied
from layerwise.ops.loss import Loss
from layerwise.ops.random import combine
from layerwise.plan import Plan
from layerwise.run.exchange import transfer
from layerwise.run.executor import Executor, constants, parameter_boxes
from layerwise.run.place import Boxes, places, samples
from layerwise.run.replicas import Gradients, Replicas
from layerwise.run.shard import Shard
from layerwise.run.trace import Trace
from layerwise.run.weights import initial

LossFunction = Callable[[Tensor, Tensor], Tensor]
COUNT = "num_batches_tracked"


class ParallelModule(nn.Module):
    """One rank's part of a planned network.

    With io "sample" each rank calls it with its own samples (`share` says which) and gets their outputs; its loss is
    the mean over these, and the backward pass makes gradients of the mean over the global batch. With io "free" (a
    batch smaller than the number of ranks) each rank gives the whole batch. Then with a `loss`, a mean over samples
    and positions, `module(*inputs, target)` is the global mean on every rank, and no output is gathered; without one
    every rank gets the whole outputs, and all must compute the same loss of them.

    Parameters are this rank's boxes, under the model's names. Every rank must call forward and backward alike.
    """

    def __init__(
        self,
        network: Network,
        plan: Plan,
        comm: Comm,
        *,
        device: torch.device,
        dtype: torch.dtype,
        loss: LossFunction | None,
        seed: int,
        local_batch_norm: bool,
        autocast: torch.dtype | None,
        checkpoint_activations: bool,
    ) -> None:
        super().__init__()
        self.plan, self.comm, self.loss, self.io = plan, comm, loss, plan.io
        self.graph: LayerGraph = network.graph
        self.steps = 0  # training forwards done: the random numbers of each step follow from it
        self.seed, self.device, self.dtype = seed, device, dtype
        self._options: dict[str, Any] = {
            "dtype": dtype,
            "device": device,
            "whole_classes": loss is not None,
            "local_batch_norm": local_batch_norm,
            "autocast": autocast,
            "recompute": checkpoint_activations,
        }
        self._executors: dict[int, Executor] = {}
        self._trace: Trace | None = None
        self._synchronise = True
        self._tree = nn.Module()
        self._keys = dict(network.keys)
        self._boxes = parameter_boxes(self.graph, places(self.graph, plan))
        self._extra: dict[str, Tensor] = {}
        self._fill(network)
        self._constants = {
            layer.name: _constant(network, layer.name, layer.out.shape).to(device) for layer in constants(self.graph)
        }
        first = self._executor(self.graph.batch)
        order = [name for step in reversed(first.steps) for name in reversed(step.parameters) if name is not None]
        order += [layer.name for layer in reversed(self.graph.layers) if isinstance(layer.op, Tied)]
        trained = dict(self._tree.named_parameters())
        groups = {name: self._group(name) for name in trained}
        self._replicas = Replicas(trained, [name for name in order if name in trained], groups)
        shared = {_sharing(self._boxes[name], r) for name in order for r in range(comm.size)}
        self._prepare("sync", shared)
        self._prepare("io", {tuple(range(comm.size))})
        self._prepare("statistics", first.statistics)
        self._prepare("transfers", first.groups)
        if not trained:  # an optimizer refuses an empty list
            self._idle = nn.Parameter(torch.zeros(0, dtype=dtype, device=device))

    def _fill(self, network: Network) -> None:
        """Creates this rank's boxes of all parameters and buffers."""
        users = {
            layer.inputs[len(layer.specs) + i]: layer.space.parameters[p]
            for layer in reversed(self.graph.layers)
            for i, p in enumerate(layer.tied)
        }
        for layer in self.graph.layers:
            own = list(layer.own_parameters())
            if isinstance(layer.op, Tied):
                own = [(layer.name, users[layer.name])]
            for name, p in own:
                box = self._boxes[name][self.comm.rank]
                if box is not None:
                    value = initial(network, layer, name, p, box, self.seed, self.dtype)
                    _place(self._tree, name, value.to(self.device), p.trainable)
        for key, name in self._keys.items():
            if name not in self._boxes:  # counters, and what the network does not use
                read = network.stored.get(name)
                kept = read() if read else None
                if isinstance(kept, Tensor):
                    value = torch.zeros(kept.shape, dtype=kept.dtype) if kept.is_meta else kept.detach().clone()
                    self._extra[key] = value.cpu()

    def _prepare(self, kind: Kind, groups: set[Group]) -> None:
        self.comm.prepare(sorted(group for group in groups if len(group) > 1), kind)

    def _group(self, name: str) -> Group:
        return _sharing(self._boxes[name], self.comm.rank)

    def _executor(self, batch: int) -> Executor:
        if batch not in self._executors:
            try:
                graph = self.graph.rebatch(batch)
                for layer in graph.inner:
                    config = self.plan.strategy[layer.name]
                    room = {d.label: d.room for d in layer.space.dims if d.label}
                    if any(room.get(label, 0) < degree for label, degree in config.degrees):
                        raise LayerwiseError(f"layer {layer.name!r} cannot be cut {config}")
            except LayerwiseError as error:
                raise LayerwiseError(f"a batch of {batch} samples does not suit the plan: {error}") from None
            made = Executor(graph, self.plan, self.comm, **self._options)
            made.trace = self._trace
            if self._executors:
                self._prepare("statistics", made.statistics)
                self._prepare("transfers", made.groups)
            self._executors[batch] = made
        return self._executors[batch]

    @property
    def trace(self) -> Trace | None:
        """Collects spans of what this rank does, where set."""
        return self._trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        self._trace = trace
        for executor in self._executors.values():
            executor.trace = trace

    def share(self, batch: int | None = None) -> slice:
        """Which samples of a global batch (default: the plan's) this rank feeds."""
        return samples(self.plan, self.plan.batch if batch is None else batch)[self.comm.rank]

    def forward(self, *inputs: Tensor, batch: int | None = None) -> Any:
        """Outputs of this rank's samples (io sample), or see the class. `batch`: the global one, where it is short.

        Without `batch` a rank that feeds another number of samples than the plan says takes it that all ranks feed as
        many.
        """
        names = [layer.name for layer in self.graph.layers if type(layer.op) is Input]
        target = None
        if self.loss is not None and self.io == "free":
            *given, target = inputs
            inputs = tuple(given)
        if len(inputs) != len(names):
            raise LayerwiseError(
                f"the model takes {len(names)} inputs ({', '.join(names)})"
                f"{' and the target' if target is not None else ''}, not {len(inputs)}"
            )
        whole = self._global_batch(inputs, batch)
        executor = self._executor(whole)
        fed = {
            name: self._checked(executor, name, x.to(self.device), whole) for name, x in zip(names, inputs, strict=True)
        }
        for name, value in self._constants.items():
            shape = executor.graph[name].out.shape
            fed[name] = value if tuple(value.shape) == shape else _repeated(name, value, shape)
        seed = combine(self.seed, self.steps)
        if self.training:
            self.steps += 1
            for key, value in self._extra.items():
                if key.rpartition(".")[2] == COUNT:
                    value += 1
        differentiate = torch.is_grad_enabled()
        anchor = torch.zeros((), device=self.device, requires_grad=differentiate)
        outputs = _Run.apply(anchor, self, executor, fed, seed, whole)  # type: ignore[no-untyped-call]
        return self._returned(executor, list(outputs), target)

    def _returned(self, executor: Executor, outputs: list[Tensor], target: Tensor | None) -> Any:
        sink = executor.graph.layers[-1]
        if target is not None:
            assert self.loss is not None
            if len(outputs) > 1:
                raise LayerwiseError(f"the model has {len(outputs)} outputs: load it without a loss, and compute yours")
            return self._global_loss(executor, outputs[0], target.to(self.device))
        for i, name in enumerate(sink.inputs):
            op = executor.graph[name].op
            op = getattr(op, "main", op)
            if isinstance(op, Loss) and op.reduction != "none":
                outputs[i] = outputs[i].sum() if op.reduction == "sum" else outputs[i].mean()
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _global_loss(self, executor: Executor, out: Tensor, target: Tensor) -> Tensor:
        """The mean of the losses of all boxes, by their numbers of positions."""
        assert self.loss is not None
        box, shape = executor.sinks[0][self.comm.rank], executor.graph.layers[-1].specs[0].shape
        total = Box((0,) * len(shape), shape).volume
        if box is None:
            mine = out.sum()
        else:
            index = box.slices() if target.dim() == len(shape) else box.slices()[:1] + box.slices()[2:]
            mine = self.loss(out, target[index]) * (box.volume / total)
        return _sum_of_losses(mine, self.comm)

    def _global_batch(self, inputs: Sequence[Tensor], batch: int | None) -> int:
        fed = next(
            (
                x.shape[0]
                for layer, x in zip((s for s in self.graph.layers if type(s.op) is Input), inputs, strict=True)
                if layer.out.index("n") == 0
            ),
            self.plan.batch,
        )
        share = self.share()
        if batch is None:
            batch = fed if self.io == "free" else fed * self.comm.size
            if self.io == "sample" and fed == share.stop - share.start:
                batch = self.plan.batch
        share = self.share(batch)
        if fed != share.stop - share.start or fed == 0:
            raise LayerwiseError(
                f"rank {self.comm.rank} was given {fed} samples; of a global batch of {batch} its share is "
                f"{share.stop - share.start}: give module(..., batch=B) the number of samples of all ranks"
            )
        return batch

    def _checked(self, executor: Executor, name: str, x: Tensor, batch: int) -> Tensor:
        spec = executor.graph[name].out
        own = executor.places[name].owned[self.comm.rank]
        wanted = spec.shape if own is None else own.shape
        if tuple(x.shape) != wanted:
            raise LayerwiseError(f"input {name!r} must have shape {wanted} on this rank, not {tuple(x.shape)}")
        return x.to(self.dtype) if spec.differentiable else x.to(getattr(torch, spec.dtype))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it the backward pass leaves gradients unsynchronised; the next one outside sums them all."""
        before, self._synchronise = self._synchronise, False
        try:
            yield
        finally:
            self._synchronise = before

    def shards(self) -> list[Shard]:
        """Every parameter and buffer that this rank holds."""
        result = []
        aliases: dict[str, list[str]] = {}
        for key, name in self._keys.items():
            if key != name:
                aliases.setdefault(name, []).append(key)
        held = dict(self._tree.named_parameters()) | dict(self._tree.named_buffers())
        shapes = self._shapes()
        for name, tensor in held.items():
            box = self._boxes[name][self.comm.rank]
            assert box is not None
            group = self._group(name)
            trainable = isinstance(tensor, nn.Parameter)
            result.append(
                Shard(
                    name,
                    tuple(aliases.get(name, ())),
                    shapes[name],
                    box,
                    tensor.detach(),
                    trainable,
                    group[0] == self.comm.rank,
                )
            )
        for key, value in self._extra.items():
            shape = tuple(value.shape)
            result.append(Shard(key, (), shape, Box((0,) * len(shape), shape), value, False, self.comm.rank == 0))
        return result

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {name: p.shape for layer in self.graph.layers for name, p in layer.own_parameters()}
        return shapes | {layer.name: layer.out.shape for layer in self.graph.layers if isinstance(layer.op, Tied)}

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's boxes, by the model's names."""
        if hasattr(self, "_idle"):
            yield "idle", self._idle
        yield from self._tree.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """This rank's boxes of running statistics and the like."""
        yield from self._tree.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """This rank's boxes, by the model's names."""
        return {shard.name: shard.tensor for shard in self.shards()}

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole model's state dict, on every rank, on the CPU: it loads into the model with strict=True."""
        held = {shard.name: shard.tensor for shard in self.shards()}
        shapes = self._shapes()
        whole: dict[str, Tensor] = dict(self._extra)
        buffers = {name for layer in self.graph.layers for name, p in layer.own_parameters() if not p.trainable}
        for name, boxes in self._boxes.items():
            lowest: Boxes = tuple(box if box not in boxes[:rank] else None for rank, box in enumerate(boxes))
            every = Box((0,) * len(shapes[name]), shapes[name])
            part = transfer(lowest, (every,) * self.comm.size, self.comm.rank)
            mine = held.get(name) if lowest[self.comm.rank] is not None else None
            like = torch.empty(0, dtype=self._type(name, name in buffers), device=self.device)
            full = part.forward(self.comm, mine, like, f"state of {name}", "io")
            assert full is not None
            whole[name] = full.detach().cpu().clone()
        return {key: whole[name if name in self._boxes else key] for key, name in self._keys.items()}

    def _type(self, name: str, buffer: bool) -> torch.dtype:
        tensor = dict(self._tree.named_buffers()).get(name) if buffer else None
        return self.dtype if tensor is None else tensor.dtype

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Takes this rank's `state_dict` or a whole one."""
        missing = []
        with torch.no_grad():
            for shard in self.shards():
                value = next((state_dict[key] for key in (shard.name, *shard.aliases) if key in state_dict), None)
                if value is None:
                    missing.append(shard.name)
                elif tuple(value.shape) == shard.shape:
                    shard.tensor.copy_(value[shard.box.slices()] if shard.shape else value)
                elif tuple(value.shape) == shard.box.shape:
                    shard.tensor.copy_(value[...])
                else:
                    raise LayerwiseError(
                        f"{shard.name!r} has shape {tuple(value.shape)} in the state dict; the model has "
                        f"{shard.shape}, of which this rank holds {shard.box.shape}"
                    )
        known = set(self._keys) | set(self._boxes)
        odd = [key for key in state_dict if key not in known]
        if strict and (missing or odd):
            what = f"lacks {missing[0]!r}" if missing else f"has {odd[0]!r}, which the model does not have"
            raise LayerwiseError(f"the state dict {what}: give strict=False to ignore it")
        return torch.nn.modules.module._IncompatibleKeys(missing, odd)

    def _with(self, weights: Mapping[str, Tensor] | None) -> ParallelModule:
        if weights is not None:
            self.load_state_dict(weights)
        return self

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales all gradients so that the norm of the whole model's is at most `max_norm`; returns what it was."""
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        for name, p in self._tree.named_parameters():
            if p.grad is not None and self._group(name)[0] == self.comm.rank:
                square += p.grad.double().square().sum()
        if self.comm.size > 1:
            total = square.reshape(1)
            self.comm.all_reduce(total, tuple(range(self.comm.size)), "io", "norm of the gradients").wait()
            square = total[0]
        norm = square.sqrt()
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for _, p in self._tree.named_parameters():
            if p.grad is not None:
                p.grad *= scale.to(p.grad.dtype)
        return norm


class _Run(torch.autograd.Function):
    """The whole network as one function of autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        module: ParallelModule,
        executor: Executor,
        fed: dict[str, Tensor],
        seed: int,
        batch: int,
    ) -> tuple[Tensor, ...]:
        parameters = dict(module._tree.named_parameters()) | dict(module._tree.named_buffers())
        outputs, done = executor.forward(
            fed,
            parameters,
            training=module.training,
            seed=seed,
            differentiate=anchor.requires_grad,
            number=module.steps,
        )
        ctx.module, ctx.executor, ctx.done, ctx.parameters = module, executor, done, parameters
        ctx.training, ctx.batch = module.training, batch
        ctx.empty = [out is None for out in outputs]
        made = tuple(anchor.new_zeros(0, dtype=module.dtype) if out is None else out.clone() for out in outputs)
        ctx.mark_non_differentiable(*(out for out in made if not out.is_floating_point()))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        module, executor = ctx.module, ctx.executor
        if ctx.done is None:
            raise LayerwiseError("backward through the same forward pass twice is not supported")
        scaled = [
            None if empty else _scaled(module, executor, i, g, ctx.batch)
            for i, (g, empty) in enumerate(zip(gradients, ctx.empty, strict=True))
        ]
        into = Gradients(module._replicas, module.comm, synchronise=module._synchronise, trace=module.trace)
        executor.backward(ctx.done, scaled, ctx.parameters, into, training=ctx.training, number=module.steps)
        with torch.no_grad():
            into.finish()
        ctx.done = None
        return (None,) * 6


def _scaled(module: ParallelModule, executor: Executor, i: int, gradient: Tensor, batch: int) -> Tensor:
    """So that the gradient is of the mean over the global batch, where a rank's loss is the mean over its samples."""
    sink = executor.graph.layers[-1]
    assert isinstance(sink.op, Sink)
    op = executor.graph[sink.inputs[i]].op
    op = getattr(op, "main", op)
    if module.io == "free" or (isinstance(op, Loss) and op.reduction == "sum"):
        return gradient
    share = module.share(batch)
    scaled: Tensor = gradient * ((share.stop - share.start) / batch)
    return scaled


def _sum_of_losses(mine: Tensor, comm: Comm) -> Tensor:
    total: Tensor = _SumOfLosses.apply(mine, comm)  # type: ignore[no-untyped-call]
    return total


class _SumOfLosses(torch.autograd.Function):
    """All ranks' losses added up. Back: every rank has the same gradient already."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, comm: Comm) -> Tensor:
        total: Tensor = mine.detach().clone().reshape(1)
        if comm.size > 1:
            comm.all_reduce(total, tuple(range(comm.size)), "io", "the loss").wait()
        summed: Tensor = total.reshape(())
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _sharing(boxes: Boxes, rank: int) -> Group:
    """The ranks that hold the same box as this one."""
    mine = boxes[rank]
    return () if mine is None else tuple(r for r, box in enumerate(boxes) if box == mine)


def _place(tree: nn.Module, name: str, value: Tensor, trainable: bool) -> None:
    """Puts a tensor into nested modules, as its dotted name says."""
    *path, last = name.split(".")
    for part in path:
        if part not in tree._modules:
            tree.add_module(part, nn.Module())
        child = tree._modules[part]
        assert child is not None
        tree = child
    if trainable:
        tree.register_parameter(last, nn.Parameter(value))
    else:
        tree.register_buffer(last, value)


def _constant(network: Network, name: str, shape: tuple[int, ...]) -> Tensor:
    read = network.stored.get(name) or network.stored.get(name.partition(":")[0])
    value = None if read is None else read()
    if value is None or (isinstance(value, Tensor) and value.is_meta):
        raise LayerwiseError(f"constant {name!r} has no value (the model is on the meta device): build it for real")
    return value.detach().clone() if isinstance(value, Tensor) else torch.tensor(value)


def _repeated(name: str, value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A constant with a row a sample, at another batch: all rows must be alike."""
    if value.dim() != len(shape) or not bool((value == value[:1]).all()):
        raise LayerwiseError(f"constant {name!r} of shape {tuple(value.shape)} does not follow the batch to {shape}")
    return value[:1].expand(shape)
