"""Inputs: this rank's samples, checked, and the network's constants; Batch: how many samples all ranks feed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from layerwise.importers.load import Network
from layerwise.ops.base import Role
from layerwise.plan import Plan
from layerwise.run.guards.compare_ranks import RankComparison
from layerwise.run.options import RuntimeOptions
from layerwise.run.schedule.schedule import Schedule, samples
from layerwise.tensorfile import dtype_name


class Inputs:
    """The inputs and constants that the layers of a rank begin with."""

    def __init__(self, network: Network, plan: Plan, comm: Comm, options: RuntimeOptions) -> None:
        self.plan, self.comm, self.options = plan, comm, options
        graph, uses, self._undifferentiated = network.graph, network.graph.consumers(), network.inputs_without_gradient
        self._layers = [layer for layer in graph.layers if layer.role is Role.INPUT]
        self._types = {layer.name: [getattr(torch, layer.out.dtype)] for layer in self._layers}
        for layer in self._layers:  # beside the example's
            if layer.out.differentiable:
                beside = (options.element_type(layer.out.dtype, graph), options.autocast)
                self._types[layer.name] += [dtype for dtype in beside if dtype is not None]
            elif all(
                use.main.ids and layer.name not in use.inputs[1:] for use in map(graph.__getitem__, uses[layer.name])
            ):
                self._types[layer.name] += [torch.int64, torch.int32]  # as PyTorch takes ids
        self._constants = {
            layer.name: _constant(network, layer.name).to(options.device, options.element_type(layer.out.dtype, graph))
            for layer in graph.layers
            if layer.role is Role.CONSTANT
        }

    def fed_samples(self, inputs: Sequence[Tensor], *, target: bool) -> int:
        """Returns the number of samples. LayerwiseError for too many inputs, or other things than tensors."""
        if len(inputs) != len(self._layers):
            raise LayerwiseError(
                f"the model takes {len(self._layers)} inputs ({', '.join(layer.name for layer in self._layers)})"
                f"{' and the target' if target else ''}, not {len(inputs)}"
            )
        for layer, x in zip(self._layers, inputs, strict=True):
            if not isinstance(x, Tensor):
                raise LayerwiseError(f"input {layer.name!r} is of type {type(x).__name__}: give a tensor")
        if self.plan.io == "boxes":
            return self.plan.batch
        pairs = zip(self._layers, inputs, strict=True)
        return next((x.shape[0] for layer, x in pairs if layer.out.index("n") == 0), self.plan.batch)

    def differentiated(self, inputs: Sequence[Tensor], scales: Sequence[float]) -> frozenset[str]:
        """Returns the inputs of which gradients are wanted. scales: of the outputs' gradients.

        LayerwiseError where they would not be those of this rank's own loss.
        """
        if not torch.is_grad_enabled():
            return frozenset()
        names = frozenset(layer.name for layer, x in zip(self._layers, inputs, strict=True) if x.requires_grad)
        if names and self.comm.size > 1 and (self.plan.io != "sample" or any(scale != 1 for scale in scales)):
            raise LayerwiseError(
                f"input {min(names)!r} requires a gradient, which is made only where all ranks feed equally many "
                "samples and the loss is a mean: give it detached, or such a batch"
            )
        if names and self._undifferentiated is not None:
            raise LayerwiseError(
                f"input {min(names)!r} requires a gradient, which the layers do not make as the model does: give it "
                f"detached, or make the model parallel with example_inputs that require one ({self._undifferentiated})"
            )
        return names

    def fed(self, schedule: Schedule, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        """Returns each layer's box, constants too, on the device. LayerwiseError for a wrong shape or element type."""
        fed = {
            layer.name: self._checked(schedule, layer.name, x.to(self.options.device))
            for layer, x in zip(self._layers, inputs, strict=True)
        }
        for name, value in self._constants.items():
            shape = schedule.graph[name].out.shape
            fed[name] = value if tuple(value.shape) == shape else _repeated(name, value, shape)
        return fed

    def _checked(self, schedule: Schedule, name: str, x: Tensor) -> Tensor:
        spec = schedule.graph[name].out
        own = schedule.places[name].owned.each[self.comm.rank]
        wanted = spec.shape if own is None else own.shape
        if tuple(x.shape) != wanted:
            raise LayerwiseError(f"input {name!r} must have shape {wanted} on this rank, not {tuple(x.shape)}")
        if x.dtype not in self._types[name]:
            raise LayerwiseError(
                f"input {name!r} is {dtype_name(x.dtype)}, but the model was made parallel for "
                f"{dtype_name(self._types[name][0])}: give x.to({self._types[name][0]})"
            )
        return x.to(schedule.options.element_type(spec.dtype, schedule.graph))


