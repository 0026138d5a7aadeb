"""Benches: the tensors of one task on this device (a layer's cell, an update, a loss), run like in the runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from layerwise.geometry import Box
from layerwise.graph.layer import Layer
from layerwise.measure.timing import Reading, Stopwatch
from layerwise.ops.fused import local_stages, needed_box, run_stages
from layerwise.tensorfile import dtype_name

SCALE = 0.05  # of random values, so that activations and gradients stay normal numbers


@dataclass(frozen=True, slots=True)
class CellSpec:
    """A cell to measure."""

    layer: Layer
    cell: Box  # in the layer's iteration space
    owned: Box  # in its output; differs if the contraction dimension is split
    needs_grad: tuple[bool, ...]  # inputs that need gradients
    shared: tuple[bool, ...]  # stages that sum statistics with other cells
    uses: int  # number of gradients of the output that are added up


@dataclass(frozen=True, slots=True)
class UpdateSpec:
    """An optimizer's step over parameters with these numbers of elements."""

    optimizer: str
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LossSpec:
    """The mean loss of outputs of these shapes, and its gradient: of classes in dimension 1, or the mean of one."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...] = ()  # of the outputs; (): the model's own


@dataclass(frozen=True, slots=True)
class Mode:
    """How kernels run."""

    device: torch.device
    dtype: torch.dtype
    autocast: torch.dtype | None = None  # the 16-bit type of mixed precision
    channels_last: bool = False

    def filled(self, shape: Sequence[int], dtype: str = "float32", bound: int = 2) -> Tensor:
        """Random values of the mode's type (16 bits if `dtype` is), or integers below `bound`."""
        if "float" not in dtype:
            return torch.randint(bound, tuple(shape), device=self.device).to(getattr(torch, dtype))
        kind = self.autocast if self.autocast is not None and dtype == dtype_name(self.autocast) else self.dtype
        x = torch.randn(tuple(shape), device=self.device, dtype=kind) * SCALE
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        return x.contiguous(memory_format=formats[x.dim()]) if self.channels_last and x.dim() in formats else x

    def mixed(self) -> AbstractContextManager[object]:
        """The context that kernels run in."""
        return nullcontext() if self.autocast is None else torch.autocast(self.device.type, self.autocast)


class Bench:
    """The tensors of one cell, with its forward and backward pass. Created once, called often."""

    def __init__(self, spec: CellSpec, mode: Mode) -> None:
        layer, space = spec.layer, spec.layer.space
        self.spec, self.mode = spec, mode
        self.stages = local_stages(layer.stages, layer.specs, spec.cell, spec.owned, self._all_reduce)
        needs = zip(layer.specs, space.needs, space.epilogue_inputs, strict=True)
        owned = {True: spec.owned, False: spec.cell}  # by whether it belongs to an epilogue
        inputs = [
            mode.filled(needed_box(maps, owned[epilogue]).shape, tensor.dtype, _bound(layer))
            for tensor, maps, epilogue in needs
        ]
        shapes = [needed_box(p.maps, owned[p.epilogue]).shape for p in space.parameters]
        values = [
            mode.filled(shape) if p.trainable else torch.ones(shape, device=mode.device, dtype=mode.dtype)
            for p, shape in zip(space.parameters, shapes, strict=True)
        ]
        self.inputs = inputs + [values[i] for i in layer.tied]  # tied parameters arrive over an edge
        self.parameters = [
            None if i in layer.tied else nn.Parameter(value) if p.trainable else value
            for i, (p, value) in enumerate(zip(space.parameters, values, strict=True))
        ]
        self.trained = [p for p in self.parameters if isinstance(p, nn.Parameter)]
        self.differentiable = layer.out.differentiable and (bool(self.trained) or any(spec.needs_grad))
        self.reduce = (
            _reduction(spec) if spec.cell.hi[: len(layer.out.shape)] != spec.owned.hi or _partial(spec) else None
        )
        self.gradients = (
            [mode.filled(spec.owned.shape, layer.out.dtype) for _ in range(spec.uses)] if self.differentiable else []
        )
        self.leaves: list[Tensor] = []
        self.out: Tensor | None = None

    @property
    def recent(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """The layer before has just computed the inputs; the layer after, the output's gradients."""
        return self.inputs, self.gradients

    def forward(self) -> None:
        """Computes the output as `Executor.forward` does for one layer."""
        with torch.set_grad_enabled(self.differentiable):
            self.leaves = [
                x.detach().requires_grad_() if needs_grad else x.detach()
                for x, needs_grad in zip(self.inputs, self.spec.needs_grad, strict=True)
            ]
            count = len(self.spec.layer.specs)
            tied = iter(self.leaves[count:])
            values = [next(tied) if p is None else p for p in self.parameters]
            with self.mode.mixed():
                self.out = run_stages(
                    self.stages,
                    self.leaves[:count],
                    values,
                    training=True,
                    seed=lambda number: number,
                    reduce=self.reduce,
                )

    def backward(self) -> None:
        """Computes gradients as `Executor.backward` does for one layer; those of parameters stay, as in a step."""
        if not self.differentiable:
            return
        assert self.out is not None
        gradient = self.gradients[0]
        for other in self.gradients[1:]:
            gradient = gradient + other
        targets = [leaf for leaf in self.leaves if leaf.requires_grad] + self.trained
        out, self.out = self.out, None
        gradients = torch.autograd.grad(out, targets, gradient.to(out.dtype), allow_unused=True)
        of_parameters = gradients[len(targets) - len(self.trained) :]
        for p, g in zip(self.trained, of_parameters, strict=True):
            p.grad = g
        self.leaves = []

    def forget(self) -> None:
        """Drops output and gradients, as `zero_grad` does before the next step."""
        self.out = None
        for p in self.trained:
            p.grad = None

    def _all_reduce(self, number: int) -> Callable[[Tensor], Tensor] | None:
        return torch.Tensor.contiguous if self.spec.shared[number] else None


def _bound(layer: Layer) -> int:
    """The bound of integer inputs: rows of an embedding, classes of a loss."""
    main, x = layer.main, layer.stages[0].specs[:1]
    if main.kind == "loss" and len(x[0].shape) > 1:
        return x[0].shape[1]
    return int(getattr(main, "count", 2))


def _partial(spec: CellSpec) -> bool:
    """True if the cell has only part of a reduction."""
    layer = spec.layer
    return any(spec.cell.lo[k] > 0 or spec.cell.hi[k] < layer.space.dims[k].extent for k in layer.space.reductions)


def _reduction(spec: CellSpec) -> Callable[[Tensor], Tensor]:
    """A device's local work in a reduce-scatter: it cuts its partial sums, and adds the others'."""
    layer = spec.layer
    rank = len(layer.out.shape)
    cell = Box(spec.cell.lo[:rank], spec.cell.hi[:rank])
    axis = next((i for i in range(rank) if cell.shape[i] != spec.owned.shape[i]), 0)
    others = cell.shape[axis] // max(1, spec.owned.shape[axis]) - 1
    owned = spec.owned.slices(cell)

    def reduce(partial: Tensor) -> Tensor:
        rest = [p.contiguous() for p in partial.detach().chunk(others + 1, axis)]
        total = partial[owned].clone()
        for part in rest[1:]:
            if part.shape == total.shape:
                total = total + part
        return total

    return reduce


def optimizer_of(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that `layerwise.run` makes."""
    if name == "adam":
        return torch.optim.Adam(parameters, 1e-3)
    return torch.optim.SGD(parameters, 1e-3, 0.9 if name == "momentum" else 0.0)


class UpdateBench:
    """An optimizer's step, run by `forward`; it has no backward pass, and nothing to drop."""

    recent = (), None  # gradients were computed long ago, except the last

    def __init__(self, spec: UpdateSpec, mode: Mode) -> None:
        self.parameters = [nn.Parameter(mode.filled((size,))) for size in spec.sizes]
        self.values = [mode.filled((size,)) for size in spec.sizes]
        self.optimizer = optimizer_of(spec.optimizer, self.parameters)

    def forward(self) -> None:
        """The step, without the fixed overhead of any step (`overhead`)."""
        for p, g in zip(self.parameters, self.values, strict=True):
            p.grad = g
        self.optimizer.step()

    def backward(self) -> None:
        """Nothing."""

    forget = backward


class LossBench:
    """The loss as `layerwise.run` computes it: cross-entropy over dimension 1 in float32, means added up."""

    def __init__(self, spec: LossSpec, mode: Mode) -> None:
        dtypes = spec.dtypes or ("float32",) * len(spec.shapes)
        self.outputs = [
            mode.filled(shape, dtype).requires_grad_() for shape, dtype in zip(spec.shapes, dtypes, strict=True)
        ]
        self.targets = [
            torch.randint(shape[1], (shape[0], *shape[2:]), device=mode.device) if len(shape) > 1 else None
            for shape in spec.shapes
        ]
        self.total: Tensor | None = None

    @property
    def recent(self) -> tuple[Sequence[Tensor], None]:
        """The outputs; backward follows at once."""
        return self.outputs, None

    def forward(self) -> None:
        """Computes the loss; outputs leave the runtime as copies."""
        copies = [out.clone() for out in self.outputs]
        losses = [
            x.mean() if target is None else nn.functional.cross_entropy(x.float() if x.itemsize < 4 else x, target)
            for x, target in zip(copies, self.targets, strict=True)
        ]
        self.total = torch.stack(losses).sum()

    def backward(self) -> None:
        """Computes the gradients, scaled to the mean over the global batch."""
        assert self.total is not None
        for gradient in torch.autograd.grad(self.total, self.outputs):
            gradient.mul_(0.5)

    def forget(self) -> None:
        """Before the next step."""
        self.total = None


TIMES = 4  # the size of a core's own cache
USUAL_BYTES = 2**20


@cache
def own_cache_bytes(where: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Bytes of the largest cache that a core has to itself; a typical size if Linux does not tell."""
    try:
        return int((where / "index2" / "size").read_text(encoding="ascii").strip().removesuffix("K")) * 1024
    except (OSError, ValueError):
        return USUAL_BYTES


@cache
def _buffer() -> Tensor:
    return torch.ones(TIMES * own_cache_bytes() // 4)


def leave_only(recent: Sequence[Tensor] | None, device: torch.device) -> None:
    """Fills the cache with these tensors only; None: leaves it as it is.

    A layer that is timed again and again finds all of its tensors in the cache, and looks faster than in a step, where
    everything else passes through the cache in between. So before each sample it reads a buffer larger than a core's
    own cache, and then the tensors that the step would just have written. On a GPU it does nothing, as most tensors are
    larger than the cache.
    """
    if recent is None or device.type != "cpu":
        return
    _buffer().sum()
    for tensor in recent:
        tensor.sum()


def cold(bench: Bench | UpdateBench | LossBench, stopwatch: Stopwatch, *, wanted: bool = True) -> Reading:
    """Times a forward and a backward pass, each with a step's tensors in the cache, and drops the results.

    wanted: False leaves the cache as it is.
    """
    before = [partial(leave_only, recent if wanted else None, stopwatch.device) for recent in (*bench.recent, None)]
    reading = stopwatch([bench.forward, bench.backward, bench.forget], before)
    forward, backward, forget = reading.seconds
    return Reading((forward, backward + forget), reading.spread, reading.samples)