def _constant(network: Network, name: str) -> Tensor:
    value = network.constant(name)
    if value is None or (isinstance(value, Tensor) and value.is_meta):
        raise LayerwiseError(f"constant {name!r} has no value (the model is on the meta device): build it for real")
    return value.detach().clone() if isinstance(value, Tensor) else torch.tensor(value)


def _repeated(name: str, value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns a constant with a row a sample at another batch. LayerwiseError where its rows differ."""
    if value.dim() != len(shape) or not bool((value == value[:1]).all()):
        raise LayerwiseError(f"constant {name!r} of shape {tuple(value.shape)} does not follow the batch to {shape}")
    return value[:1].expand(shape)


class Batch:
    """The samples of one call of the model. All ranks make one, in the same calls.

    What the ranks have been given travels while they compute; `total` waits for it.
    """

    def __init__(
        self,
        plan: Plan,
        comm: Comm,
        fed: int,
        given: int | None,
        sizes: tuple[tuple[int, ...], ...] | None = None,
        *,
        as_planned: bool = True,
        training: bool | None = None,
        alike: RankComparison | None = None,
        step: int = 0,
    ) -> None:
        """fed: this rank's samples. given: `batch=`, or None. sizes: what all ranks must have alike, if anything.

        as_planned: each must feed its share of the batch, because the plan moves samples between ranks. training: the
        mode, where all must have one. alike: what else the ranks compare in a training `step` (0: none).
        """
        self._plan, self._comm, self._sizes, self._as_planned = plan, comm, sizes, as_planned
        self._agreement: tuple[int, slice] | None = None
        digest = 0 if sizes is None else hash(sizes)  # of whole numbers: alike in all processes
        self._told = comm.tell((fed, given or 0, digest, int(bool(training)), *(alike.numbers(step) if alike else ())))
        self._alike = alike

    @property
    def total(self) -> int:
        """Returns the samples of all ranks. LayerwiseError, on each, where one has another number than its share."""
        return self._agreed()[0]

    @property
    def share(self) -> slice:
        """Returns this rank's samples of those of all."""
        return self._agreed()[1]

    def _agreed(self) -> tuple[int, slice]:
        # No cached_property: until Python 3.12 ranks that are threads share its lock, and this communicates.
        if self._agreement is None:
            self._agreement = self._checked()
        return self._agreement

    def _checked(self) -> tuple[int, slice]:
        rows = self._told()
        counts, given, sizes, modes = (list(column) for column in zip(*(row[:4] for row in rows), strict=True))
        if len(set(modes)) > 1:
            which = [rank for rank, training in zip(self._comm.members.ranks, modes, strict=True) if training]
            raise LayerwiseError(
                f"the model is in training mode on ranks {_listed(which)} and in evaluation mode on the others: call "
                "train() or eval() on all of them"
            )
        if self._alike is not None:
            self._alike.check([row[4:] for row in rows])
        if len(set(given)) > 1:
            reported = ", ".join(f"batch={number}" if number else "no batch=" for number in given)
            raise LayerwiseError(
                f"the ranks called the model with {reported}: give all of them the number of samples that they have "
                "together, or none"
            )
        if len(set(sizes)) > 1:
            shapes = sorted(set(self._comm.all_gather_text(str(self._sizes))))
            raise LayerwiseError(
                f"the ranks were given samples of unlike shapes, {' and '.join(shapes)}: pad all of a batch alike"
            )
        free = self._plan.io != "sample"
        fed = counts[0] if free else sum(counts)
        total = given[0] or fed
        any_will_do = total == fed and not self._as_planned
        slices = self._one_after_the_other(counts) if any_will_do else samples(self._plan, total)
        shares = [share.stop - share.start for share in slices]
        if not free and total < len(counts):
            raise LayerwiseError(
                f"a batch of {total} samples does not give each of {len(counts)} ranks one: leave it out "
                "(drop_last=True), or pad it"
            )
        if counts != shares or not all(counts):
            each = f"their shares of a batch of {total} are {_listed(shares)}"
            raise LayerwiseError(
                f"the ranks were given {_listed(counts)} samples, and {'all must feed the same' if free else each}: "
                "give each rank x[model.share(B)], where B is the number of samples of all ranks (model(..., batch=B))"
            )
        return total, slices[self._comm.rank]

    def _one_after_the_other(self, counts: list[int]) -> tuple[slice, ...]:
        """Returns slices of as many samples as each rank has, in the order of the plan's devices."""
        order = self._plan.device_order
        ends = dict(zip(order, accumulate(counts[rank] for rank in order), strict=True))
        return tuple(slice(ends[rank] - count, ends[rank]) for rank, count in enumerate(counts))


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
